"""Decode context parallelism: the cached sequence spread over the ranks, queries exchanged, parts merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_steps import Requests, model, prompts, same_bits, specialized, spoiled_after, spoiled_before, worst

from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import FP8, Precision


@pytest.mark.parametrize("interleave", [1, 3, 64])
@pytest.mark.parametrize("tp", [2, 8, 16])
def test_a_sequence_spread_over_the_ranks_gives_the_same_answers(tp: int, interleave: int) -> None:
    """Contexts from 1 token (most ranks own nothing) to several runs per rank, uneven, plain and verify steps."""
    run = Requests(model(), 4, draft_length=3, max_tokens=64)
    lengths = (1, 7, 24, 40)
    run.prefill([prompts(1, n, seed=n)[0] for n in lengths])
    other = run.fork()
    executor = other.executor(tp, dcp=tp, interleave=interleave, debug=True)
    generator = torch.Generator().manual_seed(2)
    for width in (1, 4, 4):
        batch = run.batch(torch.randint(0, 500, (4, width), generator=generator).tolist())
        plan = executor.plan(batch)
        assert plan.kv_splits == plan.dcp == tp
        expected = run.model.forward(batch, run.caches)
        torch.testing.assert_close(executor.run(plan, batch), expected, rtol=0, atol=1e-11)
        assert executor.last_step is not None
        assert executor.last_step.ranks_agree
        run.accept([1 + r % width for r in range(4)])
    assert worst(run.caches, other.caches) < 1e-11


@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_context_parallel_steps_stay_near_the_plain_ones_in_low_precision(kv: torch.dtype) -> None:
    low = Model(TINY_A, model().weights, Precision(kv=kv))
    run = Requests(low, 3)
    first = run.prefill(prompts(3, 20))
    batch = run.batch([[t] for t in first])
    plain, spread = run.fork(), run.fork()
    executors = [plain.executor(8, debug=True), spread.executor(8, dcp=8, debug=True)]
    a, b = (specialized(executor)(batch) for executor in executors)
    assert not torch.equal(a, b)  # each rank's part was rounded
    assert float((a - b).square().mean().sqrt()) < 0.1


def test_each_rank_stores_its_own_cache_rows() -> None:
    """A rank with wrong rows spoils the tokens it owns and no others."""
    run = Requests(model("bf16"), 4)
    first = run.prefill([prompts(1, n, seed=n)[0] for n in (4, 5, 6, 7)])  # next positions 4..7: ranks 4..7
    fork = run.fork()
    batch = run.batch([[t] for t in first])
    clean = run.executor(8, dcp=8)
    clean.run(clean.plan(batch), batch)

    def spoil(args: tuple[Any, ...]) -> None:
        args[0][5, :, TINY_A.q_lora_rank : TINY_A.q_lora_rank + TINY_A.kv_row] *= 2  # rank 5's projection

    broken = fork.executor(8, dcp=8, overrides=spoiled_before("mla_query", spoil))
    broken.run(broken.plan(batch), batch)
    rows = batch.slot_mapping
    kept = [same_bits(*(c.caches.kv[3].flatten(0, 1)[rows[i]] for c in (run, fork))) for i in range(4)]
    assert kept == [True, False, True, True]


@pytest.mark.parametrize("fault", ["base of the logarithm", "empty shard dropped"])
def test_wrong_merges_of_context_parallel_parts_are_visible(fault: str) -> None:
    run = Requests(model(), 2)
    first = run.prefill(prompts(2, 3))
    fork = run.fork()
    batch = run.batch([[t] for t in first])

    def spoil(args: tuple[Any, ...]) -> None:
        partial, lse = args[-2], args[-1]
        if fault == "base of the logarithm":
            lse[:, :, :2] *= 1.4427
        else:
            partial[6, :, :2] = float("nan")  # rank 6 owns no token and sends nothing
            lse[6, :, :2] = float("nan")

    good, bad = run.executor(8, dcp=8), fork.executor(8, dcp=8, overrides=spoiled_after("mla_core", spoil))
    a, b = good.run(good.plan(batch), batch), bad.run(bad.plan(batch), batch)
    assert not torch.allclose(a, b, atol=1e-4)
