"""Torch providers of the latent MoE: front, routing, experts, tail.

Expert activations stay in the activation dtype (weight-only MXFP4, as the checkpoint declares); the routed sum is
rounded once per rank, after the weighted sum over the row's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.decode import mesh
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.providers.torch_residual import project, vector
from kimi_k3.decode.registry import torch_provider
from kimi_k3.reference.mxfp4 import dequantize
from kimi_k3.reference.numerics import rms_norm, situ_glu
from kimi_k3.reference.weights import MXFP4Tensor


@torch_provider("moe_front")
def moe_front(context: OpContext, x: Tensor, weight: Tensor, logits_box: Tensor, latent_box: Tensor) -> None:
    """Each rank's router logits (FP32) and latent columns (rounded) to all ranks."""
    y = project(context, x, weight)
    ranks = logits_box.shape[0]  # those that publish may be fewer
    mesh.publish_columns(logits_box, y[..., : logits_box.shape[-1] // ranks])
    mesh.publish_columns(latent_box, context.precision.rounding(y[..., -(latent_box.shape[-1] // ranks) :]))


@torch_provider("route")
def route(
    context: OpContext,
    logits_box: Tensor,
    latent_box: Tensor,
    bias: Tensor,
    latent: Tensor,
    ids: Tensor,
    weights: Tensor,
    order: Tensor,
    counts: Tensor,
) -> None:
    """Choose by sigmoid + bias, weigh by sigmoid alone; equal keys go to the lower id, NaN is never chosen."""
    config = context.config
    rows, chosen = ids.shape[1:]
    latent.copy_(mesh.take(latent_box, rows, 1, "front latent", context.debug))
    logits = mesh.take(logits_box, rows, 1, "router logits", context.debug)
    scores = torch.sigmoid(logits[mesh.agreeing(logits)])
    keys = (scores + vector(context, bias)).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = keys.sort(dim=-1, descending=True, stable=True).indices[..., :chosen]
    picked = scores.gather(-1, best)
    ids.copy_(best)
    weights.copy_(picked * (config.routed_scaling_factor / (picked.sum(-1, keepdim=True) + 1e-20)))
    pairs = best.flatten(1)
    order.copy_(pairs.argsort(dim=-1, stable=True))
    counts.copy_(counts.new_zeros(len(pairs), config.num_experts).scatter_add_(1, pairs, torch.ones_like(pairs)))


def _grouped(order: Tensor, counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs of each rank's experts as a rectangle: indices [R, E, cap] into the pairs, and which entries are real.

    ``cap`` is the largest count on a CPU; where asking would stop the stream, every expert gets room for all rows.
    """
    ranks, total = order.shape
    cap = max(1, int(counts.max())) if counts.device.type == "cpu" else rows
    place = torch.arange(cap, device=order.device)
    real = place < counts.unsqueeze(-1)
    start = counts.cumsum(-1) - counts
    at = (start.unsqueeze(-1) + place).clamp(max=total - 1)
    return order.gather(1, at.flatten(1)).view(ranks, -1, cap), real


def _spread(pairs: Tensor, values: Tensor, real: Tensor, total: int) -> Tensor:
    """Undo :func:`_grouped`: [R, E, cap, N] -> [R, total, N]. Entries that are not real land in a spare row."""
    ranks, width = values.shape[0], values.shape[-1]
    first = torch.arange(ranks, device=pairs.device).view(-1, 1, 1) * (total + 1)
    index = (torch.where(real, pairs, total) + first).flatten()
    out = values.new_zeros(ranks * (total + 1), width)
    out.index_copy_(0, index, values.reshape(-1, width))
    return out.view(ranks, total + 1, width)[:, :total]


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values [R, n, N] at index [R, E, cap] -> [R, E, cap, N]."""
    first = torch.arange(len(values), device=index.device).view(-1, 1, 1) * values.shape[1]
    return values.flatten(0, 1).index_select(0, (index + first).flatten()).view(*index.shape, -1)


def _live(context: OpContext) -> int:
    """Intermediate columns of one rank that are not padding."""
    return context.config.moe_intermediate_size // context.tp


@torch_provider("fc1")
def fc1(
    context: OpContext, latent: Tensor, order: Tensor, counts: Tensor, packed: Tensor, scale: Tensor, hidden: Tensor
) -> None:
    """SiTU of gate and up of every (row, expert) pair. Padding columns are zero and are not computed."""
    p, config, live = context.precision, context.config, _live(context)

    def build(w: Tensor) -> Tensor:
        values = dequantize(MXFP4Tensor(w, scale), p.compute).unflatten(2, (2, -1))[:, :, :, :live]
        return values.permute(1, 4, 0, 2, 3).contiguous()  # [E, L, R, 2, live]: one product serves all ranks

    weight = context.prepared(packed, "experts", build)
    chosen = hidden.shape[1] // latent.shape[1]
    ranks = mesh.agreeing(latent, order, counts)
    pairs, real = _grouped(order, counts, latent.shape[1])
    rows = _take(latent[ranks].to(p.compute), pairs[ranks] // chosen)
    if len(rows) == 1:
        product = torch.bmm(rows[0], weight.flatten(2)).unflatten(-1, weight.shape[2:]).permute(2, 0, 1, 3, 4)
    else:
        product = (rows @ weight.permute(2, 0, 1, 3, 4).flatten(3)).unflatten(-1, (2, live))
    gate, up = product.unbind(-2)
    activated = situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)
    hidden[..., :live] = _spread(pairs, activated, real, hidden.shape[1])
    hidden[..., live:] = 0


@torch_provider("fc2_publish")
def fc2_publish(
    context: OpContext,
    hidden: Tensor,
    weights: Tensor,
    order: Tensor,
    counts: Tensor,
    packed: Tensor,
    scale: Tensor,
    box: Tensor,
) -> None:
    """Weighted sum over each row's experts, in slot order, rounded once per rank, published."""
    p, live = context.precision, _live(context)

    def build(w: Tensor) -> Tensor:
        values = dequantize(MXFP4Tensor(w, scale), p.compute)[..., :live]
        return values.transpose(-1, -2).contiguous()  # [R, E, live, L]

    weight = context.prepared(packed, "experts", build)
    _, rows, chosen = weights.shape
    pairs, real = _grouped(order, counts, rows)
    product = _take(hidden[..., :live].to(p.compute), pairs) @ weight
    outputs = _spread(pairs, product, real, rows * chosen).unflatten(1, (rows, chosen))
    total = (weights.to(p.compute).unsqueeze(-2) @ outputs).squeeze(-2)
    mesh.publish_partial(box, p.rounding(total))


@torch_provider("moe_tail")
def moe_tail(
    context: OpContext,
    latent_box: Tensor,
    gather: Tensor | None,
    shared_box: Tensor,
    norm: Tensor,
    up: Tensor,
    delta: Tensor,
    rows: int,
) -> None:
    """Latent sum over ranks, norm, each rank's rows of the up-projection, plus the shared experts, published."""
    p = context.precision
    latent = mesh.all_reduce(latent_box, gather, rows, p, "latent", context.debug)
    normed = p.rounded(rms_norm(latent, vector(context, norm), context.config.rms_norm_eps))
    routed = p.rounded(project(context, normed.expand(up.shape[0], -1, -1), up))
    shared = p.rounded(mesh.fold(mesh.take(shared_box, rows, 2, "shared", context.debug), p.compute))
    mesh.publish_columns(delta, p.rounding(routed + shared))
