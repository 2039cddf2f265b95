"""The optimised path runs exactly where it was claimed, and with the switch off it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, Verdict, group_by, select, some, units_of
from fasttrack.records import GenerationRecord, OffStateRecord, RefusalRecord, StepRecord


def scope_coverage(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Every claimed cell was seen at exactly its batch, and every such step ran specialised."""
    name = "isolation.scope_coverage"
    found = units_of(records, "isolation/cell")
    steps = select(found, StepRecord, arm="optimized")
    refused_at_start = select(found, RefusalRecord, refused=True)
    if refused_at_start:
        what = some(f"{r.unit.removeprefix('isolation/cell/')} ({some(r.reasons)})" for r in refused_at_start)
        return GateResult(gate=name, verdict="fail", reason=f"In scope and refused at start: {what}.")
    if not steps:
        return GateResult(gate=name, verdict="not_run", reason="No step of the optimised arm was recorded.")
    unseen, stock, specialised = [], list[str](), 0
    cells = scope.cells()
    for cell in cells:
        own = [s for s in steps if scope.is_step_of(s, cell)]
        refused = [s for s in own if s.path != "specialized"]
        specialised += len(own) - len(refused)
        if not own:
            unseen.append(cell)
        elif refused:
            stock.append(f"{cell} ({len(refused)} of {len(own)} steps stock, {some({s.reason for s in refused})})")
    numbers = [
        Number("cells fully specialised", len(cells) - len(unseen) - len(stock), f"of {len(cells)} cells", "all"),
        Number("specialised steps at a claimed batch", specialised, "steps", ">= 1 per cell"),
    ]
    if stock:
        return GateResult(
            gate=name, verdict="fail", reason=f"In scope and not specialised: {some(stock)}.", numbers=numbers
        )
    if unseen:
        reason = f"No step at exactly the claimed batch: {some(unseen)}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    reason = "Every cell of the scope has steps at exactly its batch, and all of them ran specialised."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def probes(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Outside the scope nothing runs specialised, each probe was observed, and afterwards the path is taken again."""
    name = "isolation.probes"
    wanted = scope.probes()
    steps = select(records, StepRecord, arm="optimized")
    if not wanted or not (steps or units_of(records, "isolation/probe")):
        what = "No step of the optimised arm was recorded." if wanted else "The manifest has no probes."
        return GateResult(gate=name, verdict="not_run", reason=what)
    outside = [
        s for s in steps if s.path == "specialized" and (s.kind not in ("decode", "verify") or s.rows > scope.max_rows)
    ]
    wrong = [f"{s.kind} step with {s.rows} rows ({s.unit}) ran specialised" for s in outside]
    unseen, observed = list[str](), 0
    for probe in wanted:
        unit = f"isolation/probe/{probe.name}"
        refusals = select(records, RefusalRecord, unit=unit)
        refused = any(r.refused and r.reasons for r in refusals)
        if probe.expect == "refused":
            observed += bool(refusals)
            if refusals and not refused:
                wrong.append(f"{probe.name} was not refused at start")
            elif not refusals:
                unseen.append(probe.name)
            continue
        if refused:
            wrong.append(f"{probe.name} was refused at start instead of running stock")
            continue
        run = select(records, StepRecord, unit=unit, arm="optimized")
        own = [s for s in run if _is_step_of_probe(s, probe)]
        if not own:
            unseen.append(probe.name)
            continue
        observed += 1
        if any(s.path == "specialized" for s in own):
            wrong.append(f"{probe.name} ran specialised")
        elif probe.reason and {s.reason for s in own} != {probe.reason}:
            wrong.append(f"{probe.name} fell back for {some({s.reason for s in own})}, not {probe.reason}")
        if probe.step == "mixed" and not _resumes(run):
            wrong.append(f"{probe.name}: no specialised step after the mixed one")
    numbers = [
        Number("probes observed", observed, f"of {len(wanted)} probes", "all"),
        Number("specialised steps outside the scope", len(outside), f"of {len(steps)} steps", "0"),
    ]
    if wrong:
        return GateResult(gate=name, verdict="fail", reason=f"{some(dict.fromkeys(wrong))}.", numbers=numbers)
    if unseen:
        reason = f"Probes that produced no such step: {some(unseen)}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    reason = "Every probe ran as expected, and no step outside the scope ran specialised."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _is_step_of_probe(step: StepRecord, probe: Any) -> bool:
    if (step.kind, step.tp, step.dcp, step.requests) != (probe.step, probe.tp, probe.dcp, probe.requests):
        return False
    if probe.step == "verify" and probe.drafts == "non-uniform":
        return step.rows != step.requests * (1 + step.draft_length)
    return probe.step in ("prefill", "mixed") or step.draft_length == probe.draft_length


def _resumes(run: list[StepRecord]) -> bool:
    mixed = [s.index for s in run if s.kind == "mixed"]
    return bool(mixed) and any(s.path == "specialized" and s.index > min(mixed) for s in run)


FRESH = ("complete", "optimised-packages-deleted")  #: checkouts of the fresh processes


def off_is_off(scope: Scope, records: Sequence[Any]) -> GateResult:
    """With the switch off nothing of the optimised path is loaded, deleting it changes no output bit, and having run
    it changes none either."""
    name = "isolation.off_is_off"
    found = select(records, OffStateRecord)
    fresh = [r for r in found if r.checkout in FRESH]
    withheld = sorted({v for r in fresh for v in r.environment_withheld})
    numbers = [
        Number(
            "optimised modules loaded with the switch off", sum(len(r.modules_loaded) for r in fresh), "modules", "0"
        ),
        Number("files of theirs opened with the switch off", sum(len(r.files_opened) for r in fresh), "files", "0"),
        Number("outputs compared", sum(r.outputs for r in found), "tokens and log-probabilities", "> 0"),
        Number("variables kept from the fresh processes", len(withheld), some(withheld) or "variables", ""),
    ]

    def say(verdict: Verdict, reason: str) -> GateResult:
        return GateResult(gate=name, verdict=verdict, reason=reason, numbers=numbers)

    loaded = sorted({m for r in fresh for m in r.modules_loaded})
    if loaded:
        return say("fail", f"Loaded with the switch off: {some(loaded)}.")
    opened = sorted({f for r in fresh for f in r.files_opened})
    if opened:
        return say("fail", f"Opened with the switch off: {some(opened)}.")
    added = [set(r.environment_added) for r in fresh]
    if any(one != added[0] for one in added):
        names = some(set[str]().union(*added) - set[str].intersection(*added))
        return say("fail", f"Environment variables depend on the optimised packages: {names}.")
    compared, unlike = 0, list[str]()
    for unit, own in group_by([r for r in found if r.outputs], lambda r: r.unit).items():
        by_checkout: dict[str, str] = {r.checkout: r.outputs_sha256 for r in own}
        if not by_checkout.keys() >= set(FRESH):
            continue
        compared += 1
        if len({by_checkout[c] for c in FRESH}) != 1:
            return say("fail", f"Outputs change when the optimised packages are deleted ({unit}).")
        here = by_checkout.get("this-process")
        if here is None or not select(records, StepRecord, unit=unit, arm="optimized", path="specialized"):
            unlike.append(unit)
        elif here != by_checkout["complete"]:
            reason = "Stock gives other outputs in the process that has run the optimised path than in a fresh one"
            return say("fail", f"{reason}: building or running it changes the stock arms ({unit}).")
    if not compared:
        reason = "No pair of fresh processes with and without the optimised packages was compared."
        return say("inconclusive" if found else "not_run", reason)
    if unlike:
        reason = "Stock was not compared in the process of the run after the optimised path had run there"
        return say("inconclusive", f"{reason} ({some(unlike)}).")
    return say(
        "pass",
        "With the switch off no optimised module is loaded, and outputs are bit-identical without those packages"
        " and after the optimised path has run.",
    )


def a_a(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Stock against stock on the same schedule differs by exactly nothing: the harness testing itself."""
    name = "isolation.a_a"
    found = select(units_of(records, "isolation/a_a"), GenerationRecord)
    by_request = group_by(found, lambda r: (r.unit, r.request))
    pairs = [
        (a, b)
        for group in by_request.values()
        for a in group
        for b in group
        if (a.arm, b.arm) == ("stock", "stock-repeat")
    ]
    if not pairs:
        return GateResult(gate=name, verdict="not_run", reason="Stock was not run twice on one schedule.")
    different = [f"{a.unit} request {a.request}" for a, b in pairs if not _same(a, b)]
    tokens = {token for a, _ in pairs for token in a.token_ids}
    numbers = [
        Number("requests that differ", len(different), f"of {len(pairs)}", "0"),
        Number("distinct tokens", len(tokens), f"of {sum(len(a.token_ids) for a, _ in pairs)}", ">= 2"),
    ]
    if different:
        return GateResult(
            gate=name, verdict="fail", reason=f"Stock differs from itself: {some(different)}.", numbers=numbers
        )
    if len(tokens) < 2 or not all(a.logprobs for a, _ in pairs):
        reason = "The compared outputs are constant or carry no log-probabilities: equality shows nothing."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    reason = "Two stock runs of one schedule are bit-identical in tokens and log-probabilities."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _same(a: GenerationRecord, b: GenerationRecord) -> bool:
    return (a.prompt_sha256, a.token_ids, a.logprobs) == (b.prompt_sha256, b.token_ids, b.logprobs)


def refusals(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Deployments outside the limits are refused at start, with every reason at once."""
    name = "isolation.refusals"
    found = select(units_of(records, "isolation/refusals"), RefusalRecord)
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No deployment outside the limits was tried.")
    bad = [f"{r.deployment} started" for r in found if not r.refused]
    owed = [(r, r.deployment.get("violations", 1)) for r in found if r.refused]
    bad += [f"{r.deployment} gave {len(r.reasons)} of {n} reasons" for r, n in owed if len(set(r.reasons)) < n]
    numbers = [
        Number("deployments refused", sum(r.refused for r in found), f"of {len(found)}", "all"),
        Number("most reasons in one refusal", max(len(r.reasons) for r in found), "reasons", "all violations"),
    ]
    if bad:
        return GateResult(gate=name, verdict="fail", reason=f"{some(bad)}.", numbers=numbers)
    reason = "Deployments outside the limits are refused at start, with every reason at once."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)
