"""Features that may not be optimised away: each holds on its own steps, and both witnesses saw those specialised.

One gate per feature, ``features.<name>``. It wants every deployment that the tier selects, plain and with drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fasttrack.gates.base import Gate, GateResult, Scope, group_by, select, some
from fasttrack.gates.feature_equal import full_context, logprobs, penalties, prefix_reuse, stock_resumed
from fasttrack.gates.feature_text import sampling, stop, streaming, structured_output
from fasttrack.gates.feature_units import PREFIX, FeatureUnit, Findings, Tally, UnitRecords, feature_units, merged
from fasttrack.gates.witnesses import disagreement
from fasttrack.records import RefusalRecord, TraceRecord

Rule = Callable[[Scope, UnitRecords], Findings]

#: Feature -> its rule; the order is that of the report.
RULES: dict[str, Rule] = {
    "sampling": sampling,
    "structured_output": structured_output,
    "logprobs": logprobs,
    "stop": stop,
    "penalties": penalties,
    "prefix_reuse": prefix_reuse,
    "streaming": streaming,
    "full_context": full_context,
    "stock_resumed": stock_resumed,
}

#: Features whose run leaves the specialised path on purpose, or by nature near the end of the context.
_STOCK_ALLOWED = ("full_context",)


def judge(scope: Scope, unit: FeatureUnit, records: Sequence[Any]) -> Findings:
    """The feature's own rule and what both witnesses say about the unit's steps."""
    own = UnitRecords(unit, records)
    return RULES[unit.feature](scope, own) + witnesses(scope, own)


def witnesses(scope: Scope, own: UnitRecords) -> Findings:
    """The unit's pure steps ran specialised by the ledger, and the profiler saw the same in those it watched."""
    specialised = [s for s in own.pure if s.path == "specialized"]
    stock = [s for s in own.pure if s.path != "specialized"]
    traces = group_by(select(own.records, TraceRecord, arm="optimized"), lambda t: (t.run, t.index))
    wrong, seen = list[str](), 0
    for step in specialised:
        if own_traces := traces.get((step.run, step.index)):
            complaint = disagreement(scope, step, own_traces)
            seen += not complaint
            if complaint:
                wrong.append(f"step {step.run}/{step.index} {complaint}")
    if not specialised:
        wrong.append("no step ran specialised")
    elif stock and own.unit.feature not in _STOCK_ALLOWED:
        wrong.append(f"{len(stock)} of {len(own.pure)} pure steps ran stock ({some({s.reason for s in stock})})")
    record = own.feature
    said = (record.specialized_steps, record.stock_steps, record.witnessed_steps) if record else None
    if said is not None and not wrong and said != (len(specialised), len(stock), seen):
        wrong.append(f"the record counts {said} specialised, stock and witnessed steps, the raw records others")
    vacuous = [] if seen or wrong else ["the profiler watched none of its specialised steps"]
    drafted = [s for s in specialised if s.kind == "verify"]
    stood = sum(s.emitted - s.requests for s in drafted)
    if own.unit.cell.draft_length and not stood:
        vacuous.append("no draft stood, so nothing was speculated")
    tallies = [
        Tally("specialised steps", len(specialised), "steps", ">= 1"),
        Tally("of these seen by the profiler", seen, "steps", ">= 1"),
    ]
    if own.unit.cell.draft_length:
        tallies.append(Tally("accepted drafts", stood, "tokens", ">= 1"))
    return Findings(tuple(wrong), tuple(vacuous), tuple(tallies))


def _gate(feature: str) -> Gate:
    name = PREFIX + feature

    def gate(scope: Scope, records: Sequence[Any]) -> GateResult:
        if feature not in scope.description.features:
            reason = f"Target {scope.description.name} does not list the feature."
            return GateResult(gate=name, verdict="not_run", reason=reason)
        units = [u for u in feature_units(scope.manifest, scope.tier) if u.feature == feature]
        failed, missing, vacuous, tallies, held = list[str](), list[str](), list[str](), list[Tally](), list[str]()
        by_unit = group_by(records, lambda r: r.unit)
        for unit in units:
            own = by_unit.get(unit.name, [])
            refused = [r for r in select(own, RefusalRecord) if r.refused]
            if refused:
                where = failed if refused[-1].deployment.get("stock_served") else missing
                where.append(f"{unit.text} ({some(refused[-1].reasons)})")
            elif not UnitRecords(unit, own).feature:
                missing.append(f"{unit.text} was not run")
            else:
                found = judge(scope, unit, own)
                failed += [f"{unit.text}: {text}" for text in found.wrong]
                vacuous += [f"{unit.text}: {text}" for text in found.vacuous]
                tallies += found.tallies
                held.append(unit.text)
        numbers = merged(tallies)
        if failed:
            return GateResult(gate=name, verdict="fail", reason=f"{some(failed)}.", numbers=numbers)
        if missing or not units:
            reason = f"Not run: {some(missing) or 'no deployment of this tier'}."
            return GateResult(gate=name, verdict="not_run", reason=reason, numbers=numbers)
        if vacuous:
            return GateResult(gate=name, verdict="inconclusive", reason=f"{some(vacuous)}.", numbers=numbers)
        reason = f"Holds on specialised steps that both witnesses saw: {some(held, most=6)}."
        return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)

    gate.__doc__ = RULES[feature].__doc__
    return gate


FEATURE_GATES: dict[str, Gate] = {PREFIX + feature: _gate(feature) for feature in RULES}
