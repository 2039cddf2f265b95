"""Goals beside results: how near each kernel comes to its read floor, and to a library's kernel of the same product."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, select, some
from fasttrack.records import PerformanceRecord


def kernels(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Every kernel of the claimed shards was timed; missed goals are listed, and count where the manifest says so.

    A goal is a fraction of the read floor of the same run, at least, or a time, at most.
    """
    name = "performance.kernels"
    found = [r for r in select(records, PerformanceRecord) if r.metric == "kernel_time"]
    own = {str(r.details["kernel"]): r for r in found if r.arm == "optimized"}
    library = {str(r.details["kernel"]): r for r in found if r.arm == "stock"}
    if not own:
        return GateResult(gate=name, verdict="not_run", reason="No kernel was timed.")
    kinds = {r.evidence.kind for r in found}
    if not kinds <= {"shard", "measured"}:
        reason = f"Kernel times are stamped {some(kinds)}: they say nothing about the hardware."
        return GateResult(gate=name, verdict="not_run", reason=reason)
    own = {kernel: own[kernel] for kernel in sorted(own, key=natural)}
    goals = [k for k, r in own.items() if goal_text(r)]
    missed = [k for k in goals if not met(own[k])]
    slower = [k for k, r in own.items() if k in library and r.value > library[k].value]
    required = scope.manifest.margins.kernel_goals
    free = "reported only"
    limit = f">= {required:.0%} of the goals" if required is not None else free
    compared = sum(k in own for k in library)
    numbers = [
        Number("kernels timed", len(own), "kernels at one size each", "all of the claimed cells"),
        Number("goals met", len(goals) - len(missed), f"of {len(goals)}", limit),
        Number("kernels at least as fast as the library's", compared - len(slower), f"of {compared} compared", free),
        *(_number(f"missed: {k}", own[k], library.get(k), goal_text(own[k])) for k in missed),
        *(_number(f"slower: {k}", own[k], library[k], free) for k in slower),
    ]
    broken = [k for k, r in own.items() if not r.value > 0 or r.samples < 1]
    if broken:
        return GateResult(gate=name, verdict="fail", reason=f"No time: {some(broken)}.", numbers=numbers)
    untimed = _untimed(scope, own.values())
    if untimed:
        reason = f"Not timed: {some(untimed)}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    listed = f"; missed: {some(missed, most=12)}" if missed else ""
    reason = f"{len(goals) - len(missed)} of {len(goals)} goals met{listed}."
    failed = required is not None and len(goals) - len(missed) < required * len(goals)
    return GateResult(gate=name, verdict="fail" if failed else "pass", reason=reason, numbers=numbers)


def natural(name: str) -> list[tuple[str, int]]:
    """Sorts ``m8`` before ``m16``."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D+)(\d*)", name)]


def goal_text(record: PerformanceRecord) -> str:
    """``>= 90% of the floor and <= 5 us``, or nothing."""
    fraction, seconds = record.details.get("goal_fraction"), record.details.get("goal_s")
    parts = [f">= {fraction:.0%} of the floor"] if fraction is not None else []
    parts += [f"<= {1e6 * seconds:.3g} us"] if seconds is not None else []
    return " and ".join(parts)


def part_of_floor(record: PerformanceRecord) -> float:
    """Part of the read floor's speed that was reached."""
    return float(record.details["floor_s"]) / record.value if record.value > 0 else 0.0


def percent(record: PerformanceRecord, places: int = 1) -> str:
    """:func:`part_of_floor` rounded down, so that a missed goal does not look met."""
    steps = 10**places
    return f"{math.floor(100 * steps * part_of_floor(record)) / steps:.{places}f}%"


def met(record: PerformanceRecord) -> bool:
    """Whether the kernel reached all of its goals."""
    fraction, seconds = record.details.get("goal_fraction"), record.details.get("goal_s")
    return (fraction is None or part_of_floor(record) >= fraction) and (seconds is None or record.value <= seconds)


def _number(kernel: str, record: PerformanceRecord, library: PerformanceRecord | None, goal: str) -> Number:
    spread = f"{1e6 * record.details['p10_s']:.2f} to {1e6 * record.details['p90_s']:.2f}"
    text = f"us, 10th to 90th percentile {spread}, {percent(record)} of the floor, {record.samples} replays"
    if library is not None:
        text += f", {library.details['measured']} {1e6 * library.value:.2f}"
    return Number(kernel, round(1e6 * record.value, 3), text, goal)


def _untimed(scope: Scope, timed: Any) -> list[str]:
    """Claimed (TP, rows) at which an op that was timed elsewhere was not."""
    seen = {(r.details["op"], r.details["tp"], r.details["rows"]) for r in timed}
    missing = []
    for op, everywhere in sorted({(op, tp == 0) for op, tp, _ in seen}):
        for cell in scope.cells():
            tp = 0 if everywhere else cell.tp
            if (op, tp, cell.rows) not in seen:
                missing.append(f"{op} at {cell.rows} rows" + (f", TP {tp}" if tp else ""))
    return list(dict.fromkeys(missing))
