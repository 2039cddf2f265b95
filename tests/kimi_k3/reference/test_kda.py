"""KDA building blocks against scalar formulas; chunked against recurrent."""

from __future__ import annotations

import math

import pytest
import torch

from kimi_k3.reference import kda
from kimi_k3.reference.numerics import l2_normalize, situ_glu


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _inputs(
    n: int, t: int, heads: int, d: int, g_scale: float, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(t)
    q, k, v, g = (torch.randn(n, t, heads, d, generator=gen, dtype=dtype) for _ in range(4))
    beta = torch.rand(n, t, heads, generator=gen, dtype=dtype)
    state = torch.randn(n, heads, d, d, generator=gen, dtype=dtype)
    return [l2_normalize(q), l2_normalize(k), v, -5 * torch.sigmoid(g_scale * g), beta, state]


def test_situ_matches_scalar_formula() -> None:
    for gate, up in ((0.7, -1.3), (-2.0, 30.0), (9.0, -60.0), (0.0, 5.0)):
        expected = 4 * math.tanh(gate / 4) * _sigmoid(gate) * 25 * math.tanh(up / 25)
        got = situ_glu(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64), 4.0, 25.0).item()
        assert got == pytest.approx(expected, rel=1e-12)


def test_decay_gate_matches_scalar_formula_and_bound() -> None:
    raw = torch.tensor([[[0.3, -1.0], [2.0, 80.0]]], dtype=torch.float64)
    a_log = torch.tensor([0.5, -0.7], dtype=torch.float64)
    bias = torch.tensor([[0.1, -2.0], [0.0, 3.0]], dtype=torch.float64)
    g = kda.decay_gate(raw, a_log, bias, -5.0)
    for h in range(2):
        for c in range(2):
            expected = -5 * _sigmoid(math.exp(a_log[h].item()) * (raw[0, h, c] + bias[h, c]).item())
            assert g[0, h, c].item() == pytest.approx(expected, rel=1e-12)
    assert g.min().item() >= -5.0


def test_short_conv_last_tap_is_the_current_token() -> None:
    window = torch.randn(2, 3 + 4, 5, dtype=torch.float64)
    weight = torch.randn(5, 4, dtype=torch.float64)
    out = kda.short_conv(window, weight)
    for t in range(4):
        total = sum(weight[:, j] * window[1, t + j] for j in range(4))
        for c in range(5):
            assert out[1, t, c].item() == pytest.approx(total[c].item() * _sigmoid(total[c].item()), rel=1e-12)


def test_recurrent_step_matches_the_delta_rule_written_out() -> None:
    q, k, v, g, beta, state = _inputs(1, 1, 1, 3, 1.0)
    out, new, correction = kda.recurrent_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
    s = state[0, 0].T.clone()  # [k, v]
    kk, vv, qq, gg, bb = k[0, 0, 0], v[0, 0, 0], q[0, 0, 0], g[0, 0, 0], beta[0, 0, 0].item()
    for i in range(3):  # decay of each key channel comes first
        s[i] *= math.exp(gg[i].item())
    u = [bb * (vv[j].item() - sum(s[i, j].item() * kk[i].item() for i in range(3))) for j in range(3)]
    for i in range(3):
        for j in range(3):
            s[i, j] += kk[i] * u[j]
    expected = [sum(s[i, j].item() * qq[i].item() for i in range(3)) for j in range(3)]
    assert new[0, 0].T.flatten().tolist() == pytest.approx(s.flatten().tolist(), rel=1e-12)
    assert out[0, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert correction[0, 0].tolist() == pytest.approx([float(x) for x in u], rel=1e-12)


@pytest.mark.parametrize("t", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize("g_scale", [0.01, 1.0, 100.0])
def test_chunked_equals_recurrent(t: int, chunk: int, g_scale: float) -> None:
    q, k, v, g, beta, state = _inputs(2, t, 3, 8, g_scale)
    out, states, _ = kda.recurrent_kda(q, k, v, g, beta, state)
    chunked, final = kda.chunked_kda(q, k, v, g, beta, state, chunk)
    torch.testing.assert_close(chunked, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(final, states[:, -1], rtol=0, atol=1e-12)


def test_long_prompts_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g, beta, state = _inputs(1, 100, 2, 8, 1.0)
    whole, final = kda.chunked_kda(q, k, v, g, beta, state)
    monkeypatch.setattr(kda, "PAIR_BUDGET", 1)
    pieces, last = kda.chunked_kda(q, k, v, g, beta, state)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, final, rtol=0, atol=1e-12)


def test_strongest_decay_does_not_overflow_in_fp32() -> None:
    q, k, v, g, beta, state = _inputs(1, 200, 2, 8, 1.0, torch.float32)
    g = torch.full_like(g, -5.0)  # exp(-G) alone would be e^1000
    out, final = kda.chunked_kda(q, k, v, g, beta, state, 64)
    reference, states, _ = kda.recurrent_kda(*(x.double() for x in (q, k, v, g, beta, state)))
    torch.testing.assert_close(out.double(), reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(final.double(), states[:, -1], rtol=0, atol=1e-5)
