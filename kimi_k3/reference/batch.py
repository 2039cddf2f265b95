"""One engine step as both paths see it: rows of all requests, request-major, and where their state lives."""

from __future__ import annotations

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
