"""The CuTe providers of the KDA core and the attention residual hand the kernels what the ops mean.

The launchers are replaced by the kernels' own torch references, so that everything but the kernels runs on a CPU;
results are compared with the torch providers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kimi_k3.decode import mesh
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.providers import torch_kda, torch_residual
from kimi_k3.kernels import attn_res_cases, kda_core_cases, providers_attention
from kimi_k3.kernels.kda_core_cases import HEAD
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.precision import PRECISIONS

CONFIG = replace(TINY_A, kda_head_dim=HEAD, kda_num_heads=4, hidden_size=256)


def context(tp: int = 2, **kw: Any) -> OpContext:
    return OpContext(CONFIG, PRECISIONS["bf16"], tp, **kw)


class ReferenceKda:
    def __init__(self, *weights: torch.Tensor, pitch: int, tokens: int, columns: int, index_dtype, conv_width: int):
        self.weights, self.tokens, self.width, self.conv_width = weights, tokens, weights[0].shape[0], conv_width
        self.prepared: set[int] = set()

    def prepare(self, requests: list[int]) -> None:
        self.prepared.update(requests)

    def run(self, projected, slots, accepted, conv_state, state, out) -> None:
        assert slots.shape[0] in self.prepared
        parts = [conv_state[:, :, k * self.conv_width :][:, :, : self.width] for k in range(3)]
        local = torch.cat(parts, -1)
        heads = state.clone()
        kda_core_cases.reference(projected, *self.weights, slots, accepted, local, heads, out, self.tokens)
        state.copy_(heads)
        for part, new in zip(parts, local.split(self.width, -1), strict=True):
            part.copy_(new)


class ReferenceAttnRes:
    def __init__(self, query, gamma, *, stored, pitch, update, opens, tap, final, rows):
        self.weights, self.tap = (query, gamma), tap
        self.kw = {"stored": stored, "update": update, "opens": opens, "final": final}

    def run(self, delta, prefix, blocks, tap, out) -> None:
        assert (tap is not None) == self.tap
        attn_res_cases.reference(delta, prefix, blocks, *self.weights, tap, out, **self.kw)


@pytest.fixture(autouse=True)
def references(monkeypatch):
    monkeypatch.setattr(providers_attention, "PreparedKdaCore", ReferenceKda)
    monkeypatch.setattr(providers_attention, "PreparedAttnRes", ReferenceAttnRes)


@pytest.mark.parametrize("tokens", [1, 3])
def test_kda_core_equals_the_torch_provider(tokens):
    g = torch.Generator().manual_seed(tokens)
    tp, requests, columns = 2, 4, 4
    heads, width = CONFIG.kda_num_heads // tp, CONFIG.kda_width // tp
    pitch = -(-(4 * width + HEAD + heads) // 16) * 16

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * scale

    projected = normal(tp, requests * tokens, pitch).bfloat16()
    weights = (
        normal(tp, width, HEAD, scale=HEAD**-0.5).bfloat16(), normal(tp, 3, width, 4), normal(tp, heads),
        normal(tp, width), 1 + normal(HEAD, scale=0.1),
    )  # fmt: skip
    slots = torch.randperm(requests * columns, generator=g).view(requests, columns) + 1
    slots[2] = 0
    accepted = torch.tensor([1, 3, 0, 4])
    conv = normal(requests * columns + 1, 3 + columns - 1, 3 * CONFIG.kda_width).bfloat16()
    recurrent = normal(requests * columns + 1, CONFIG.kda_num_heads, HEAD, HEAD, scale=0.3)
    results = []
    for provider in (torch_kda.kda_core, providers_attention.kda_core):
        history, state = conv.clone(), recurrent.clone()
        out = torch.full((tp, requests * tokens, width), torch.nan).bfloat16()
        provider(context(tp), projected, *weights, history, state, slots, accepted, out)
        results.append((out, history, state))
    (want, history_want, state_want), (got, history_got, state_got) = results
    assert torch.equal(history_got, history_want)
    torch.testing.assert_close(state_got, state_want, rtol=2e-3, atol=2e-3)  # a raw logit may round the other way
    assert (got.float() - want.float()).norm() / want.float().norm() < 3e-3
    assert torch.equal(got.view(tp, requests, -1)[:, 2], torch.zeros(tp, tokens * width).bfloat16())


@pytest.mark.parametrize(
    ("stored", "opens", "final", "tapped", "first"),
    [
        (0, True, False, False, True), (1, False, False, True, False), (1, True, False, False, False),
        (2, False, True, False, False),
    ],
)  # fmt: skip
def test_attn_res_equals_the_torch_provider(stored, opens, final, tapped, first):
    g = torch.Generator().manual_seed(stored)
    tp, rows, cap, hidden = 2, 3, 5, CONFIG.hidden_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    one = normal(1, rows, hidden).bfloat16().expand(tp, rows, hidden)
    prefix, published = one.clone(), normal(1, rows, hidden).bfloat16().expand(tp, rows, hidden)
    blocks = normal(1, rows, 3, hidden).bfloat16().repeat(tp, 1, 1, 1)
    query, gamma = normal(hidden) * hidden**-0.5, 1 + 0.1 * normal(hidden)
    results = []
    for provider in (torch_residual.attn_res, providers_attention.attn_res):
        delta = torch.full((tp, cap, hidden), mesh.IDLE).bfloat16()
        delta[:, :rows] = published
        p, b, out = prefix.clone(), blocks.clone(), torch.full_like(prefix, torch.nan)
        tap = torch.full_like(prefix, torch.nan) if tapped else None
        provider(
            context(tp), None if first else delta, p, b, query, gamma.bfloat16(), stored, opens, final, tap, out
        )  # fmt: skip
        results.append((p, b, delta, tap, out))
    for want, got in zip(*results, strict=True):
        if want is not None:
            assert torch.equal(want.isnan(), got.isnan())
            torch.testing.assert_close(want.nan_to_num(), got.nan_to_num(), rtol=2**-7, atol=1e-6)


def test_a_missing_publication_is_named_in_debug_mode():
    box = torch.full((2, 4, 256), mesh.IDLE).bfloat16()
    blank = torch.zeros(2, 3, 256).bfloat16()
    with pytest.raises(mesh.MissingPublication, match="delta"):
        providers_attention.attn_res(
            context(debug=True), box, blank, torch.zeros(2, 3, 1, 256).bfloat16(), torch.ones(256),
            torch.ones(256).bfloat16(), 0, False, False, None, blank.clone(),
        )  # fmt: skip


def test_only_what_the_kernels_can_do_is_offered():
    fits = providers_attention._kda_fits
    assert fits(context(), "sm_90")
    assert not fits(context(), "cpu")
    assert not fits(OpContext(TINY_A, PRECISIONS["bf16"], 2), "sm_90")  # heads of 16
    assert not fits(OpContext(CONFIG, PRECISIONS["fp32"], 2), "sm_90")
    assert providers_attention._attn_res_fits(context(), "sm_103")
    assert not providers_attention._attn_res_fits(OpContext(TINY_A, PRECISIONS["bf16"], 2), "sm_90")  # hidden 128
