"""Which steps run specialised: decided once per step, from facts that every rank shares.

Kernels of different ranks wait for each other's publications, so a rank that decided differently would hang all
of them. :class:`StepFacts` therefore holds nothing that could differ between ranks, :func:`plan_step` is a pure
function of it, and the plan's digest goes into every rank's agreement hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kimi_k3.names import DRAFT_LENGTHS, MAX_ROWS

if TYPE_CHECKING:
    from kimi_k3.reference.batch import StepBatch

#: Row counts that are always prepared; verify steps add their whole-request multiples (:func:`prepared_rows`).
BASE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)

#: From this many rows on, partial sums travel in two phases (reduce-scatter, then gather) instead of one shot.
TWO_PHASE_ROWS = 16

KV_SPLIT_TOKENS = 256  #: no KV split is planned for fewer tokens of the longest context
KV_SPLIT_CTAS = 132  #: splits fill this many processors (SM90) and no more


@dataclass(frozen=True)
class StepFacts:
    """Host-side facts of one step, equal on every rank by construction."""

    query_lens: tuple[int, ...]  #: [B] rows per request
    context_lens: tuple[int, ...]  #: [B] tokens cached before the step
    prefill: tuple[bool, ...]  #: [B]
    drafts: tuple[int, ...]  #: [B] draft rows per request

    @staticmethod
    def of(batch: StepBatch) -> StepFacts:
        drafts = batch.draft_lens or [0] * batch.num_requests
        return StepFacts(tuple(batch.query_lens), tuple(batch.context_lens), tuple(batch.is_prefill), tuple(drafts))


@dataclass(frozen=True)
class PlanLimits:
    """What one executor was prepared for. Fixed at start."""

    tp: int
    dcp: int = 1
    draft_length: int = 0  #: state slots per request are 1 + this
    max_context: int = 1 << 20  #: tokens, the step's own rows included
    prepared: tuple[int, ...] = BASE_ROWS

    @property
    def max_rows(self) -> int:
        return max(self.prepared)


@dataclass(frozen=True)
class StepPlan:
    """One step's decision. ``reason`` is None exactly when ``path`` is ``specialized``."""

    path: str  #: "specialized" or "stock"
    reason: str | None
    kind: str  #: decode, verify, prefill, mixed, empty
    requests: int
    rows: int  #: true rows
    padded_requests: int
    padded_rows: int  #: rows executed
    query_len: int  #: rows per request; 0 on the stock path
    draft_length: int  #: drafts verified by every request, the largest where they differ
    tp: int
    dcp: int
    context_max: int  #: longest context, the step's own rows included, tokens
    two_phase: bool = False
    kv_splits: int = 1

    @property
    def specialized(self) -> bool:
        return self.path == "specialized"

    def digest(self) -> bytes:
        """32 bytes over every field; part of each rank's agreement hash."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).digest()


def prepared_rows(query_len: int, prepared: tuple[int, ...] = BASE_ROWS) -> tuple[int, ...]:
    """Prepared row counts of steps with ``query_len`` rows per request: whole requests only, ascending.

    Each base size rounded up to whole requests, and the largest whole-request size that fits.
    """
    limit = max(prepared)
    sizes = {-(-m // query_len) * query_len for m in prepared} | {limit // query_len * query_len}
    return tuple(sorted(m for m in sizes if 0 < m <= limit))


def kv_splits(requests: int, limits: PlanLimits) -> int:
    """Splits of every request's context: fixed by batch and deployment, never by the contexts of the step."""
    if limits.dcp > 1:
        return limits.dcp  # one partial result per rank
    return max(1, min(-(-KV_SPLIT_CTAS // requests), -(-limits.max_context // KV_SPLIT_TOKENS)))


def plan_step(facts: StepFacts, limits: PlanLimits) -> StepPlan:
    """Specialised or stock, with the first reason in the order of ``names.FALLBACK_REASONS``."""
    requests, rows = len(facts.query_lens), sum(facts.query_lens)
    drafts = max(facts.drafts, default=0)
    query_len = 1 + drafts
    kind = _kind(facts)
    reason = _reason(facts, limits, kind, query_len)
    padded = rows
    if reason is None:
        padded = next(m for m in prepared_rows(query_len, limits.prepared) if m >= rows)
    special = reason is None
    return StepPlan(
        path="specialized" if special else "stock",
        reason=reason,
        kind=kind,
        requests=requests,
        rows=rows,
        padded_requests=padded // query_len if special else requests,
        padded_rows=padded,
        query_len=query_len if special else 0,
        draft_length=drafts,
        tp=limits.tp,
        dcp=limits.dcp,
        context_max=max((c + q for c, q in zip(facts.context_lens, facts.query_lens, strict=True)), default=0),
        two_phase=special and padded >= TWO_PHASE_ROWS,
        kv_splits=kv_splits(padded // query_len, limits) if special else 1,
    )


def _kind(facts: StepFacts) -> str:
    if not facts.query_lens:
        return "empty"
    # Rows of a request with nothing cached are prompt rows whatever they are called: there is no state to continue.
    prompt = [p or c == 0 for p, c in zip(facts.prefill, facts.context_lens, strict=True)]
    if any(prompt):
        return "prefill" if all(prompt) else "mixed"
    return "verify" if any(facts.drafts) else "decode"


def _reason(facts: StepFacts, limits: PlanLimits, kind: str, query_len: int) -> str | None:
    if kind in ("empty", "prefill", "mixed"):
        return kind
    if len(set(facts.drafts)) > 1 or any(q != 1 + d for q, d in zip(facts.query_lens, facts.drafts, strict=True)):
        return "non_uniform_drafts"
    if query_len - 1 not in DRAFT_LENGTHS or query_len - 1 > limits.draft_length:
        return "draft_length_unsupported"
    rows = len(facts.query_lens) * query_len
    if rows > MAX_ROWS:
        return "too_many_rows"
    if rows > max(prepared_rows(query_len, limits.prepared), default=0):
        return "unprepared_rows"
    if max(facts.context_lens) + query_len > limits.max_context:
        return "context_too_long"
    return None
