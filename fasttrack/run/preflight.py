"""Refuse before a run folder exists what can be refused: data sets, checkpoints, options of the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from fasttrack.checks import CHECKS
from fasttrack.engines.cache import EngineCache
from fasttrack.engines.vllm import llm_arguments
from fasttrack.errors import UsageError
from fasttrack.manifest import place
from fasttrack.plan.planner import Plan
from fasttrack.target import DeploymentRefused, Target


def preflight(plan: Plan, target: Target, path: Path) -> str:
    """Read the tasks' data and build the embedded engines once; returns the digest of the checkpoint.

    Engines are those of both arms, for the first cell without drafts and the first with them, under each set of
    options that the manifest at ``path`` gives. Engines of other kinds are too heavy to start twice, and a plan of
    kernels alone (of a shard that no engine can hold) runs none: the digest is empty. Raises :class:`UsageError` with
    the manifest's line of an option that the target does not take.
    """
    for name in plan.checks:
        check_data = getattr(CHECKS[name], "preflight", None)
        if check_data is not None:
            check_data(plan.manifest, plan.tier, path.parent)
    if plan.manifest.engine.kind != "embedded" or not any(unit.engine for unit in plan.units):
        return ""
    cells = {bool(cell.draft_length): cell for cell in reversed(plan.scope.cells())}
    checkpoint = ""
    with tempfile.TemporaryDirectory() as folder:
        engines = EngineCache(target, plan.scope, Path(folder), seed=0)
        try:
            for (group, options), cell, arm in product(_option_sets(plan), cells.values(), ("stock", "optimized")):
                drafts = cell.draft_length
                acceptance = "measured" if drafts else "none"
                try:
                    engine = engines.get(
                        arm, tp=cell.tp, dcp=1, draft_length=drafts, acceptance=acceptance, options=options
                    )
                except DeploymentRefused:
                    continue  # evidence, which the isolation check records
                except UsageError as error:
                    raise _placed(error, path, group, options) from None
                checkpoint = checkpoint or engine.info().checkpoint
        finally:
            engines.close()
    return checkpoint


def check_options(plan: Plan, target: Target, path: Path) -> None:
    """Refuse what can be told from the manifest alone: options that vLLM would not get from it as they are."""
    if plan.manifest.engine.kind != "vllm":
        return
    drafted = {bool(cell.draft_length): cell for cell in reversed(plan.scope.cells())}
    engines = EngineCache(target, plan.scope, Path("."), seed=0)
    for cell in drafted.values():
        spec = engines.spec(
            "stock", tp=cell.tp, dcp=cell.dcp, draft_length=cell.draft_length, acceptance="none", options={}
        )
        try:
            llm_arguments(spec, plan.description)
        except UsageError as error:
            raise _placed(error, path, "options", {}) from None


def _option_sets(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key below ``engine``, options on top of ``engine.options``): the plain ones, then what the manifest adds."""
    yield "options", {}
    for group in ("exact_options", "feature_options"):
        if options := getattr(plan.manifest.engine, group):
            yield group, options


def _placed(error: UsageError, path: Path, group: str, options: dict[str, Any]) -> UsageError:
    """The target's complaint about ``engine.options.NAME``, with the manifest's line of that name."""
    parts = error.where.split(".")
    if parts[:2] != ["engine", "options"]:
        return error
    own = group if parts[2:3] and parts[2] in options else "options"
    return UsageError(error.what, where=place(path, "engine", own, *parts[2:]), expected=error.expected)
