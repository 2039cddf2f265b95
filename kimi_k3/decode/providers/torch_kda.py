"""Torch provider of the KDA decode core: convolution, gates, recurrence, gated norm, state in place.

One token or a verify step of q rows per request, with native state slots: the recurrence starts from
``slots[accepted - 1]`` and the state after row t goes to ``slots[t]``; the convolution history lives in ``slots[0]``
only and becomes ``[C[a], C[a + 1], x_0, ..., x_(q-1)]``. Slots <= 0 are padding: the output is zero and nothing is
written. Shapes are static, so the op can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.providers.torch_residual import project, vector
from kimi_k3.decode.registry import torch_provider
from kimi_k3.reference.kda import O_NORM_EPS
from kimi_k3.reference.numerics import l2_normalize, rms_norm


def _write(store: Tensor, slots: Tensor, values: Tensor) -> None:
    """``store[slots] = values`` where the slot is live; every padding slot rewrites the null slot with itself."""
    live = (slots > 0).view(-1, *[1] * (values.dim() - 1))
    store.index_copy_(0, slots.clamp(min=0), torch.where(live, values.to(store.dtype), store[0]))


def _convolve(
    context: OpContext, rows: Tensor, conv: Tensor, weight: Tensor, slots: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [B, q, 3, R, d] -> q, k, v [B, q, R, d] in the compute dtype, after SiLU; advances the history."""
    requests, steps, _, ranks, width = rows.shape
    taps = weight.shape[-1]
    own = slots[:, 0]
    offset = (accepted - 1).clamp(min=0).unsqueeze(1) + torch.arange(taps - 1, device=own.device)
    history = conv[own.clamp(min=0).unsqueeze(1), offset]  # [B, taps - 1, 3 A]
    stored = torch.cat([history[:, 1:], rows.reshape(requests, steps, -1).to(conv.dtype)], 1)
    window = torch.cat([history.unflatten(-1, (3, ranks, width)).to(rows.dtype), rows], 1)

    kept = stored.shape[1]
    old = conv[0, :kept]
    live = (own > 0).view(-1, 1, 1)
    conv[:, :kept].index_copy_(0, own.clamp(min=0), torch.where(live, stored, old))

    kernel = context.prepared(
        weight, "taps", lambda w: w.to(context.precision.compute).permute(3, 1, 0, 2).contiguous()
    )
    mixed = window[:, :steps] * kernel[0]
    for tap in range(1, taps):  # oldest to newest
        mixed = mixed + window[:, tap : tap + steps] * kernel[tap]
    q, k, v = torch.nn.functional.silu(mixed).unbind(2)
    return q, k, v


@torch_provider("kda_core")
def kda_core(
    context: OpContext,
    projected: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    accepted: Tensor,
    out: Tensor,
) -> None:
    """Everything between the input and the output projection of a KDA layer. The convolution output is not rounded."""
    p, config = context.precision, context.config
    ranks, width, factor = f_b.shape
    requests = slots.shape[0]
    steps = projected.shape[1] // requests
    dim = config.kda_head_dim
    heads = width // dim
    by_head = (requests, steps, ranks, heads, dim)

    values = projected.to(p.compute)
    qkv, gate = values[..., : 3 * width], values[..., 3 * width : 4 * width]
    factors = values[..., 4 * width : 4 * width + factor]
    logits = values[..., 4 * width + factor : 4 * width + factor + heads]

    rows = qkv.view(ranks, requests, steps, 3, width).permute(1, 2, 3, 0, 4)
    q, k, v = (x.reshape(by_head) for x in _convolve(context, rows, conv, conv_weight, slots, accepted))
    q, k = l2_normalize(q) * dim**-0.5, l2_normalize(k)

    raw = p.rounded(project(context, factors, f_b)).view(ranks, requests, steps, heads, dim).permute(1, 2, 0, 3, 4)
    rate = torch.exp(vector(context, a_log)).unsqueeze(-1)
    bias = vector(context, dt_bias).view(ranks, heads, dim)
    decay = torch.exp(config.gate_lower_bound * torch.sigmoid(rate * (raw + bias)))
    beta = torch.sigmoid(logits).view(ranks, requests, steps, heads).permute(1, 2, 0, 3)

    own = slots.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    state = recurrent[own.clamp(min=0)].to(p.compute).view(requests, ranks, heads, dim, dim)  # [.., v, k]
    outputs = []
    for t in range(steps):
        kt = k[:, t]
        state = state * decay[:, t].unsqueeze(-2)
        u = (v[:, t] - (state @ kt.unsqueeze(-1)).squeeze(-1)) * beta[:, t].unsqueeze(-1)
        state = state + u.unsqueeze(-1) * kt.unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
        _write(recurrent, slots[:, t], state.flatten(1, 2))

    o = torch.stack(outputs, 1).permute(2, 0, 1, 3, 4)  # [R, B, q, h, v]
    gated = rms_norm(o, vector(context, o_norm), O_NORM_EPS).flatten(-2) * torch.sigmoid(
        gate.view(ranks, requests, steps, width)
    )
    out.copy_(torch.where((slots[:, :1] > 0).unsqueeze(-1), gated, 0.0).view(out.shape))
