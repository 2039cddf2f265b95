"""Attention residuals: the mixture, and the lazy control flow against sums of sub-layer outputs per block."""

from __future__ import annotations

import math

import pytest
import torch

from kimi_k3.reference.attn_res import AttnResSite, ResidualStream, mix_sources
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.weights import AttnResWeights

FP64 = PRECISIONS["fp64"]
T, H, EPS = 3, 6, 1e-5


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _site(seed: int) -> tuple[AttnResSite, AttnResWeights]:
    weights = AttnResWeights(_random(H, seed=seed), _random(H, seed=seed + 1))
    return AttnResSite(weights, EPS), weights


def _mixture(sources: list[torch.Tensor], weights: AttnResWeights) -> torch.Tensor:
    """[T, H], by the definition: softmax of proj . rmsnorm(source), over the raw sources."""
    out = torch.empty(T, H, dtype=torch.float64)
    for t in range(T):
        scores = []
        for v in sources:
            normed = v[t] / math.sqrt(float(v[t] @ v[t]) / H + EPS) * weights.norm
            scores.append(math.exp(float(weights.proj @ normed)))
        out[t] = sum(s / sum(scores) * v[t] for s, v in zip(scores, sources, strict=True))
    return out


def test_mixture_matches_its_definition() -> None:
    site, weights = _site(1)
    sources = [_random(T, H, seed=10 + i) * 3 for i in range(4)]
    torch.testing.assert_close(
        mix_sources(torch.stack(sources, 1), site.query, EPS), _mixture(sources, weights), rtol=0, atol=1e-12
    )


def test_a_single_source_is_returned_unchanged() -> None:
    source = _random(T, 1, H, seed=0)
    assert torch.equal(mix_sources(source, _site(1)[0].query, EPS), source[:, 0])


@pytest.mark.parametrize(("layers", "size"), [(8, 4), (5, 2), (21, 6), (3, 4)])
def test_control_flow_equals_block_sums(layers: int, size: int) -> None:
    """Layer 0, every block opener, and a last block that is never stored: read by read."""
    embedding = _random(T, H, seed=0)
    stream = ResidualStream(embedding, -(-layers // size), FP64)
    one = torch.ones(H, dtype=torch.float64)
    blocks: list[list[torch.Tensor]] = []

    def sources() -> list[torch.Tensor]:
        return [embedding] + [torch.stack(block).sum(0) for block in blocks if block]

    def check(read: torch.Tensor, weights: AttnResWeights) -> None:
        mixed = _mixture(sources(), weights)
        normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS)
        torch.testing.assert_close(read, normed, rtol=0, atol=1e-12)

    for i in range(layers):
        site, weights = _site(100 + i)
        check(stream.read_attention(site, i % size == 0, one), weights)
        if i % size == 0:
            blocks.append([])
        blocks[-1].append(_random(T, H, seed=1000 + i))
        stream.add_attention(blocks[-1][-1])
        if i % size == 0:
            assert torch.equal(stream.prefix, blocks[-1][-1]), "a block opener replaces the prefix"
            assert stream.blocks.shape[1] == i // size + 1
        site, weights = _site(200 + i)
        check(stream.read_ffn(site, one), weights)
        blocks[-1].append(_random(T, H, seed=2000 + i))
        stream.add_ffn(blocks[-1][-1])
        torch.testing.assert_close(stream.tap(), torch.stack(blocks[-1]).sum(0), rtol=0, atol=1e-12)
    site, weights = _site(300)
    torch.testing.assert_close(stream.read_final(site), _mixture(sources(), weights), rtol=0, atol=1e-12)
    torch.testing.assert_close(stream.blocks[:, 0], embedding, rtol=0, atol=0)


def test_rounding_points() -> None:
    precision = PRECISIONS["bf16"]
    stream = ResidualStream(precision.rounded(_random(T, H, seed=0)), 1, precision)
    site = AttnResSite(AttnResWeights(_random(H, seed=1).float(), _random(H, seed=2).float()), EPS)
    one = torch.ones(H)
    results = [stream.read_attention(site, True, one)]
    stream.add_attention(precision.rounded(_random(T, H, seed=3)))
    results.append(stream.read_ffn(site, one))
    stream.add_ffn(precision.rounded(_random(T, H, seed=4)))
    results += [stream.tap(), stream.settle(), stream.read_final(site)]
    for result in results:
        assert torch.equal(result, result.bfloat16().float())
    assert torch.equal(results[2], results[3])
