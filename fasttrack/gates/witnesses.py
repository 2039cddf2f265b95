"""Two witnesses: what the engine's ledger says about a step, and what the harness's profiler saw in it.

A ledger that engines can keep more of is held to more: what changed although nobody owns it, which state slots were
written, who served which op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, group_by, select, some
from fasttrack.records import StepRecord, TraceRecord

_CUDA = "torch.profiler/cuda"


def agreement(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Ledger and profiler agree step by step and op by op, and every claimed cell was seen by both.

    Nor may a step change state that none of its requests owns, where the engine counts that; nor may the ledger
    contradict itself.
    """
    name = "isolation.witnesses"
    steps = {(s.unit, s.arm, s.run, s.index): s for s in select(records, StepRecord)}
    traces = group_by(select(records, TraceRecord), lambda t: (t.unit, t.arm, t.run, t.index))
    if not traces:
        return GateResult(gate=name, verdict="not_run", reason="The profiler watched no step.")
    wrong, agreed = list[str](), list[StepRecord]()
    for key, seen in traces.items():
        step = steps.get(key)
        complaint = "is not in the ledger" if step is None else disagreement(scope, step, seen)
        if complaint:
            wrong.append(f"step {key[2]}/{key[3]} {complaint}")
        elif step is not None:
            agreed.append(step)
    disagreed = len(wrong)
    wrong += [f"step {s.run}/{s.index} {text}" for s in steps.values() if (text := strayed(s))]
    fast = [s for s in steps.values() if s.path == "specialized" and s.arm == "optimized"]
    slots_told = any(s.slots for s in steps.values() if s.arm == "optimized")
    wrong += [f"step {s.run}/{s.index} {text}" for s in fast if slots_told and (text := slots_disagree(s))]
    wrong += providers_disagree(scope, fast)
    counted = [s for s in steps.values() if s.unowned_changed is not None]
    specialised = [s for s in agreed if s.path == "specialized" and s.arm == "optimized"]
    unseen = [str(c) for c in scope.cells() if not any(scope.is_step_of(s, c) for s in specialised)]
    watched = {s.unit for s in agreed}
    unseen += [p.name for p in scope.probes() if p.expect == "stock" and f"isolation/probe/{p.name}" not in watched]
    # not every engine can, but one that can does it everywhere
    if counted or scope.manifest.engine.kind in scope.description.counts_state:
        unseen += [f"{s.run}/{s.index} (state not counted)" for s in specialised if s.unowned_changed is None]
    numbers = [
        Number("steps on which the witnesses disagree", disagreed, f"of {len(traces)} profiled", "0"),
        Number("specialised steps seen by both", len(specialised), "steps", ">= 1 per cell"),
        Number("target ops counted by the profiler", _total(t for s in traces.values() for t in s), "calls", "> 0"),
        Number(
            "state changed that no request owns",
            sum(s.unowned_changed or 0 for s in counted),
            f"rows and slots, {len(counted)} steps counted",
            "0",
        ),
        Number("steps whose slots were checked", len(fast) if slots_told else 0, f"of {len(fast)} specialised", ""),
    ]
    if wrong:
        return GateResult(gate=name, verdict="fail", reason=f"{some(wrong)}.", numbers=numbers)
    if unseen:
        reason = f"Not watched by the profiler, or not counted: {some(unseen)}."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    owned = " and no step changed state that nobody owns" if counted else ""
    reason = f"Ledger and profiler agree on every profiled step, op by op{owned}."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def disagreement(scope: Scope, step: StepRecord, seen: Sequence[TraceRecord]) -> str:
    """What the two witnesses disagree about, empty when nothing.

    A GPU step is judged by its kernels: a replayed graph calls no op on the CPU. A ledger that names
    kernels must name the number of launches; one that names only ops needs at least one target kernel.
    """
    by_source = {t.source: t for t in seen}
    gpu = by_source.get(_CUDA)
    cpu = next((t for t in seen if t.source != _CUDA), None)
    ops_seen = sum(_total([t]) for t in seen)
    if step.path == "stock" and (ops_seen or step.ops):
        return f"is stock in the ledger, and target ops ran ({some(n for t in seen for n in t.ops) or 'ledger'})"
    if step.path == "specialized" and not ops_seen:
        return "is specialised in the ledger, and the profiler saw no target op"
    launched = {n: c for n, c in step.ops.items() if _is_kernel(scope, n)}
    called = {n: c for n, c in step.ops.items() if not _is_kernel(scope, n)}
    if gpu is not None and launched and gpu.ops != launched:
        return f"differs: {_difference(launched, gpu.ops)}"
    replayed = gpu is not None and bool(gpu.ops) and not (cpu and cpu.ops)
    if cpu is not None and not replayed and cpu.ops != called:
        return f"differs: {_difference(called, cpu.ops)}"
    return ""


def strayed(step: StepRecord) -> str:
    """What a step changed that it may not, empty where that is nothing or was not counted."""
    changed = step.unowned_changed or 0
    return f"({step.arm}) changed {changed} cache rows or state slots that none of its requests owns" if changed else ""


def slots_disagree(step: StepRecord) -> str:
    """What is wrong with the state slots of a specialised step: one per request or one per row, each its own."""
    if min(step.slots, default=1) < 1:
        return "wrote the null slot, which is for padding"
    if len(set(step.slots)) != len(step.slots):
        return f"wrote a state slot twice ({some(s for s, n in Counter(step.slots).items() if n > 1)})"
    if len(step.slots) not in (step.requests, step.rows):
        return f"wrote {len(step.slots)} state slots for {step.requests} requests with {step.rows} rows"
    return ""


def providers_disagree(scope: Scope, steps: Sequence[StepRecord]) -> list[str]:
    """Ops of specialised steps that nobody served whom the target declares, or that changed hands within a unit."""
    known, wrong = scope.description.providers, list[str]()
    served: dict[tuple[str, int, str], dict[str, str]] = {}
    for step in steps:
        for op in step.ops:
            name = step.providers.get(op)
            # Numerics asks for the described ops: one that is left out would run unchecked.
            if op not in scope.description.ops and not _is_kernel(scope, op):
                wrong.append(f"step {step.run}/{step.index}: ran {op}, which the target does not describe")
            elif known and not _is_kernel(scope, op) and name not in known:
                wrong.append(f"step {step.run}/{step.index}: {op} served by {name or 'nobody'}, not {some(known)}")
            first = served.setdefault((step.unit, step.attempt, step.arm), {}).setdefault(op, name or "")
            if first != (name or ""):
                wrong.append(f"step {step.run}/{step.index}: {op} served by {name or 'nobody'}, before by {first}")
    return wrong


def _is_kernel(scope: Scope, name: str) -> bool:
    return name not in scope.description.ops and any(name.startswith(k) for k in scope.description.kernels)


def _difference(ledger: Mapping[str, int], trace: Mapping[str, int]) -> str:
    names = [n for n in dict.fromkeys([*ledger, *trace]) if ledger.get(n, 0) != trace.get(n, 0)]
    return some(f"{n} {ledger.get(n, 0)} in the ledger, {trace.get(n, 0)} in the trace" for n in names)


def _total(traces: Any) -> int:
    return sum(count for trace in traces for count in trace.ops.values())


def rank_agreement(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Every rank decided the same and computed the same, on every specialised step."""
    name = "isolation.rank_agreement"
    steps = select(records, StepRecord, arm="optimized", path="specialized")
    if not steps:
        return GateResult(gate=name, verdict="not_run", reason="No specialised step was recorded.")
    incomplete = [s for s in steps if len(s.rank_hashes) != s.tp and s.evidence.kind != "shard"]
    apart = [s for s in steps if len(set(s.rank_hashes)) > 1]
    hashes = {h for s in steps for h in s.rank_hashes}
    numbers = [
        Number("steps on which ranks differ", len(apart), f"of {len(steps)} specialised", "0"),
        Number("steps without a digest per rank", len(incomplete), f"of {len(steps)} specialised", "0"),
        Number("distinct digests", len(hashes), "digests", ">= 2"),
    ]
    if apart:
        where = some(f"{s.run}/{s.index}" for s in apart)
        return GateResult(gate=name, verdict="fail", reason=f"Ranks diverged on step {where}.", numbers=numbers)
    if incomplete:
        where = some(f"{s.run}/{s.index} ({len(s.rank_hashes)} of {s.tp})" for s in incomplete)
        return GateResult(gate=name, verdict="fail", reason=f"Ranks without a digest: step {where}.", numbers=numbers)
    if len(steps) > 1 and len(hashes) < 2:
        reason = "All steps have one digest: it cannot depend on what the step computed."
        return GateResult(gate=name, verdict="inconclusive", reason=reason, numbers=numbers)
    reason = "On every specialised step all ranks agree on plan and outputs."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)
