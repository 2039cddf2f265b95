"""vLLM's kernels as the other side of the timings, with stand-ins for them that compute what they are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from kimi_k3.kernels import attn_res_cases, kda_core_cases, shard_bench, stock
from kimi_k3.kernels.bench import Timing
from kimi_k3.kernels.bench_inputs import KdaLayers, ResidualSites
from kimi_k3.kernels.kda_core_cases import HEAD
from kimi_k3.kernels.shard_bench import SITES


def attn_res(
    prefix: Tensor, delta: Tensor, blocks: Tensor, norm_weight: Tensor, qk_weight: Tensor,
    output_norm_weight: Tensor | None, num_blocks: int, block_write_idx: int, eps: float, output_norm_eps: float,
) -> Tensor:  # fmt: skip
    assert eps == attn_res_cases.EPS
    assert block_write_idx in (-1, num_blocks)
    final = output_norm_weight is None
    gamma = torch.ones_like(norm_weight) if output_norm_weight is None else output_norm_weight
    out, query = torch.empty_like(prefix), norm_weight.float() * qk_weight.float()
    given = (delta, prefix, blocks, query, gamma, None)
    attn_res_cases.reference(*given, out, stored=num_blocks, opens=block_write_idx >= 0, final=final)
    return out


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float())


def fused_kda_decode(**given: Any) -> None:
    """One request, with the checks that vLLM's op makes."""
    g = SimpleNamespace(**given)
    heads, width = g.A_log.shape[0], g.A_log.shape[0] * HEAD
    assert g.x.shape == (1, 3 * width)
    assert g.conv_state.shape[1:] == (3 * width, 3)
    assert g.raw_g.shape == (1, 1, heads, HEAD)
    assert g.raw_g.is_contiguous()
    assert g.raw_beta.shape == (1, 1, heads)
    assert g.state_indices.dtype == torch.int32
    assert g.norm_eps == kda_core_cases.NORM_EPS
    assert g.bias is None
    one = torch.zeros(1, HEAD, dtype=torch.bfloat16)
    one[0, 0] = 1  # the logits come multiplied: F_B becomes their column
    f_b = torch.zeros(width, HEAD, dtype=torch.bfloat16)
    f_b[:, 0] = g.raw_g.flatten()
    projected = torch.cat([g.x, g.output_gate.flatten(1), one, g.raw_beta[0]], 1)
    weights = (f_b, g.weight, g.A_log, g.dt_bias, g.norm_weight)
    conv = g.conv_state.transpose(-1, -2)
    kda_core_cases.reference(projected, *weights, g.state_indices, None, conv, g.state, g.out.view(1, width))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    names = SimpleNamespace(attn_res=attn_res, rms_norm=rms_norm, fused_kda_decode=fused_kda_decode)
    monkeypatch.setattr(stock, "vllm", lambda: names)
    return names


def test_without_vllm_nothing_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock.importlib.util, "find_spec", lambda name: None)
    stock.vllm.cache_clear()
    assert stock.vllm() is None
    assert stock.kda(KdaLayers(12, 1, 1, 0, 1, "cpu")) is None
    stock.vllm.cache_clear()


def test_kda_is_the_same_step(installed: SimpleNamespace) -> None:
    layers, ours = (KdaLayers(12, 1, 1, 0, 2, "cpu") for _ in range(2))
    found = stock.kda(layers)
    assert found is not None
    assert found[0] == "torch.mm of F_B and vLLM fused_kda_decode"
    assert torch.equal(layers.state[0], ours.state[0]), "the probe ran on copies"
    found[1](1)
    k = ours
    given = (k.projected, k.f_b[1], k.conv_weight[1], k.a_log[1], k.dt_bias[1], k.norm[1], k.slots, None)
    kda_core_cases.reference(*given, k.conv[1], k.state[1], k.out[1])
    torch.testing.assert_close(layers.out[1], ours.out[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(layers.state[1], ours.state[1], rtol=1e-2, atol=1e-3)
    assert torch.equal(layers.conv[1], ours.conv[1])


@pytest.mark.parametrize(("heads", "tokens", "columns"), [(6, 1, 0), (12, 4, 8)])
def test_steps_that_the_fused_kernel_does_not_serve(installed: object, heads: int, tokens: int, columns: int) -> None:
    assert stock.kda(KdaLayers(heads, 1, tokens, columns, 1, "cpu")) is None


@pytest.mark.parametrize("site", SITES)
def test_residual_is_the_same_site(installed: SimpleNamespace, site: str) -> None:
    sites, ours = (ResidualSites(SITES[site], 2, 256, 2, "cpu") for _ in range(2))
    found = stock.residual(sites)
    assert found is not None
    assert torch.equal(sites.prefix, ours.prefix)
    found[1](1)
    given = (ours.delta[1], ours.prefix[1], ours.blocks[1], ours.query[1], ours.gamma[1], None, ours.out[1])
    attn_res_cases.reference(*given, **SITES[site])
    assert torch.equal(sites.prefix[1], ours.prefix[1])
    assert torch.equal(sites.blocks[1], ours.blocks[1])


def test_other_results_and_other_interfaces_are_said(
    installed: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = ResidualSites(SITES["pre8"], 2, 256, 1, "cpu")
    installed.attn_res = lambda prefix, *args, **kw: torch.ones_like(prefix)
    assert stock.residual(sites) is None
    assert "vLLM attn_res is not compared with: its output differs by" in capsys.readouterr().err
    installed.attn_res = lambda prefix: prefix
    assert stock.residual(sites) is None
    assert "vLLM attn_res is not compared with: TypeError: " in capsys.readouterr().err


def test_a_library_that_cannot_be_timed_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_launches(name: str, launch: Any, count: int, **kw: Any) -> Timing:
        launch(0)
        return Timing(name, 1.0, 1.0, 1.0, 1, count)

    def broken(i: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(shard_bench.bench, "time_launches", time_launches)
    ours, theirs = shard_bench._both("k", lambda i: None, ("lib", broken), 1, 1, 1.0, 1)
    assert (ours.name, theirs) == ("k", None)
    assert "lib could not be timed: operation not permitted" in capsys.readouterr().err
    assert shard_bench._both("k", lambda i: None, ("lib", lambda i: None), 1, 1, 1.0, 1)[1] is not None
