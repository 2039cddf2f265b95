"""One engine step as both paths see it: rows of all requests, request-major, and where their state lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class StepBatch:
    """Inputs of one forward pass over ``T`` rows of ``B`` requests.

    Rows are request-major: request ``i`` owns ``query_lens[i]`` consecutive rows. ``context_lens`` counts
    the tokens already in the caches before this step, so row ``j`` of request ``i`` has position
    ``context_lens[i] + j``. State slot 0 and KV row -1 mean padding: never written, outputs unused.
    """

    token_ids: torch.Tensor  #: [T] int64
    positions: torch.Tensor  #: [T] int64
    query_lens: list[int]  #: [B] rows per request
    context_lens: list[int]  #: [B] tokens cached before the step
    is_prefill: list[bool]  #: [B] the rows are prompt tokens (first or later chunk)
    slot_mapping: torch.Tensor  #: [T] int64 flat KV row (page * page_size + offset), -1 = padding
    block_tables: torch.Tensor  #: [B, max_pages] int64 page ids, padded with -1
    state_slots: torch.Tensor  #: [B, 1 + draft_length] int64 KDA state slots; column 0 also holds the conv buffer
    accepted: torch.Tensor  #: [B] int64 tokens accepted in the previous step (1 = plain decode)
    draft_lens: list[int] = field(default_factory=list)  #: [B] draft tokens verified by this step (0 = plain)

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)


@dataclass(frozen=True)
class RequestRows:
    """One request's share of a step: ``token_ids`` at positions ``context_len``, ``context_len + 1``, ..."""

    token_ids: Sequence[int]
    context_len: int
    prefill: bool
    pages: Sequence[int]  #: must cover ``context_len + len(token_ids)`` tokens
    slots: Sequence[int]  #: 1 + draft_length state slots
    accepted: int = 1
    drafts: int = 0  #: how many of the rows are draft tokens


def build_batch(requests: Sequence[RequestRows], page_size: int, device: torch.device | str = "cpu") -> StepBatch:
    """The tensors of one step. Row order is the order of ``requests``; no padding rows are added."""
    width = max(len(r.pages) for r in requests)
    tokens: list[int] = []
    positions: list[int] = []
    mapping: list[int] = []
    for r in requests:
        tokens.extend(r.token_ids)
        for position in range(r.context_len, r.context_len + len(r.token_ids)):
            positions.append(position)
            mapping.append(r.pages[position // page_size] * page_size + position % page_size)

    def tensor(values: Sequence[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepBatch(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        query_lens=[len(r.token_ids) for r in requests],
        context_lens=[r.context_len for r in requests],
        is_prefill=[r.prefill for r in requests],
        slot_mapping=tensor(mapping),
        block_tables=tensor([[*r.pages, *[-1] * (width - len(r.pages))] for r in requests]),
        state_slots=tensor([list(r.slots) for r in requests]),
        accepted=tensor([r.accepted for r in requests]),
        draft_lens=[r.drafts for r in requests],
    )
