"""Drives the model over steps in tests: every request has shuffled pages and slots and remembers its context."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_k3.reference.batch import RequestRows, StepBatch, build_batch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.model import Model

PAGE = 4


@dataclass
class Driver:
    """``requests`` sequences on one set of caches. Unused memory is NaN, so reading it shows."""

    model: Model
    requests: int = 1
    draft_length: int = 0
    max_tokens: int = 64
    seed: int = 0
    context: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    caches: Caches = field(init=False)

    def __post_init__(self) -> None:
        shuffle = random.Random(self.seed)
        width = 1 + self.draft_length
        per_request = -(-self.max_tokens // PAGE)
        pages, slots = list(range(self.requests * per_request)), list(range(1, 1 + self.requests * width))
        shuffle.shuffle(pages)
        shuffle.shuffle(slots)
        self.pages = [pages[i * per_request : (i + 1) * per_request] for i in range(self.requests)]
        self.slots = [slots[i * width : (i + 1) * width] for i in range(self.requests)]
        self.context = [0] * self.requests
        self.accepted = [1] * self.requests
        self.caches = Caches.allocate(
            self.model.config,
            self.model.precision,
            pages=len(pages),
            page_size=PAGE,
            slots=1 + len(slots),
            draft_length=self.draft_length,
        )
        for store in (self.caches.kv, self.caches.conv, self.caches.recurrent):
            for tensor in store.values():
                tensor.copy_(torch.full(tensor.shape, float("nan")).to(tensor.dtype))

    def batch(self, rows: dict[int, list[int]], prefill: set[int] | None = None) -> StepBatch:
        """Rows per request, in the order given; a request without context is a prefill unless said otherwise."""
        if prefill is None:
            prefill = {r for r in rows if self.context[r] == 0}
        parts = [
            RequestRows(tokens, self.context[r], r in prefill, self.pages[r], self.slots[r], self.accepted[r])
            for r, tokens in rows.items()
        ]
        return build_batch(parts, PAGE)

    def step(self, rows: dict[int, list[int]], prefill: set[int] | None = None) -> dict[int, Tensor]:
        """One forward pass; hidden states per request. All rows count as accepted."""
        hidden = self.model.forward(self.batch(rows, prefill), self.caches)
        for r, tokens in rows.items():
            was_prefill = self.context[r] == 0 if prefill is None else r in prefill
            self.context[r] += len(tokens)
            self.accepted[r] = 1 if was_prefill else len(tokens)
        return dict(zip(rows, hidden.split([len(t) for t in rows.values()]), strict=True))

    def reject(self, request: int, rows: int) -> None:
        """Take back the last ``rows`` rows of a verify step."""
        self.context[request] -= rows
        self.accepted[request] -= rows

    def kv_rows(self, layer: int, request: int) -> Tensor:
        """The valid cache rows of a request, in order."""
        flat = self.caches.kv[layer][self.pages[request]].flatten(0, 1)
        return flat[: self.context[request]]


def tokens(count: int, seed: int = 0, vocab: int = 500) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
