"""Torch providers: embedding, attention residual, projections, dense MLP, reductions over ranks, prefetch."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.decode import mesh
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import torch_provider
from kimi_k3.reference.numerics import rms_norm, situ_glu


def transposed(context: OpContext, weight: Tensor) -> Tensor:
    """[R, N, K] -> [R, K, N] view of a compute-dtype copy that is made once."""

    def build(w: Tensor) -> Tensor:
        return w.to(context.precision.compute).contiguous()

    copy: Tensor = context.prepared(weight, "compute", build)
    return copy.transpose(-1, -2)


def project(context: OpContext, x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [R, M, K] times ``weight`` [R, N, K], accumulated in the compute dtype, not rounded: [R, M, N]."""
    return torch.bmm(x.to(context.precision.compute), transposed(context, weight))


def vector(context: OpContext, weight: Tensor) -> Tensor:
    """A replicated vector in the compute dtype."""
    copy: Tensor = context.prepared(weight, "compute", lambda w: w.to(context.precision.compute))
    return copy


@torch_provider("embed")
def embed(context: OpContext, ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Vocabulary-sharded lookup: the owner contributes the row, the others zeros, added over ranks."""
    ranks, shard, _ = weight.shape
    local = ids - torch.arange(ranks, device=ids.device)[:, None] * shard  # [R, M]
    owned = (local >= 0) & (local < shard)
    found = weight[torch.arange(ranks, device=ids.device)[:, None], local.clamp(0, shard - 1)]
    partial = torch.where(owned.unsqueeze(-1), found.to(context.precision.compute), 0.0)
    out.copy_(mesh.fold(partial.unsqueeze(0), context.precision.compute).expand_as(out))


def mix(context: OpContext, prefix: Tensor, blocks: Tensor, stored: int, query: Tensor) -> Tensor:
    """Softmax mixture of the stored blocks and the prefix, not rounded: [R, M, H] in the compute dtype."""
    if stored == 0:
        return prefix
    compute = context.precision.compute
    sources = torch.cat([blocks[:, :, :stored].to(compute), prefix.unsqueeze(2)], 2)
    scale = torch.rsqrt(sources.square().mean(-1) + context.config.rms_norm_eps)
    weights = torch.softmax((sources @ vector(context, query)) * scale, -1)
    return (weights.unsqueeze(-2) @ sources).squeeze(-2)


@torch_provider("attn_res")
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
    """Take the feed-forward output, update the prefix, store it where a block opens, mix, normalise.

    ``stored`` is how many blocks are mixed; a block opener's own block is stored but not among them. The norm of
    the mixture is computed directly from the FP32 mixture. The final site rounds the mixture before its norm.
    """
    p = context.precision
    added = [] if delta is None else [mesh.take(delta, prefix.shape[1], 1, "delta", context.debug)]
    ranks = mesh.agreeing(prefix, blocks[:, :, :stored], *added)
    current = prefix[ranks].to(p.compute)
    for values in added:
        current = p.rounded(current + values[ranks])
        prefix.copy_(current)
    if opens:
        blocks[:, :, stored] = prefix
    if tap is not None:
        tap.copy_(current)
    mixture = mix(context, current, blocks[ranks], stored, query)
    if final:
        mixture = p.rounded(mixture)
    out.copy_(rms_norm(mixture, vector(context, gamma), context.config.rms_norm_eps))


@torch_provider("in_proj")
def in_proj(context: OpContext, x: Tensor, weight: Tensor, replicated: int, out: Tensor) -> None:
    """The first ``replicated`` rows of ``weight`` are the same on every rank."""
    if replicated:
        head = x[mesh.agreeing(x)].to(context.precision.compute)
        out[..., :replicated] = torch.matmul(head, transposed(context, weight)[: head.shape[0], :, :replicated])
    rest: Tensor = context.prepared(weight, f"rows {replicated}", lambda w: w[:, replicated:])
    out[..., replicated:] = project(context, x, rest)


@torch_provider("oproj_publish")
def oproj_publish(context: OpContext, x: Tensor, weight: Tensor, box: Tensor) -> None:
    """Each rank's partial product over its heads, rounded, published."""
    mesh.publish_partial(box, context.precision.rounding(project(context, x, weight)))


@torch_provider("oproj_reduce_attnres")
def oproj_reduce_attnres(
    context: OpContext,
    box: Tensor,
    gather: Tensor | None,
    prefix: Tensor,
    blocks: Tensor,
    query: Tensor,
    gamma: Tensor,
    stored: int,
    opens: bool,
    out: Tensor,
) -> None:
    """Sum over ranks, new prefix (the sum itself where the layer opens a block), mixture, norm."""
    p = context.precision
    total = mesh.all_reduce(box, gather, prefix.shape[1], p, "attention", context.debug)
    ranks = mesh.agreeing(prefix, blocks[:, :, :stored]) if total.shape[0] == 1 else slice(None)
    current = total if opens else p.rounded(prefix[ranks].to(p.compute) + total)
    prefix.copy_(current)
    mixture = mix(context, current, blocks[ranks], stored, query)
    out.copy_(rms_norm(mixture, vector(context, gamma), context.config.rms_norm_eps))


def _gate_up(context: OpContext, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """SiTU of the rounded gate and up projections."""
    gate, up = context.precision.rounded(project(context, x, weight)).chunk(2, -1)
    out.copy_(situ_glu(gate, up, context.config.situ_beta, context.config.situ_linear_beta))


def _down_push(context: OpContext, h: Tensor, weight: Tensor, box: Tensor) -> None:
    """Each rank's rounded partial, column blocks to their owners."""
    mesh.publish_owner(box, context.precision.rounding(project(context, h, weight)))


torch_provider("dense_gate_up")(_gate_up)
torch_provider("shared_gate_up")(_gate_up)
torch_provider("dense_down_push")(_down_push)
torch_provider("shared_down_push")(_down_push)


@torch_provider("dense_reduce")
def dense_reduce(context: OpContext, box: Tensor, delta: Tensor, rows: int) -> None:
    """The owner of each column block adds the ranks' partials, rounds, publishes to all."""
    total = mesh.fold(mesh.take(box, rows, 2, "dense", context.debug), context.precision.compute)
    mesh.publish_columns(delta, context.precision.rounding(total))


@torch_provider("prefetch")
def prefetch(context: OpContext, point: str, weights: list[Tensor]) -> None:
    """Nothing to do: a CPU has no prefetch stream. The ledger records the point all the same."""
