"""Published cells, run again: requests, lengths, steps, tokens and acceptance are exactly what the cell says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fasttrack.gates.base import GateResult, Number, Scope, group_by, select, some
from fasttrack.records import GenerationRecord, PerformanceRecord, StepRecord

if TYPE_CHECKING:
    from fasttrack.manifest.model import NamedCell

ARMS = ("stock", "optimized")
#: Standard errors by which the mean of a fractional synthetic acceptance may miss: once in a million honest runs.
SIGMAS = 4.9


def named_cells(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Both arms of every named cell count what it promises: AL 6 emits exactly 6 tokens per step and request."""
    name = "performance.named_cells"
    wanted = [c.named for c in scope.manifest.cells(scope.tier) if c.named is not None]
    by_unit = group_by(records, lambda r: r.unit)
    wrong, missing, numbers = list[str](), list[str](), list[Number]()
    for cell in wanted:
        own = by_unit.get(f"performance/named/{cell.name}", [])
        tokens = cell.tokens(scope.knobs.named_steps)
        for arm in ARMS:
            steps = select(own, StepRecord, arm=arm)
            if not steps:
                missing.append(f"{cell.name} ({arm})")
                continue
            complaint = _miscounted(cell, arm, tokens, own)
            if complaint:
                wrong.append(f"{cell.name} ({arm}): {complaint}")
        numbers.append(_number(cell, tokens, own))
    if wrong:
        return GateResult(gate=name, verdict="fail", reason=f"{some(wrong)}.", numbers=numbers)
    if missing or not wanted:
        reason = f"Not run: {some(missing) or 'no named cell is part of this tier'}."
        return GateResult(gate=name, verdict="not_run", reason=reason, numbers=numbers)
    reason = "Every named cell emitted its tokens in exactly its steps, with exactly its acceptance, in both arms."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _decoding(cell: NamedCell, arm: str, own: Sequence[Any]) -> list[StepRecord]:
    """Decode or verify steps of the arm's first run, in order."""
    steps = [s for s in select(own, StepRecord, arm=arm) if s.kind in ("decode", "verify")]
    first = min((s.run for s in steps), default="")
    return sorted((s for s in steps if s.run == first), key=lambda s: s.index)


def _number(cell: NamedCell, tokens: int, own: Sequence[Any]) -> Number:
    steps = _decoding(cell, "optimized", own)
    emitted = sum(s.emitted for s in steps)
    rate = emitted / (len(steps) * cell.requests) if steps else 0.0
    text = f"decode steps for {emitted} tokens behind the first, {rate:.4g} per step and request"
    length = cell.acceptance_length
    return Number(cell.name, len(steps), text, f"= {_steps(tokens, length)}" if _whole(length) else "")


def _whole(length: float | None) -> bool:
    return length is not None and length == int(length)


def _steps(tokens: int, length: float | None) -> int:
    """Decode steps behind the prefill, which gives the first token."""
    return math.ceil((tokens - 1) / (length or 1))


def _miscounted(cell: NamedCell, arm: str, tokens: int, own: Sequence[Any]) -> str:
    """The first count that is not the cell's, empty when all are."""
    done = group_by(select(own, GenerationRecord, arm=arm), lambda g: g.run)
    for run in done.values():
        lengths = {(g.prompt_tokens, len(g.token_ids)) for g in run}
        if len(run) != cell.requests or lengths != {(cell.input_tokens, tokens)}:
            wanted = f"{cell.requests} of {(cell.input_tokens, tokens)}"
            return f"{len(run)} requests of (input, output) tokens {some(lengths)}, not {wanted}"
    if not done:
        return "no request came back"
    paths = Counter(s.path for s in select(own, StepRecord, arm=arm) if s.kind in ("decode", "verify"))
    if paths.keys() != {"specialized" if arm == "optimized" else "stock"}:
        return f"decode steps ran {some(f'{n} {path}' for path, n in sorted(paths.items()))}"
    steps = _decoding(cell, arm, own)
    off = [
        s for s in steps if (s.kind, s.requests, s.draft_length) != (cell.key.step, cell.requests, cell.draft_length)
    ]
    if off:
        s = off[0]
        return f"step {s.index} is a {s.kind} step of {s.requests} requests with {s.draft_length} drafts"
    said = {r.acceptance for r in select(own, PerformanceRecord, arm=arm)}
    if said != {cell.acceptance}:
        return f"acceptance recorded as {some(said)}, not {cell.acceptance}"
    return _wrong_pace(cell, tokens, steps)


def _wrong_pace(cell: NamedCell, tokens: int, steps: Sequence[StepRecord]) -> str:
    length = cell.acceptance_length
    if length is None:
        return ""
    if _whole(length) and len(steps) != _steps(tokens, length):
        return f"{len(steps)} decode steps for {tokens - 1} tokens, not {_steps(tokens, length)}"
    if _whole(length):
        paced = [s for s in steps[:-1] if s.emitted != length * cell.requests]
        if paced:
            return f"step {paced[0].index} emitted {paced[0].emitted} tokens, not {length * cell.requests:g}"
    stood = [n for s in steps for n in s.accepted] if cell.draft_length else []
    if cell.draft_length and len(stood) != len(steps) * cell.requests:
        return f"accepted drafts are recorded for {len(stood)} of {len(steps) * cell.requests} requests and steps"
    low = int(length) - 1
    strays = [n for n in stood if n not in (low, low if _whole(length) else low + 1)]
    if strays:
        return f"a step accepted {strays[0]} drafts, at acceptance length {length:g}"
    part = length - int(length)
    error = SIGMAS * math.sqrt(part * (1 - part) / len(stood)) if stood else 0.0
    mean = sum(stood) / len(stood) + 1 if stood else length
    return f"mean acceptance length {mean:.4g}, not {length:g}" if abs(mean - length) > error + 1e-12 else ""
