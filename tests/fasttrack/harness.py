"""Runs units of the toy manifest the way the runner does, and gives the records back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import unit_run
from fake_target import TARGET

from fasttrack.checks.base import Unit
from fasttrack.gates import Scope
from fasttrack.manifest.model import Manifest
from fasttrack.target import Engine, EngineSpec

TOY: dict[str, Any] = {
    "schema_version": 1,
    "name": "toy",
    "target": "toy",
    "engine": {"kind": "embedded"},
    "scope": [{"name": "plain", "tp": [1, 2], "requests": [1, 4, 16]}],
    "contexts": {"short": {"min": 1, "max": 64}},
    "probes": [
        {"name": "m17", "step": "decode", "tp": 2, "requests": 17, "reason": "too_many_rows"},
        {"name": "prefill", "step": "prefill", "tp": 2, "requests": 3},
        {"name": "mixed", "step": "mixed", "tp": 2, "requests": 4, "reason": "not_pure_decode"},
        {"name": "tp3", "step": "decode", "tp": 3, "requests": 1, "expect": "refused"},
    ],
    "tasks": [
        {"name": "aime", "task": "aime25", "generated": True},
        {"name": "gpqa", "task": "gpqa_diamond", "generated": True, "style": "choice"},
        {"name": "mrcr", "task": "mrcr", "generated": True},
    ],
    "gates": {
        "required": ["isolation.scope_coverage"],
        "optional": ["evals.fidelity", "evals.free_running", "evals.task_scores"],
    },
    "tiers": {"smoke": {"minutes": 1, "fidelity_sequences": 8, "fidelity_tokens": 12, "task_items": 3}},
}


class Sabotaged:
    """The toy target with its optimised arm replaced by a faulty one."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(TARGET, name)

    def engine(self, spec: EngineSpec) -> Engine:
        from dataclasses import replace

        arm = f"sabotaged:{self.fault}" if spec.arm == "optimized" else spec.arm
        return TARGET.engine(replace(spec, arm=arm))


def toy_scope(**changes: Any) -> Scope:
    return Scope(Manifest.model_validate({**TOY, **changes}), "smoke", TARGET.describe())


def run_units(
    scope: Scope, folder: Path, keep: Callable[[Unit], bool] = lambda unit: True, *, check: str, target: Any = TARGET
) -> list[Any]:
    """The records of the units of ``check`` that ``keep`` accepts; the toy target unless told otherwise."""
    return unit_run.run_units(scope, folder, keep, check=check, target=target)
