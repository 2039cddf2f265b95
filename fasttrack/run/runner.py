"""Run an experiment: plan, execute unit by unit, evaluate the gates.

Every record is flushed, every attempt journalled. A run that was killed is found again by its identity
(manifest, seeds, code with its uncommitted difference, packages, machine) and continued; finished units are
not repeated.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from fasttrack import SCHEMA_VERSION
from fasttrack.bundle.verdicts import gates_document
from fasttrack.checks import CHECKS
from fasttrack.checks.base import Context, Unit
from fasttrack.engines.cache import EngineCache
from fasttrack.environment import checkout_root, collect_environment, source_state
from fasttrack.errors import EvidenceError, FasttrackError, Interrupted, UsageError
from fasttrack.gates import GateResult, Scope, evaluate, overall
from fasttrack.manifest import Manifest, load_manifest, manifest_digest, place
from fasttrack.plan.planner import Plan, make_plan
from fasttrack.records import RecordReader, RecordWriter
from fasttrack.records.digest import UnitDigest
from fasttrack.run.folder import (
    FolderTaken,
    RunFolder,
    find_unfinished,
    identity,
    new_folder,
    usable_parent,
    write_atomic,
    write_json,
)
from fasttrack.run.journal import now
from fasttrack.run.preflight import check_options, preflight
from fasttrack.run.progress import Reporter, Silent
from fasttrack.run.seeds import Seeds
from fasttrack.target import Target, TargetDescription, find_target
from fasttrack.tasks.sources import bind_data, data_digest


@dataclass(frozen=True)
class Request:
    """What a user asked of ``fasttrack validate``."""

    manifest: Path
    tier: str | None = None
    checks: tuple[str, ...] = ()
    runs: Path = Path("runs")
    run_dir: Path | None = None  #: exactly this folder: new, or an unfinished run of the same identity
    fresh: bool = False  #: never resume
    head: str | None = None
    nonce: str | None = None
    data: tuple[tuple[str, str], ...] = ()  #: (task, path of its data), which wins over the manifest's
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    folder: Path
    verdict: str  #: "pass", "fail", "inconclusive"
    results: list[GateResult]
    resumed: bool
    unfinished: tuple[str, ...] = ()  #: planned units without a finished attempt: no such run passes


@dataclass(frozen=True)
class Prepared:
    """A manifest that passed every check that needs no engine."""

    manifest: Manifest
    raw: bytes
    target: Target
    description: TargetDescription
    plan: Plan


def prepare(request: Request) -> Prepared:
    """Load and hold the manifest against its target; plan. Raises with one line; writes nothing."""
    manifest, _ = load_manifest(request.manifest)
    target = find_target(manifest.target, where=place(request.manifest, "target"))
    description = target.describe()
    manifest, raw = load_manifest(request.manifest, description)
    manifest = bind_data(manifest, dict(request.data), request.manifest.parent)
    plan = make_plan(manifest, description, request.tier, request.checks, where=str(request.manifest))
    check_options(plan, target, request.manifest)
    return Prepared(manifest, raw, target, description, plan)


def validate(request: Request, reporter: Reporter | None = None) -> Outcome:
    """Run, or continue, the experiment and judge it."""
    prepared = prepare(request)
    if prepared.plan.gap:
        raise EvidenceError(f"{request.manifest}: {prepared.plan.gap}; nothing was run")
    folder_argument = request.run_dir or request.runs
    usable_parent(folder_argument, "--run" if request.run_dir else "--runs")
    checkpoint = preflight(prepared.plan, prepared.target, request.manifest)
    folder, resumed, seeds, lock = _open_folder(request, prepared, checkpoint)
    with lock:
        try:
            return _run(prepared, folder, resumed, seeds, reporter or Silent())
        except KeyboardInterrupt:
            raise Interrupted(_how_to_continue(prepared, folder, request)) from None


def _how_to_continue(prepared: Prepared, folder: RunFolder, request: Request) -> str:
    units, finished = prepared.plan.units, folder.history().finished
    done = sum(unit.name in finished for unit in units)
    same = "the same command without --fresh" if request.fresh else "the same command"
    return f"interrupted: {done} of {len(units)} units finished in {folder.path}; {same} continues there"


def _run(prepared: Prepared, folder: RunFolder, resumed: bool, seeds: Seeds, reporter: Reporter) -> Outcome:
    _execute(prepared, folder, seeds, reporter)
    results = judge(prepared.plan.scope, folder)
    finished = folder.history().finished
    unfinished = tuple(unit.name for unit in prepared.plan.units if unit.name not in finished)
    verdict = overall(prepared.plan.scope, results, unfinished)
    facts = folder.facts()
    write_json(folder.path / "run.json", {**facts, "finished": now()})
    write_atomic(folder.path / "gates.json", gates_document(results, verdict).decode("ascii"))
    return Outcome(folder.path, verdict, results, resumed, unfinished)


def judge(scope: Scope, folder: RunFolder) -> list[GateResult]:
    """Evaluate every declared gate on the records of finished units."""
    history = folder.history()
    records = list(RecordReader(folder.records, history.finished))
    return evaluate(scope, records)


def _open_folder(request: Request, prepared: Prepared, checkpoint: str) -> tuple[RunFolder, bool, Seeds, TextIO]:
    source = source_state(checkout_root())
    environment = collect_environment(source)
    digest = manifest_digest(prepared.raw)
    seeds = Seeds(request.head or source.commit, digest, request.nonce)
    facts = {
        "schema_version": SCHEMA_VERSION,
        "name": prepared.manifest.name,
        "tier": prepared.plan.tier,
        "checks": list(prepared.plan.checks),
        "seeds": seeds.to_json(),
        "target": asdict(prepared.description),
        "plan": [_unit_json(unit) for unit in prepared.plan.units],
        "data": {task.name: digest for task in prepared.manifest.tasks if (digest := data_digest(task))},
        "argv": list(request.argv),
    }
    same = {key: facts[key] for key in ("tier", "checks", "seeds", "plan", "data")}
    facts["identity"] = identity(
        {**same, "environment": environment, "diff": source.diff_sha256, "checkpoint": checkpoint}
    )
    existing = _existing(request, str(facts["identity"]))
    if existing is not None:
        lock = existing.lock()
        if lock is not None:
            return existing, True, seeds, lock
        if request.run_dir:
            raise UsageError("is in use by another fasttrack", where=f"--run {existing.path}", expected="a free folder")
    facts["started"] = now()
    folder, lock = _new(request, prepared.manifest.name, prepared.raw, facts, environment, source.diff)
    return folder, False, seeds, lock


def _new(
    request: Request, name: str, raw: bytes, facts: dict[str, Any], environment: dict[str, Any], diff: str
) -> tuple[RunFolder, TextIO]:
    """A folder of this process, locked. A name that another process took first is no reason to stop."""
    while True:
        folder = RunFolder(request.run_dir) if request.run_dir else new_folder(request.runs, name)
        try:
            return folder, folder.create(raw, facts, environment, diff)
        except FolderTaken:
            if request.run_dir:
                raise


def _existing(request: Request, wanted: str) -> RunFolder | None:
    """The run to continue, if any; a folder that holds something else is refused."""
    if request.run_dir is None:
        return None if request.fresh or not request.runs.is_dir() else find_unfinished(request.runs, wanted)
    folder = RunFolder(request.run_dir)
    if not folder.path.exists() or not any(folder.path.iterdir()):
        return None
    if folder.finished:
        raise FasttrackError(f"--run {folder.path}: holds a finished run; expected a new or unfinished one")
    if not (folder.path / "run.json").exists() or folder.facts().get("identity") != wanted or request.fresh:
        raise FasttrackError(
            f"--run {folder.path}: holds another run (manifest, code, packages, machine or seeds differ);"
            " expected an empty folder or a new name"
        )
    return folder


def _unit_json(unit: Unit) -> dict[str, Any]:
    cell = str(unit.cell) if unit.cell is not None else None
    return {"name": unit.name, "check": unit.check, "cell": cell, "arms": list(unit.arms)}


def _execute(prepared: Prepared, folder: RunFolder, seeds: Seeds, reporter: Reporter) -> None:
    history = folder.history()
    todo = [unit for unit in prepared.plan.units if unit.name not in history.finished]
    scope = prepared.plan.scope
    engines = EngineCache(prepared.target, scope, folder.path, seeds.seed("engine"))
    reporter.begin(len(todo), sum(unit.cost_s for unit in todo))
    try:
        for unit in todo:
            reporter.unit(unit)
            context = Context(
                scope=scope,
                target=prepared.target,
                engines=engines,
                workdir=folder.path,
                unit=unit,
                attempt=history.attempts.get(unit.name, 0) + 1,
                seed=seeds.seed,
                write=_no_writer,
                progress=reporter.step,
            )
            try:
                count = _attempt(folder, context)
            except BaseException as error:
                reporter.done(unit, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
                raise
            reporter.done(unit, f"{count} records")
    finally:
        reporter.end()
        engines.close()


def _no_writer(record: Any) -> None:
    raise AssertionError("a record was written outside an attempt")


def _attempt(folder: RunFolder, context: Context) -> int:
    """One attempt at one unit, journalled whatever happens; returns the number of records."""
    unit, attempt, journal = context.unit, context.attempt, folder.journal
    journal.add("started", unit.name, attempt)
    digest = UnitDigest()
    try:
        with RecordWriter(folder.records / f"{unit.check}.jsonl") as writer:
            context.write = lambda record: digest.update(writer.write(record))
            CHECKS[unit.check].run(unit, context)
    except KeyboardInterrupt:
        journal.add("interrupted", unit.name, attempt)
        raise
    except FasttrackError as error:
        journal.add("failed", unit.name, attempt, error=str(error))
        raise
    except BaseException as error:
        folder.logs.mkdir(exist_ok=True)
        log = folder.logs / f"{hashlib.sha256(unit.name.encode()).hexdigest()[:12]}-{attempt}.log"
        write_atomic(log, traceback.format_exc())
        journal.add("failed", unit.name, attempt, error=f"{type(error).__name__}: {error}", log=f"logs/{log.name}")
        print(f"fasttrack: unit {unit.name} crashed; traceback in {log}", file=sys.stderr)
        raise
    journal.add("finished", unit.name, attempt, records=digest.records, sha256=digest.hexdigest())
    return digest.records


def exit_code(verdict: str) -> int:
    return {"pass": 0, "fail": 1}.get(verdict, 3)
