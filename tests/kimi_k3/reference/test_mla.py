"""Absorbed against un-absorbed attention, the paged cache, and FP8 rows."""

from __future__ import annotations

import math

import pytest
import torch

from kimi_k3.reference import mla
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.init import random_layer
from kimi_k3.reference.numerics import to_fp8
from kimi_k3.reference.precision import FP8, PRECISIONS
from kimi_k3.reference.weights import MLAWeights, convert

FP64 = PRECISIONS["fp64"]


def _layer(precision_name: str = "fp64") -> mla.MLA:
    weights = random_layer(TINY_A, 3, seed=0).attention
    assert isinstance(weights, MLAWeights)
    precision = PRECISIONS[precision_name]
    return mla.MLA(TINY_A, convert(weights, precision.compute), precision)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_absorbed_equals_unabsorbed() -> None:
    layer = _layer()
    query, rows = _random(2, 3, 16, 24), _random(2, 11, 40, seed=1)
    positions = torch.tensor([[4, 5, 6], [8, 9, 10]])
    torch.testing.assert_close(
        layer.absorbed(query, rows, positions), layer.unabsorbed(query, rows, positions), rtol=0, atol=1e-12
    )


def test_unabsorbed_matches_attention_written_out() -> None:
    layer = _layer()
    query, rows = _random(1, 2, 16, 24), _random(1, 6, 40, seed=1)
    out = layer.unabsorbed(query, rows, torch.tensor([[3, 5]])).view(2, 16, 16)
    head = 7
    expand = layer.kv_b_proj[head * 32 : (head + 1) * 32]  # key rows, then value rows
    for r, last in enumerate((3, 5)):
        scores, values = [], []
        for j in range(last + 1):
            latent, rope = rows[0, j, :32], rows[0, j, 32:]
            key = torch.cat([expand[:16] @ latent, rope])
            scores.append(math.exp(float(query[0, r, head] @ key) / math.sqrt(24)))
            values.append(expand[16:] @ latent)
        expected = sum(s / sum(scores) * v for s, v in zip(scores, values, strict=True))
        torch.testing.assert_close(out[r, head], expected, rtol=0, atol=1e-12)


def test_rows_are_read_through_the_block_table_and_nothing_else_is() -> None:
    cache = torch.full((6, 4, 3), float("nan"), dtype=torch.float64)
    rows = _random(7, 3)
    mla.write_rows(cache, rows, torch.tensor([5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, -1]))
    out = mla.read_rows(cache, torch.tensor([[5, 2, -1], [3, -1, -1]]), torch.tensor([6, 0]), torch.float64)
    assert torch.equal(out[0], rows[:6])
    assert torch.equal(out[1], torch.zeros(6, 3, dtype=torch.float64))
    assert int((~cache.isnan()).all(-1).sum()) == 6, "the padded row was written"


def test_fp8_rows_saturate() -> None:
    cache = torch.zeros(1, 4, 4, dtype=FP8)
    mla.write_rows(cache, torch.tensor([[1000.0, -1000.0, 1.06, float("nan")]]), torch.tensor([2]))
    row = mla.read_rows(cache, torch.tensor([[0]]), torch.tensor([3]), torch.float32)[0, 2]
    assert row[:3].tolist() == [448.0, -448.0, 1.0]
    assert bool(row[3].isnan())


def test_fp8_cache_also_rounds_the_absorbed_query() -> None:
    plain, fp8 = _layer("bf16"), _layer("bf16-kvfp8")
    query = _random(1, 1, 16, 24).bfloat16().float()
    rows = to_fp8(_random(1, 5, 40, seed=1)).float()
    positions = torch.tensor([[4]])
    a, b = plain.absorbed(query, rows, positions), fp8.absorbed(query, rows, positions)
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0, atol=0.2)
    assert torch.equal(plain.unabsorbed(query, rows, positions), fp8.unabsorbed(query, rows, positions))


def test_heads_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="16 MLA heads"):
        mla.MLA(TINY_A, convert(random_layer(TINY_A, 3, 0).attention, torch.float64), FP64, tp=3)
