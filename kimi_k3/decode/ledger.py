"""What one step did, as the executor itself tells it: the first of the two witnesses (the profiler is the second)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_k3.decode.ops import NAMESPACE, OpContext
from kimi_k3.decode.plan import StepPlan
from kimi_k3.reference.batch import StepBatch


@dataclass(frozen=True)
class StepLedger:
    """One executed step. Op names carry the namespace, as a profiler shows them."""

    kind: str  #: decode, verify, prefill, mixed, empty
    requests: int
    rows: int
    padded_rows: int
    draft_length: int
    tp: int
    dcp: int
    context_max: int
    path: str  #: "specialized" or "stock"
    reason: str | None
    ops: dict[str, int] = field(default_factory=dict)  #: calls that the ops counted while running
    providers: dict[str, str] = field(default_factory=dict)  #: of the ops that ran
    slots: list[int] = field(default_factory=list)  #: KDA state slots written
    kv_rows: list[int] = field(default_factory=list)  #: flat KV rows written, per MLA layer
    prefetch_points: list[str] = field(default_factory=list)
    rank_hashes: list[str] = field(default_factory=list)  #: one per rank; unequal = the ranks diverged

    @property
    def ranks_agree(self) -> bool:
        return len(set(self.rank_hashes)) <= 1


def rank_bytes(values: Tensor, rank: int) -> bytes:
    """One rank's copy as raw bytes."""
    return values[rank].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def rank_hashes(plan: StepPlan, replicas: Sequence[Tensor], ranks: int) -> list[str]:
    """Per rank: a digest of the plan and of its copies of what all ranks must hold alike, ``replicas`` [R, ...]:
    final hidden states, cache rows, and whatever else they were caught to disagree on."""
    hashes = []
    for rank in range(ranks):
        digest = hashlib.blake2b(plan.digest(), digest_size=16)
        for values in replicas:
            digest.update(rank_bytes(values, rank))
        hashes.append(digest.hexdigest())
    return hashes


def written_slots(plan: StepPlan, batch: StepBatch) -> list[int]:
    """State slots a step writes: the first ``rows`` of each decode request, the first of a prefill."""
    slots = batch.state_slots.tolist()
    counts = [1 if prompt else q for prompt, q in zip(batch.is_prefill, batch.query_lens, strict=True)]
    return [s for own, n in zip(slots, counts, strict=True) for s in own[:n] if s > 0]


def record(
    plan: StepPlan,
    batch: StepBatch,
    context: OpContext | None,
    replicas: Sequence[Tensor] = (),
    points: Sequence[str] = (),
) -> StepLedger:
    """The ledger entry of a step; ``context`` None means that the stock path ran it."""
    calls = context.calls if context is not None else {}
    providers = context.providers if context is not None else {}
    return StepLedger(
        kind=plan.kind,
        requests=plan.requests,
        rows=plan.rows,
        padded_rows=plan.padded_rows,
        draft_length=plan.draft_length,
        tp=plan.tp,
        dcp=plan.dcp,
        context_max=plan.context_max,
        path="stock" if context is None else "specialized",
        reason=plan.reason,
        ops={f"{NAMESPACE}::{op}": n for op, n in calls.items()},
        providers={f"{NAMESPACE}::{op}": providers[op].name for op in calls},
        slots=written_slots(plan, batch),
        kv_rows=[row for row in batch.slot_mapping.tolist() if row >= 0],
        prefetch_points=list(points),
        rank_hashes=rank_hashes(plan, replicas, plan.tp),
    )
