"""200 prompts x 32 greedy tokens: the schedule at TP1, TP8 and TP16 against the stock path, free-running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from decode_steps import Requests, model, prompts, specialized, stock
from torch import Tensor

from kimi_k3.decode import registry
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import Provider
from kimi_k3.reference import moe
from kimi_k3.reference.config import TINY_A

PROMPTS, TOKENS, CROWD = 200, 32, 50
NEAR = 1e-4  #: gaps below which an FP32 decision may go either way

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drop_rank(op: str, rank: int) -> dict[str, Provider]:
    """One rank's partial sums are lost: zeros arrive instead."""
    registry.load("torch")
    real = registry._PROVIDERS[op]["torch"].run

    def run(context: OpContext, x: Tensor, weight: Tensor, box: Tensor) -> None:
        x = x.clone()
        x[rank] = 0
        real(context, x, weight, box)

    return {op: Provider(op, "torch", run)}


@cache
def started(precision: str) -> list[tuple[Requests, list[int]]]:
    """Crowds of requests after their prompts, with the first token of each."""
    rows = prompts(PROMPTS, 5, seed=7)
    crowds = []
    for start in range(0, PROMPTS, CROWD):
        crowd = Requests(model(precision), CROWD)
        crowds.append((crowd, crowd.prefill(rows[start : start + CROWD])))
    return crowds


def generate(
    precision: str, tp: int | None, tokens: int = TOKENS, crowds: int = PROMPTS // CROWD, **options: Any
) -> list[list[int]]:
    """Tokens per prompt; ``tp`` None is the stock path."""
    found = []
    for crowd, first in started(precision)[:crowds]:
        run = crowd.fork()
        step = stock(run) if tp is None else specialized(run.executor(tp, **options))
        found += run.decode(first, tokens - 1, step)
    return found


@cache
def reference(precision: str) -> list[list[int]]:
    return generate(precision, None)


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_fp64_gives_the_same_tokens_without_exception(tp: int) -> None:
    assert generate("fp64", tp) == reference("fp64")


def test_fp64_gives_the_same_tokens_with_the_sequence_spread_over_the_ranks() -> None:
    assert generate("fp64", 8, crowds=1, dcp=8, interleave=3) == reference("fp64")[:CROWD]


def test_the_outputs_are_worth_comparing() -> None:
    tokens = reference("fp64")
    assert all(len(ids) == TOKENS for ids in tokens)
    assert len({token for ids in tokens for token in ids}) >= 50
    assert len({tuple(ids) for ids in tokens}) == PROMPTS


def test_losing_one_ranks_partial_changes_nine_prompts_in_ten() -> None:
    expected = [ids[:12] for ids in reference("fp64")]
    found = generate("fp64", 8, tokens=12, overrides=drop_rank("oproj_publish", 3))
    assert sum(a != b for a, b in zip(found, expected, strict=True)) >= 0.9 * PROMPTS


@contextmanager
def watched_routing(gaps: list[Tensor]) -> Iterator[None]:
    """Collects the gap between the last chosen and the first rejected expert of every row."""
    real = moe.route

    def route(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
        best = (torch.sigmoid(logits) + bias).topk(top_k + 1, -1).values
        gaps.append(best[:, top_k - 1] - best[:, top_k])
        return real(logits, bias, top_k, scaling)

    moe.route = route
    try:
        yield
    finally:
        moe.route = real


@cache
def gaps() -> tuple[Tensor, Tensor]:
    """Along the FP64 run, per prompt and step: top-2 gap of the logits, smallest routing gap. [prompts, TOKENS - 1]"""
    logit_gaps, routing_gaps = [], []
    for crowd, first in started("fp64"):
        run, rows = crowd.fork(), []
        tops: list[Tensor] = []

        def step(batch: Any, run: Requests = run, rows: list[Tensor] = rows, tops: list[Tensor] = tops) -> Tensor:
            layers: list[Tensor] = []
            with watched_routing(layers):
                hidden = run.model.forward(batch, run.caches)
            top = run.model.compute_logits(hidden).topk(2, -1).values
            tops.append(top[:, 0] - top[:, 1])
            rows.append(torch.stack(layers).amin(0))
            return hidden

        run.decode(first, TOKENS - 1, step)
        logit_gaps.append(torch.stack(tops, 1))
        routing_gaps.append(torch.stack(rows, 1))
    return torch.cat(logit_gaps), torch.cat(routing_gaps)


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_every_fp32_flip_is_a_near_tie(tp: int, record_property: Any) -> None:
    """The first token that differs from FP64 follows a choice that was this close: of the token, or of an expert."""
    logit_gap, routing_gap = gaps()
    flips = []
    for prompt, (found, expected) in enumerate(zip(generate("fp32", tp), reference("fp64"), strict=True)):
        if found == expected:
            continue
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        assert at > 0  # the prompts ran on the stock path
        flips.append((prompt, at, float(logit_gap[prompt, at - 1]), float(routing_gap[prompt, :at].min())))
    record_property("flips", [f"prompt {p} token {t}: top-2 {g:.2e}, top-k {r:.2e}" for p, t, g, r in flips])
    assert len(flips) < PROMPTS / 4
    assert all(min(top_2, top_k) < NEAR for _, _, top_2, top_k in flips), flips


def test_the_gaps_say_something() -> None:
    """Most steps are no near ties, so a flip at a random place would be caught."""
    logit_gap, routing_gap = gaps()
    assert logit_gap.shape == routing_gap.shape == (PROMPTS, TOKENS - 1)
    assert float((logit_gap < NEAR).double().mean()) < 0.01
    assert float((routing_gap < NEAR).double().mean()) < 0.1
    assert TINY_A.num_experts_per_token == 8
