"""CuTe providers of the KDA core and of the attention residual; imported by ``providers``, registered on import.

Ranks are the leading dimension: one launch per rank, on slices of whole-head caches. The delta of the attention
residual comes from a mailbox whose publication precedes in stream order; it is re-armed by a fill after the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.decode import mesh
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import Provider, register
from kimi_k3.kernels.attn_res_launch import PreparedAttnRes
from kimi_k3.kernels.kda_core_cases import HEAD, LOWER_BOUND, NORM_EPS, TAPS
from kimi_k3.kernels.kda_core_launch import PreparedKdaCore

ARCHES = ("sm_90", "sm_100", "sm_103")


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
    ranks, width, _ = f_b.shape
    requests, columns = slots.shape
    tokens = projected.shape[1] // requests
    heads = width // HEAD

    def build(weight: Tensor) -> list[PreparedKdaCore]:
        def form(t: Tensor) -> Tensor:
            return t.float().contiguous()

        return [
            PreparedKdaCore(
                weight[r], form(conv_weight[r].transpose(1, 2)), form(a_log[r]), form(dt_bias[r]), form(o_norm),
                pitch=projected.shape[2], tokens=tokens, columns=columns, index_dtype=slots.dtype,
                conv_width=conv.shape[2] // 3,
            )
            for r in range(ranks)
        ]  # fmt: skip

    kernels: list[PreparedKdaCore] = context.prepared(f_b, f"kda_core {tokens} of {columns} {slots.dtype}", build)
    for r, kernel in enumerate(kernels):
        kernel.prepare([requests])
        history, state = conv[:, :, r * width :], recurrent[:, r * heads : (r + 1) * heads]
        kernel.run(projected[r], slots, accepted, history, state, out[r])


def attn_res(
    context: OpContext,
    delta: Tensor | None,
    prefix: Tensor,
    blocks: Tensor,
    query: Tensor,
    gamma: Tensor,
    stored: int,
    opens: bool,
    final: bool,
    tap: Tensor | None,
    out: Tensor,
) -> None:
    ranks, rows, _ = prefix.shape
    taken = None if delta is None else delta[:, :rows]
    if taken is not None and context.debug and bool(mesh.is_idle(taken).any()):
        raise mesh.MissingPublication(f"delta: a row of {rows} was not published")

    def build(weight: Tensor) -> PreparedAttnRes:
        return PreparedAttnRes(
            weight.float().contiguous(), gamma.to(torch.bfloat16).contiguous(), stored=stored, pitch=blocks.shape[2],
            update="none" if delta is None else "add", opens=opens, tap=tap is not None, final=final, rows=(rows,),
        )  # fmt: skip

    site = f"attn_res {stored} of {blocks.shape[2]} {opens} {final} {tap is not None} {delta is None} {rows}"
    kernel: PreparedAttnRes = context.prepared(query, site, build)
    for r in range(ranks):
        kernel.run(
            None if taken is None else taken[r], prefix[r], blocks[r], None if tap is None else tap[r], out[r]
        )  # fmt: skip
    if taken is not None:
        taken.fill_(mesh.IDLE)


def _kda_fits(context: OpContext, device: str) -> bool:
    c, p = context.config, context.precision
    return (
        device in ARCHES
        and (c.kda_head_dim, c.short_conv_kernel_size, c.gate_lower_bound) == (HEAD, TAPS + 1, LOWER_BOUND)
        and p.activations == p.conv == torch.bfloat16
        and p.compute == p.state == torch.float32
    )


def _attn_res_fits(context: OpContext, device: str) -> bool:
    c, p = context.config, context.precision
    fits = c.hidden_size % 256 == 0 and c.rms_norm_eps == NORM_EPS and c.num_blocks <= 15
    return device in ARCHES and fits and p.activations == torch.bfloat16 and p.compute == torch.float32


register(Provider("kda_core", "cute", kda_core, _kda_fits, priority=10))
register(Provider("attn_res", "cute", attn_res, _attn_res_fits, priority=10))
