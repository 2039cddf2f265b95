"""A drafter for tests: the target itself rehearses the next tokens, and each is right with a given probability.

Untrained drafters are never right, so a run with one never accepts anything. This one makes every acceptance
count occur, at the price of ``draft_length`` plain steps of the stock path per engine step. It says nothing about
speed or about the acceptance of a real drafter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from kimi_k3.reference.batch import RequestRows, build_batch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.drafter import Draft, Drafter
from kimi_k3.reference.model import Model
from kimi_k3.reference.noise import STREAM_REHEARSAL, signed_seed, uniform
from kimi_k3.reference.requests import RequestState


class RehearsalDrafter(Drafter):
    """Drafts what the target would emit greedily (or is forced to), each token kept with probability ``hit_rate``,
    else replaced by another. A function of the request and ``seed`` only.

    The KV rows it writes lie behind the last token, where every later step overwrites them before reading; states
    are copies in slots of its own.
    """

    def __init__(self, model: Model, draft_length: int, hit_rate: float = 0.8, seed: int = 0) -> None:
        if not 0.0 <= hit_rate <= 1.0:
            raise ValueError(f"hit rate {hit_rate}, expected between 0 and 1")
        if model.state_scheme != "native":
            raise ValueError("a rehearsal needs the native state slots")
        self.model, self.draft_length, self.hit_rate, self.seed = model, draft_length, hit_rate, seed
        self.lookahead = draft_length

    def attach(self, caches: Caches, max_requests: int) -> None:
        taps = self.model.config.short_conv_kernel_size - 1
        self.source = caches
        self.caches = Caches(
            caches.page_size,
            caches.kv,
            {layer: x.new_zeros(1 + max_requests, taps, x.shape[2]) for layer, x in caches.conv.items()},
            {layer: x.new_zeros(1 + max_requests, *x.shape[1:]) for layer, x in caches.recurrent.items()},
        )

    @torch.inference_mode()
    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        for slot, state in enumerate(states, 1):
            self._copy_state(state, slot)
        found: list[list[int]] = [[] for _ in states]
        for _ in range(self.draft_length):
            going = [i for i, s in enumerate(states) if len(s.tokens) + len(found[i]) <= self._room(s)]
            if not going:
                break
            rows = [
                RequestRows(
                    [found[i][-1] if found[i] else states[i].tokens[-1]],
                    len(states[i].tokens) - 1 + len(found[i]),
                    prefill=False,
                    pages=states[i].pages,
                    slots=[i + 1],
                )
                for i in going
            ]
            batch = build_batch(rows, self.caches.page_size, self.model.device)
            logits = self.model.compute_logits(self.model.forward(batch, self.caches))
            for row, i in zip(logits, going, strict=True):
                self._hold_to_grammar(row, states[i], found[i])
            for i, token in zip(going, logits.argmax(-1).tolist(), strict=True):
                forced, place = states[i].request.forced, states[i].emitted + len(found[i])
                found[i].append(forced[place] if place < len(forced) else token)
        return [Draft(self._spoil(state, tokens)) for state, tokens in zip(states, found, strict=True)]

    def _hold_to_grammar(self, row: torch.Tensor, state: RequestState, drafted: Sequence[int]) -> None:
        """Under a grammar the target emits its best *allowed* token; without this hardly any draft would stand."""
        if state.mask is not None and not state.request.forced:
            row.masked_fill_(~state.mask([*state.output, *drafted]).to(row.device), -torch.inf)

    def _room(self, state: RequestState) -> int:
        """Tokens whose rows the request's pages hold."""
        return len(state.pages) * self.caches.page_size

    def _copy_state(self, state: RequestState, slot: int) -> None:
        """The committed state of ``state``, as a plain decode step expects it, to ``slot``."""
        own, accepted = state.slots, state.accepted
        for layer, conv in self.caches.conv.items():
            conv[slot] = self.source.conv[layer][own[0], accepted - 1 : accepted - 1 + conv.shape[1]]
            self.caches.recurrent[layer][slot] = self.source.recurrent[layer][own[accepted - 1]]

    def _spoil(self, state: RequestState, tokens: list[int]) -> list[int]:
        if not tokens:
            return []
        places = torch.arange(len(state.tokens), len(state.tokens) + len(tokens))
        own = zlib.crc32(repr(state.request.prompt).encode()) + state.request.sampling.seed
        seed = torch.full_like(places, signed_seed(self.seed + own))
        u = uniform(seed, places, torch.zeros_like(places), STREAM_REHEARSAL).tolist()
        vocab = self.model.config.vocab_size
        return [t if x < self.hit_rate else (t + 1) % vocab for t, x in zip(tokens, u, strict=True)]

    def config(self) -> dict[str, Any]:
        return {"drafter_hit_rate": self.hit_rate}
