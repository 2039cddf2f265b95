"""Between the schedule and the model: the rows of a step, which of them are sampled, and the step's ledger entry."""

from __future__ import annotations

from typing import Any

from kimi_k3.reference.batch import RequestRows, StepBatch
from kimi_k3.reference.options import EngineOptions
from kimi_k3.reference.requests import StepEntry
from kimi_k3.reference.scheduler import ScheduledRequest, ScheduledStep


def request_rows(scheduled: ScheduledRequest) -> RequestRows:
    """Prompt tokens, or the last token and the drafts behind it."""
    state = scheduled.state
    if scheduled.prefill:
        tokens = state.tokens[state.computed : state.computed + scheduled.rows]
    else:
        tokens = [state.tokens[-1], *scheduled.drafts]
    return RequestRows(
        token_ids=tokens,
        context_len=state.computed,
        prefill=scheduled.prefill,
        pages=state.pages,
        slots=state.slots,
        accepted=state.accepted,
        drafts=len(scheduled.drafts),
    )


def sampled_rows(step: ScheduledStep) -> list[int]:
    """Row indices whose logits are needed: the last of a finished prefill, all of a decode or verify."""
    index: list[int] = []
    start = 0
    for r in step.requests:
        if r.samples:
            index.extend([start + r.rows - 1] if r.prefill else range(start, start + r.rows))
        start += r.rows
    return index


def step_entry(
    step: ScheduledStep, batch: StepBatch, options: EngineOptions, did: Any, reason: str | None, run: str, index: int
) -> StepEntry:
    """``did``: the executor's own account of the step, None where the stock path ran for ``reason``."""
    entry = StepEntry(
        run=run,
        index=index,
        kind=step.kind,
        requests=batch.num_requests,
        rows=batch.num_rows,
        padded_rows=batch.num_rows,
        draft_length=max((len(r.drafts) for r in step.requests), default=0),
        tp=options.tp,
        dcp=options.dcp,
        context_max=max(c + q for c, q in zip(batch.context_lens, batch.query_lens, strict=True)),
        path="stock",
        reason=reason,
        ops={},
        providers={},
        slots=[s for r in step.requests for s in r.state.slots[: 1 if r.prefill else r.rows]],
        rank_hashes=[],
    )
    if did is not None:
        entry.path, entry.ops, entry.providers = "specialized", dict(did.ops), dict(did.providers)
        entry.slots, entry.rank_hashes = list(did.slots), list(did.rank_hashes)
        entry.padded_rows = did.padded_rows
    return entry
