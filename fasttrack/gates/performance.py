"""Counts add up, and a speed-up is spoken of only where the arms differ in the switch alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, configuration_differences, group_by, select, some
from fasttrack.records import EngineRecord, GenerationRecord, PerformanceRecord, StepRecord

PURE = {"decode", "verify"}


def accounting(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Tokens and steps of every metric are those of the ledger; windows without prefill hold pure decode only."""
    name = "performance.accounting"
    found = [r for r in select(records, PerformanceRecord) if r.metric != "kernel_time"]
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No performance was recorded.")
    steps = group_by(select(records, StepRecord), lambda s: (s.unit, s.arm, s.run))
    generated = group_by(select(records, GenerationRecord), lambda g: (g.unit, g.arm, g.run))
    wrong, uncounted = list[str](), list[str]()
    for run, own in group_by(found, lambda r: (r.unit, r.arm, str(r.details.get("run")))).items():
        ledger = steps.get(run, [])
        where = f"{run[2]}"
        if not ledger:
            uncounted.append(where)
            continue
        emitted = sum(s.emitted for s in ledger)
        tokens = {g.request: len(g.token_ids) for g in generated.get(run, [])}
        if emitted != sum(tokens.values()):
            wrong.append(f"{where}: {emitted} tokens in the ledger, {sum(tokens.values())} came back")
        for record in own:
            complaint = _miscounted(record, ledger, tokens)
            if complaint:
                wrong.append(f"{where} {record.metric}: {complaint}")
    cells = set.intersection(*({str(r.cell) for r in found if r.arm == arm} for arm in ("stock", "optimized")))
    unmeasured = [str(c) for c in scope.cells() if str(c) not in cells]
    numbers = [
        Number("metrics that miscount", len(wrong), f"of {len(found)}", "0"),
        Number("cells with metrics of both arms", len(cells), f"of {len(scope.cells())}", "all"),
    ]
    if wrong:
        return GateResult(gate=name, verdict="fail", reason=f"Counts differ: {some(wrong)}.", numbers=numbers)
    if uncounted or unmeasured:
        parts = [f"no ledger for {some(uncounted)}"] if uncounted else []
        parts += [f"no metrics for {some(unmeasured)}"] if unmeasured else []
        return GateResult(
            gate=name, verdict="inconclusive", reason=f"{'; '.join(parts)}.".capitalize(), numbers=numbers
        )
    reason = (
        "Every metric's tokens and steps are those of the ledger, and windows without prefill hold pure decode only."
    )
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _miscounted(record: PerformanceRecord, ledger: list[StepRecord], tokens: dict[str, int]) -> str:
    first, last = record.details["first_step"], record.details["last_step"]
    window = [s for s in ledger if first <= s.index <= last]
    kinds = dict(Counter(s.kind for s in window))
    if kinds != record.step_kinds:
        return f"window has steps {kinds}, recorded {record.step_kinds}"
    if not record.prefill_included and record.metric == "decode_throughput" and not set(kinds) <= PURE:
        return f"a window without prefill holds {some(k for k in kinds if k not in PURE)} steps"
    if record.request is not None:
        counted = tokens.get(record.request)
    else:
        counted = sum(s.emitted for s in window)
        if record.per == "user":
            counted //= max(1, window[0].requests if window else 1)
    return f"{record.tokens} tokens counted, {counted} emitted" if record.tokens and record.tokens != counted else ""


def speedup(scope: Scope, records: Sequence[Any]) -> GateResult:
    """The smallest ratio of decode throughput over the cells, where the comparison is fair; else the factor's name."""
    name = "performance.speedup"
    found = select(records, PerformanceRecord)
    kinds = {r.evidence.kind for r in found}
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No performance was recorded.")
    if "emulated" in kinds:
        return GateResult(gate=name, verdict="not_run", reason="Emulated evidence says nothing about speed.")
    if kinds <= {"shard"}:
        reason = "One rank's kernels say nothing about a step: performance.kernels reports them."
        return GateResult(gate=name, verdict="not_run", reason=reason)
    metric = "decode_throughput"
    own = [r for r in found if r.metric == metric and r.per == "aggregate"]
    margin = scope.manifest.margins.speedup
    ratios, refused, slow, unsure = dict[str, list[float]](), list[str](), list[str](), list[str]()
    for unit, group in group_by(own, lambda r: r.unit).items():
        cell = unit.removeprefix("performance/")
        stock = sorted((r for r in group if r.arm == "stock"), key=_order)
        fast = sorted((r for r in group if r.arm == "optimized"), key=_order)
        factor = _unfair(scope, records, stock, fast)
        if factor:
            refused.append(f"{cell}: {factor}")
            continue
        pairs = zip(stock, fast, strict=True)
        ratios[cell] = [b.value / a.value for a, b in pairs]
        if max(ratios[cell]) < margin:
            slow.append(f"{cell} {max(ratios[cell]):.3g}x")
        elif min(ratios[cell]) < margin or len(ratios[cell]) < 2:
            unsure.append(f"{cell} {min(ratios[cell]):.3g}x to {max(ratios[cell]):.3g}x in {len(ratios[cell])} pairs")
    numbers = [
        Number(f"{metric} ratio {cell}", sum(r) / len(r), f"x, lowest of {len(r)} pairs {min(r):.3g}", f">= {margin:g}")
        for cell, r in ratios.items()
    ]
    if slow:
        return GateResult(gate=name, verdict="fail", reason=f"Slower than claimed: {some(slow)}.", numbers=numbers)
    if refused:
        reason = f"No ratio, because the arms differ in more than the switch: {some(refused)}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    missing = [str(c) for c in scope.cells() if str(c) not in ratios]
    if unsure or missing:
        reason = f"Not decided: {some([*unsure, *(f'{m} not measured' for m in missing)])}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    reason = f"In every cell and every pair of runs the ratio is at least {margin:g}."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _order(record: PerformanceRecord) -> int:
    return int(record.details.get("repeat", 0))


def _unfair(scope: Scope, records: Sequence[Any], stock: list[PerformanceRecord], fast: list[PerformanceRecord]) -> str:
    """The first factor other than the switch in which the arms differ, empty when there is none."""
    if not stock or len(stock) != len(fast):
        return f"{len(stock)} stock and {len(fast)} optimised runs"
    for what, values in (
        ("tokens", [{r.tokens for r in arm} for arm in (stock, fast)]),
        ("steps", [{tuple(sorted(r.step_kinds.items())) for r in arm} for arm in (stock, fast)]),
        ("acceptance", [{r.acceptance for r in arm} for arm in (stock, fast)]),
        ("clock", [{r.clock for r in arm} for arm in (stock, fast)]),
        ("evidence", [{r.evidence for r in arm} for arm in (stock, fast)]),
    ):
        if values[0] != values[1]:
            return what
    engines = {e.arm: e for e in select(records, EngineRecord, unit=stock[0].unit) if e.cell == stock[0].cell}
    if "stock" not in engines or "optimized" not in engines:
        return "the configuration of an arm was not recorded"
    a, b = engines["stock"], engines["optimized"]
    for what, left, right in (
        ("engine", a.engine, b.engine),
        ("devices", a.devices, b.devices),
        ("checkpoint", a.checkpoint, b.checkpoint),
    ):
        if left != right:
            return f"{what}: {left} / {right}"
    return some(configuration_differences(a.config, b.config, ignore=[scope.description.switch]), most=1)
