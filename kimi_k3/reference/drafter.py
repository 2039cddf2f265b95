"""What the engine asks of a drafter, and the DSpark drafter behind that interface.

After each step the engine shows a drafter the rows that stand (:meth:`Drafter.observe`) and then asks it for tokens
of every request that decodes next (:meth:`Drafter.propose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.dspark import DSpark, accepted_slots
from kimi_k3.reference.noise import STREAM_DRAFT, gumbel, signed_seed
from kimi_k3.reference.requests import RequestState

SAMPLE_METHODS = ("greedy", "probabilistic")


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for one request; ``proposal`` [len(tokens), vocab] are the probabilities they were drawn from,
    None where they were chosen without chance."""

    tokens: list[int]
    proposal: Tensor | None = None


class Drafter:
    """Base of drafters; the defaults fit one that needs nothing of the engine.

    ``aux_layers``: taps to ask of the target's forward pass. ``lookahead``: cache rows behind the last token that
    :meth:`propose` writes; the scheduler keeps pages for them.
    """

    aux_layers: tuple[int, ...] = ()
    lookahead: int = 0

    def attach(self, caches: Caches, max_requests: int) -> None:
        """Called once, when the target's caches exist; pages and page size of an own cache are the target's."""

    def observe(self, batch: StepBatch, taps: Tensor, kept: Sequence[int]) -> None:
        """A step was executed: taps [T, len(aux_layers), H], and how many rows of each request stand."""

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        """At most the engine's draft length of tokens for each request that decodes next."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every cached row."""

    def config(self) -> dict[str, Any]:
        """What could change speed or answers."""
        return {}


class DSparkDrafter(Drafter):
    """DSpark on the pages of the target.

    ``method`` "greedy": the most likely token at each place, a one-hot proposal. "probabilistic": sampled at the
    request's temperature, with noise of its own stream; the proposal then is the distribution sampled from.
    """

    def __init__(self, dspark: DSpark, method: str = "greedy") -> None:
        if method not in SAMPLE_METHODS:
            raise ValueError(f"draft sampling {method!r}, expected one of {', '.join(SAMPLE_METHODS)}")
        self.dspark, self.method = dspark, method
        self.aux_layers, self.lookahead = dspark.aux_layers, dspark.draft_length
        self.caches: list[Tensor] = []

    def attach(self, caches: Caches, max_requests: int) -> None:
        pages = next(iter(caches.kv.values())).shape[0]
        self.caches = self.dspark.allocate(pages, caches.page_size)

    def observe(self, batch: StepBatch, taps: Tensor, kept: Sequence[int]) -> None:
        self.dspark.write_context(taps, batch.positions, accepted_slots(batch, kept), self.caches)

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        device, width = self.dspark.device, max(len(s.pages) for s in states)

        def tensor(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        positions = tensor([len(s.tokens) - 1 for s in states])
        heated = [] if self.method == "greedy" else [i for i, s in enumerate(states) if not s.request.sampling.greedy]
        temperature = torch.tensor([states[i].request.sampling.temperature for i in heated], device=device)
        seeds = tensor([signed_seed(states[i].request.sampling.seed) for i in heated])

        def choose(logits: Tensor, place: int) -> Tensor:
            tokens = logits.argmax(-1)
            if heated:
                noise = gumbel(seeds, positions[heated] + place + 1, logits.shape[-1], STREAM_DRAFT)
                tokens[heated] = (logits[heated].double() / temperature.unsqueeze(-1) + noise).argmax(-1)
            return tokens

        tokens, logits = self.dspark.draft(
            tensor([s.tokens[-1] for s in states]),
            positions,
            tensor([[*s.pages, *[-1] * (width - len(s.pages))] for s in states]),
            self.caches,
            choose,
        )
        proposals: list[Tensor | None] = [None] * len(states)
        for i, t in zip(heated, temperature, strict=True):
            proposals[i] = (logits[i].double() / t).softmax(-1).cpu()
        return [Draft(row, p) for row, p in zip(tokens.tolist(), proposals, strict=True)]

    def reset(self) -> None:
        for cache in self.caches:
            cache.zero_()

    def config(self) -> dict[str, Any]:
        return {"draft_sampling": self.method}
