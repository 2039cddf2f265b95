"""Routing, expert execution, and where the latent norm sits."""

from __future__ import annotations

import pytest
import torch

from kimi_k3.reference import mxfp4
from kimi_k3.reference.config import TINY_B
from kimi_k3.reference.init import random_layer
from kimi_k3.reference.moe import LatentMoE, route
from kimi_k3.reference.numerics import rms_norm, situ_glu
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.weights import MoEWeights, MXFP4Tensor, convert

FP64 = PRECISIONS["fp64"]


@pytest.fixture(scope="module")
def weights() -> MoEWeights:
    ffn = random_layer(TINY_B, 1, seed=0).ffn
    assert isinstance(ffn, MoEWeights)
    return convert(ffn, torch.float64)


def _x(rows: int = 9) -> torch.Tensor:
    return torch.randn(rows, TINY_B.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, -9.0, 9.0], dtype=torch.float64)
    ids, weights = route(logits, bias, 2, 2.0)
    assert ids.tolist() == [[3, 1]]
    p = torch.sigmoid(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(weights[0], 2.0 * p / p.sum(), rtol=0, atol=1e-15)


def test_ties_go_to_the_lower_id_and_nan_is_never_chosen() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 2] = float("nan")
    ids, _ = route(logits, torch.zeros(64), 4, 1.0)
    assert ids.tolist() == [[0, 1, 3, 4]]


def test_experts_match_a_loop_over_tokens(weights: MoEWeights) -> None:
    moe = LatentMoE(TINY_B, weights, FP64)
    x = _x()
    expected = []
    for row in x:
        score = torch.sigmoid(weights.gate @ row)
        chosen = (score + weights.correction_bias).topk(8).indices.tolist()
        zl = weights.latent_down @ row
        total = torch.zeros_like(zl)
        for e in chosen:
            w1, w3, w2 = (
                mxfp4.dequantize(MXFP4Tensor(w.packed[e], w.scale[e]), torch.float64)
                for w in (weights.w1, weights.w3, weights.w2)
            )
            total += score[e] / score[chosen].sum() * (w2 @ situ_glu(w1 @ zl, w3 @ zl, 4.0, 25.0))
        shared = weights.shared
        out = weights.latent_up @ rms_norm(total, weights.latent_norm, 1e-5)
        expected.append(out + shared.down_proj @ situ_glu(shared.gate_proj @ row, shared.up_proj @ row, 4.0, 25.0))
    torch.testing.assert_close(moe(x), torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 9])
def test_lazily_dequantised_experts_give_the_same(weights: MoEWeights, rows: int) -> None:
    precision = PRECISIONS["bf16"]
    single = convert(weights, torch.float32)
    kept = LatentMoE(TINY_B, single, precision, cached=True)
    lazy = LatentMoE(TINY_B, single, precision, cached=False)
    x = precision.rounded(_x(rows))
    torch.testing.assert_close(kept(x), lazy(x), rtol=0, atol=1e-2)
    exact = [LatentMoE(TINY_B, weights, FP64, cached=c)(_x(rows)) for c in (True, False)]
    torch.testing.assert_close(exact[0], exact[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tp", [2, 8])
def test_rank_partials_add_up_before_the_norm(weights: MoEWeights, tp: int) -> None:
    one, many = LatentMoE(TINY_B, weights, FP64), LatentMoE(TINY_B, weights, FP64, tp=tp)
    x = _x()
    torch.testing.assert_close(many(x), one(x), rtol=0, atol=1e-12)
    ids, w = many.route(x)
    partials = many.experts(x @ weights.latent_down.T, ids, w)
    assert partials.shape == (tp, len(x), TINY_B.routed_expert_hidden_size)
    normed_first = sum(rms_norm(p, weights.latent_norm, 1e-5) for p in partials)
    normed_last = rms_norm(partials.sum(0), weights.latent_norm, 1e-5)
    assert (normed_first - normed_last).abs().max() > 0.1


def test_rank_partials_are_rounded_to_the_activation_dtype(weights: MoEWeights) -> None:
    precision = PRECISIONS["bf16"]
    moe = LatentMoE(TINY_B, convert(weights, torch.float32), precision, tp=8)
    x = precision.rounded(_x())
    ids, w = moe.route(x)
    partials = moe.experts(precision.rounded(x @ moe.latent_down.T), ids, w)
    assert torch.equal(partials, partials.bfloat16().float())
    shared = moe.shared.down.partials(moe.shared.hidden(x))
    assert shared.shape == (8, *x.shape)
    assert torch.equal(shared, shared.bfloat16().float())
