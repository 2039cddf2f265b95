"""The engine with the real model: in FP64 the schedule changes no token, and log-probabilities are the model's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from kimi_k3.reference.batch import RequestRows, build_batch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.drafter import Draft, Drafter
from kimi_k3.reference.engine import EmbeddedEngine
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.options import EngineOptions
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.requests import Completion, GenerationRequest, RequestState, SamplingParams
from kimi_k3.reference.tokenizer import TextCodec

CODEC = TextCodec()


@cache
def model() -> Model:
    return Model(TINY_A, random_weights(TINY_A, 0), PRECISIONS["fp64"])


def build(drafter: object = None, **options: object) -> EmbeddedEngine:
    values = {"max_requests": 4, "max_context": 96, "max_tokens_per_step": 64, "page_size": 4, **options}
    engine = EmbeddedEngine(model(), CODEC, EngineOptions(**values), drafter=drafter)
    for tensors in (engine.caches.kv, engine.caches.conv, engine.caches.recurrent):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))  # what was never written must never be read
    return engine


def requests() -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 24, 0), (17, 16, 0), (1, 24, 2), (30, 12, 3), (9, 20, 7), (23, 8, 1)]
    return [
        GenerationRequest(
            f"r{i}",
            tuple(torch.randint(0, 500, (length,), generator=generator).tolist()),
            new,
            SamplingParams(temperature=float(i % 2), seed=i, ignore_eos=True),
            arrival_step=arrival,
        )
        for i, (length, new, arrival) in enumerate(shapes)
    ]


@cache
def alone() -> dict[str, list[int]]:
    """Each request by itself, its prompt in one prefill."""
    done: list[Completion] = []
    for request in requests():
        done += build().generate([GenerationRequest(**{**vars(request), "arrival_step": 0})], run="alone")
    assert len({token for c in done for token in c.token_ids}) > 40
    return {c.id: c.token_ids for c in done}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "pure"},
        {"max_tokens_per_step": 7},
        {"pages": 14},  # preempts
        {"page_size": 13},
    ],
)
def test_tokens_do_not_depend_on_batch_chunks_pages_or_preemption(options: dict[str, object]) -> None:
    engine = build(**options)
    states = [engine.submit(r) for r in requests()]
    index = 0
    while any(s.finish_reason is None for s in states):
        engine.step("x", index)
        index += 1
    assert {s.request.id: s.output for s in states} == alone()
    assert (sum(s.preemptions for s in states) > 0) == ("pages" in options)


class Replay(Drafter):
    """Drafts from the known continuation, the last one of every other draft spoiled."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        drafts = []
        for state in states:
            self.calls += 1
            known = alone()[state.request.id][state.emitted : state.emitted + 3]
            if known and self.calls % 2:
                known[-1] = (known[-1] + 1) % 512
            drafts.append(Draft(known))
        return drafts


def test_verify_steps_accept_what_plain_decoding_would_emit() -> None:
    engine = build(Replay(), draft_length=3)
    done = engine.generate(requests(), run="x")
    greedy = {r.id for r in requests() if r.sampling.greedy}
    assert [c.token_ids == alone()[c.id] for c in done if c.id in greedy] == [True] * 3
    assert all(len(c.token_ids) == len(alone()[c.id]) for c in done)
    ledger = engine.drain_ledger()
    verify = [e for e in ledger if e.kind == "verify"]
    assert len(verify) > 3
    assert sum(e.emitted for e in ledger) == sum(len(c.token_ids) for c in done)
    assert max(e.emitted / e.requests for e in verify) > 2, "drafts must really have been accepted"


def test_forced_log_probabilities_are_those_of_one_forward_pass() -> None:
    prompt, forced = tuple(range(40, 52)), tuple(range(100, 116))
    (done,) = build().generate([GenerationRequest("a", prompt, len(forced), forced=forced)], run="x", keep_logits=True)
    assert tuple(done.token_ids) == forced
    caches = Caches.allocate(TINY_A, PRECISIONS["fp64"], pages=8, page_size=4, slots=2)
    rows = RequestRows([*prompt, *forced], 0, True, list(range(8)), [1])
    logits = model().compute_logits(model().forward(build_batch([rows], 4), caches))
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    torch.testing.assert_close(done.full_logprobs, expected, rtol=0, atol=1e-9)
    assert done.logprobs == pytest.approx([float(row[t]) for row, t in zip(expected, forced, strict=True)], abs=1e-9)
