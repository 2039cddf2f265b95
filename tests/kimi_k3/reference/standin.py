"""A stand-in model for engine tests that checks what it is given, and requests to run on it.

:class:`StandIn` keeps a hash of the token history in the state slots and the tokens themselves in the paged
cache, and its logits are a function of the hash: a wrong page, slot, position or accepted count changes the
tokens or trips its assertion.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import NULL_SLOT, Caches
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.drafter import Draft, Drafter
from kimi_k3.reference.engine import EmbeddedEngine
from kimi_k3.reference.options import EngineOptions
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.requests import Completion, GenerationRequest, RequestState, SamplingParams
from kimi_k3.reference.tokenizer import TextCodec

CODEC = TextCodec()
EOS = TINY_A.eos_token_id
VOCAB = TINY_A.vocab_size
KV_LAYER, KDA_LAYER = 3, 0
BASIS = torch.arange(1, VOCAB + 1, dtype=torch.float64)


def logits_of(history: float) -> torch.Tensor:
    return 4 * torch.sin(BASIS * (0.1 + history % 997))


class StandIn:
    config = TINY_A
    precision = PRECISIONS["fp64"]
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    @staticmethod
    def extend(history: float, token: float) -> float:
        return (history * 31 + token + 1) % 1000003

    def forward(
        self, batch: StepBatch, caches: Caches, aux_layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches.append(batch)
        kv, states = caches.kv[KV_LAYER].flatten(0, 1)[:, 0], caches.recurrent[KDA_LAYER][:, 0, 0, 0]
        out, first = [], 0
        for i, rows in enumerate(batch.query_lens):
            context, slots = batch.context_lens[i], batch.state_slots[i].tolist()
            assert NULL_SLOT not in slots
            history = float(states[slots[int(batch.accepted[i]) - 1]]) if context else 0.0
            for j in range(rows):
                row = first + j
                assert int(batch.positions[row]) == context + j
                kv[batch.slot_mapping[row]] = float(batch.token_ids[row])
                history = self.extend(history, float(batch.token_ids[row]))
                if not batch.is_prefill[i]:
                    states[slots[j]] = history
                out.append(history)
            if batch.is_prefill[i]:
                states[slots[0]] = history
            reread = 0.0
            for position in range(context + rows):
                page = int(batch.block_tables[i, position // caches.page_size])
                reread = self.extend(reread, float(kv[page * caches.page_size + position % caches.page_size]))
            assert reread == history, "pages and state slots tell different stories"
            first += rows
        hidden = torch.tensor(out, dtype=torch.float64)[:, None]
        return hidden, hidden.unsqueeze(1).expand(-1, len(aux_layers), -1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits_of(float(h)) for h in hidden]) if len(hidden) else torch.empty(0, VOCAB)


def build(
    model: Any = None,
    *,
    drafter: Any = None,
    executor: Any = None,
    grammar: Any = None,
    rejection: Any = None,
    **options: Any,
):
    values: dict[str, Any] = {"max_requests": 4, "max_context": 128, "max_tokens_per_step": 64, "page_size": 4}
    engine = EmbeddedEngine(
        model or StandIn(),
        CODEC,
        EngineOptions(**{**values, **options}),
        drafter=drafter,
        executor=executor,
        grammar=grammar,
        rejection=rejection,
    )
    for tensor in (engine.caches.kv[KV_LAYER], engine.caches.recurrent[KDA_LAYER]):
        tensor.fill_(float("nan"))  # nothing may be read before it was written
    return engine


def request(name: str, prompt: Sequence[int] = (1, 2, 3), tokens: int = 8, *, arrival: int = 0, forced=(), **sampling):
    sampling.setdefault("ignore_eos", True)
    return GenerationRequest(
        name, tuple(prompt), tokens, SamplingParams(**sampling), arrival_step=arrival, forced=tuple(forced)
    )


def crowd(count: int, seed: int = 0, temperatures: Sequence[float] = (0.0, 1.0)) -> list[GenerationRequest]:
    """Requests of mixed lengths, arrivals and sampling."""
    rng = random.Random(seed)
    return [
        request(
            f"r{i}",
            [rng.randrange(500) for _ in range(rng.randrange(1, 24))],
            rng.randrange(1, 40),
            arrival=rng.randrange(10),
            temperature=rng.choice(list(temperatures)),
            seed=rng.randrange(1000),
            top_k=rng.choice([0, 20]),
            frequency_penalty=rng.choice([0.0, 0.5]),
        )
        for i in range(count)
    ]


def tokens(completions: Sequence[Completion]) -> dict[str, list[int]]:
    return {c.id: c.token_ids for c in completions}


def expected_greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The stand-in's greedy continuation, computed without engine."""
    history, out = 0.0, []
    for token in prompt:
        history = StandIn.extend(history, token)
    for _ in range(count):
        out.append(int(logits_of(history).argmax()))
        history = StandIn.extend(history, out[-1])
    return out


def no_leaks(engine: EmbeddedEngine) -> bool:
    scheduler = engine.scheduler
    return scheduler.pages.free == scheduler.pages.pages and scheduler.slots.free == scheduler.max_requests


class Guesser(Drafter):
    """Drafts that are sometimes right: the true greedy continuation, broken at a random place."""

    def __init__(self, length: int, ragged: bool) -> None:
        self.rng, self.length, self.ragged = random.Random(0), length, ragged

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        drafts = []
        for s in states:
            count = self.rng.randrange(self.length + 1) if self.ragged else self.length
            guess = expected_greedy(s.tokens, count)
            if guess and self.rng.random() < 0.7:
                guess[self.rng.randrange(count)] = self.rng.randrange(VOCAB)
            drafts.append(Draft(guess))
        return drafts


def one_by_one(requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """Tokens of each request alone in an engine with room for all."""
    alone = [GenerationRequest(**{**vars(r), "arrival_step": 0}) for r in requests]
    return tokens(list(itertools.chain.from_iterable(build().generate([r], run="x") for r in alone)))


REFERENCE = one_by_one(crowd(8))
GREEDY = one_by_one(crowd(8, temperatures=[0.0]))
