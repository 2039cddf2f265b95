"""Every op against its FP64 oracle, and what poison in its outputs and scratch buffers shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, group_by, select, some
from fasttrack.records import NumericsRecord

#: Every op is run on each: what a random normal input does not reach.
FAMILIES = ("normal", "outliers", "denormals", "negative_zero", "coded")


def error(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Every output of every op within its derived bound, on every input family; every described op covered."""
    name = "numerics.error"
    found = select(records, NumericsRecord)
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No op was compared with its oracle.")
    worst = max(found, key=lambda r: r.worst if r.worst == r.worst else float("inf"))
    by_op = group_by(found, lambda r: r.op)
    missing = [op for op in scope.description.ops if op not in by_op]
    missing += [
        f"{op} on {family}"
        for op in scope.description.ops
        for family in FAMILIES
        if op in by_op and family not in {r.family for r in by_op[op]}
    ]
    bad = [r for r in found if not (r.worst <= 1.0 and r.failing == 0)]
    exact = sum(r.max_abs_error == 0 for r in found if r.family == "coded")
    numbers = [
        Number("worst error / bound", worst.worst, f"{worst.op}, {worst.case}, {worst.family}", "<= 1"),
        Number("failing elements", sum(r.failing for r in found), f"of {sum(r.elements for r in found)}", "0"),
        Number("ops covered", len([op for op in scope.description.ops if op in by_op]), "ops", "all described"),
        Number("coded outputs without any error", exact, f"of {sum(r.family == 'coded' for r in found)}", ""),
    ]
    if bad:
        where = some(f"{r.op} {r.output} ({r.case}, {r.family}): {r.worst:.3g} x bound" for r in bad)
        return GateResult(gate=name, verdict="fail", reason=f"Error beyond its bound: {where}.", numbers=numbers)
    if missing:
        return GateResult(
            gate=name, verdict="inconclusive", reason=f"Not compared with an oracle: {some(missing)}.", numbers=numbers
        )
    reason = "Every output of every op lies within its derived bound on every input family."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def poison(scope: Scope, records: Sequence[Any]) -> GateResult:
    """No poison survives in outputs, nothing else is written, and the poison's value changes no bit."""
    name = "numerics.poison"
    found = select(records, NumericsRecord)
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No op was run with poisoned buffers.")
    survived = [r for r in found if r.nan_outputs]
    changed = [r for r in found if r.changed_untouched]
    depends = [r for r in found if not r.rerun_identical]
    numbers = [
        Number("poisoned elements that survived", sum(r.nan_outputs for r in found), "elements", "0"),
        Number("elements changed that should not be", sum(r.changed_untouched for r in found), "elements", "0"),
        Number("outputs that depend on the poison", len(depends), f"of {len(found)}", "0"),
    ]
    complaints = [
        f"{text}: {some(f'{r.op} {r.output} ({r.case}, {r.family})' for r in group)}"
        for group, text in (
            (survived, "not written"),
            (changed, "written outside its outputs"),
            (depends, "reads what it should not"),
        )
        if group
    ]
    if complaints:
        return GateResult(gate=name, verdict="fail", reason="; ".join(complaints) + ".", numbers=numbers)
    reason = "No poison survived, nothing else was written, and reruns with other poison are bit-identical."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)
