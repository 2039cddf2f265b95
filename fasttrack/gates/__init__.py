"""Verdicts from records. A leaf: no torch, no measurement, the same answer from the same records anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fasttrack.errors import UsageError
from fasttrack.gates.base import Gate, GateResult, Number, Scope, Verdict
from fasttrack.gates.evals import fidelity, routing
from fasttrack.gates.evals_tasks import task_scores
from fasttrack.gates.evals_text import acceptance, free_running
from fasttrack.gates.features import FEATURE_GATES
from fasttrack.gates.isolation import a_a, off_is_off, probes, refusals, scope_coverage
from fasttrack.gates.kernels import kernels
from fasttrack.gates.named_cells import named_cells
from fasttrack.gates.numerics import error, poison
from fasttrack.gates.performance import accounting, speedup
from fasttrack.gates.witnesses import agreement, rank_agreement

GATES: dict[str, Gate] = {
    "numerics.error": error,
    "numerics.poison": poison,
    "isolation.scope_coverage": scope_coverage,
    "isolation.probes": probes,
    "isolation.witnesses": agreement,
    "isolation.rank_agreement": rank_agreement,
    "isolation.off_is_off": off_is_off,
    "isolation.a_a": a_a,
    "isolation.refusals": refusals,
    **FEATURE_GATES,
    "evals.fidelity": fidelity,
    "evals.routing": routing,
    "evals.free_running": free_running,
    "evals.acceptance": acceptance,
    "evals.task_scores": task_scores,
    "performance.accounting": accounting,
    "performance.named_cells": named_cells,
    "performance.kernels": kernels,
    "performance.speedup": speedup,
}

Overall = Literal["pass", "fail", "inconclusive"]


def check_names(names: Sequence[str], *, where: str = "") -> None:
    """:class:`UsageError` when a manifest selects a gate that does not exist."""
    for name in names:
        if name not in GATES:
            raise UsageError(f"unknown gate {name!r}", where=where, expected=f"one of: {', '.join(GATES)}")


def evaluate(scope: Scope, records: Sequence[Any]) -> list[GateResult]:
    """The verdicts of the gates the manifest selects, required ones first, in manifest order."""
    selected = [*scope.manifest.gates.required, *scope.manifest.gates.optional]
    check_names(selected, where="gates")
    return [GATES[name](scope, records) for name in selected]


def overall(scope: Scope, results: Sequence[GateResult], unfinished: Sequence[str] = ()) -> Overall:
    """``pass`` iff every required gate passed and every planned unit finished; any required failure wins.

    ``unfinished`` names the planned units without a finished attempt: what they would have found is unknown.
    """
    verdicts = {result.gate: result.verdict for result in results}
    required = [verdicts.get(name, "not_run") for name in scope.manifest.gates.required]
    if "fail" in required:
        return "fail"
    passed = bool(required) and all(v == "pass" for v in required)
    return "pass" if passed and not unfinished else "inconclusive"


__all__ = ["GATES", "Gate", "GateResult", "Number", "Overall", "Scope", "Verdict", "check_names", "evaluate", "overall"]
