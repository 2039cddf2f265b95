"""Torch providers of the MLA layer in absorbed form: query and cache row, split-KV core, merge with value and gate.

Slot -1 and length 0 are padding: no row is written, the output is zero. Shapes are static (but for the longest
context on a CPU), so the ops can be captured in a graph.

Context parallelism: token p belongs to rank ``p // interleave % dcp``, which stores its cache row and attends over
its own rows only, for the heads of all ranks. Queries are exchanged before, partial results and their log-sum-exp
sent to the owner of the heads after; a rank without tokens sends zeros and a finite :data:`EMPTY_LSE`. The
lock-step cache is one tensor, of which each rank touches its own rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.decode import mesh
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.providers.torch_residual import project, transposed, vector
from kimi_k3.decode.registry import torch_provider
from kimi_k3.reference.numerics import cast, rms_norm

EMPTY_LSE = -3e38  #: finite stand-in for the logarithm of an empty sum


def owner_of(positions: Tensor, context: OpContext) -> Tensor:
    """The rank that stores each token; rank 0 without context parallelism."""
    return positions // context.interleave % context.dcp


def _store_rows(kv: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write the bits ``rows`` [M, row] to ``kv`` [pages, page, row] at the flat ``slots`` [M].

    Padding repeats the first live row, so nothing else changes.
    """
    live = slots >= 0
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.to(torch.int64).argmax())
    flat = kv.view(-1, kv.shape[-1]).view(rows.dtype)
    index = slots[source].clamp(min=0)
    flat.index_copy_(0, index, torch.where(live.any(), rows[source], flat[index]))


@torch_provider("mla_query")
def mla_query(
    context: OpContext,
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    lens: Tensor,
    rows: Tensor,
    query: Tensor,
) -> None:
    """Normalise, expand and absorb the query; normalise and store the cache row.

    All ranks compute the same cache row; the lock-step cache takes rank 0's, or that of the token's owner.
    """
    p, config = context.precision, context.config
    ranks, count, _ = projected.shape
    nope, lora, rope = config.qk_nope_head_dim, config.kv_lora_rank, config.qk_rope_head_dim
    common = projected[..., : config.q_lora_rank + lora + rope]
    common = common[mesh.agreeing(common)].to(p.compute)
    qc, latent, kr = common.split([config.q_lora_rank, lora, rope], -1)
    eps = config.rms_norm_eps
    latent = p.rounded(rms_norm(latent, vector(context, kv_norm), eps))
    rows.copy_(cast(torch.cat([latent, kr], -1), rows.dtype).expand_as(rows))
    owner = owner_of((lens - 1).clamp(min=0), context)
    index = owner.view(1, -1, 1).expand(1, -1, rows.shape[-1])
    bits = rows.view(mesh.BITS[rows.element_size()])  # FP8 tensors cannot be indexed on every device; their bits can
    _store_rows(kv, slot_mapping, bits.gather(0, index).squeeze(0))

    qc = p.rounded(rms_norm(qc, vector(context, q_norm), eps)).expand(ranks, -1, -1)
    expanded = p.rounded(project(context, qc, q_b)).view(ranks, count, w_uk.shape[1], nope + rope)
    absorbed = expanded[..., :nope].transpose(1, 2) @ vector(context, w_uk)  # [R, h, M, lora]
    both = torch.cat([p.rounded(absorbed).transpose(1, 2), expanded[..., nope:]], -1)
    if context.dcp > 1:
        mesh.publish_all(query, cast(both, query.dtype))
    else:
        query.copy_(cast(both, query.dtype))


def gather_keys(kv: Tensor, block_tables: Tensor, positions: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """Cache rows of each request at ``positions`` [B, n], zeros where not ``valid``: [B, n, row]."""
    page = kv.shape[1]
    pages = block_tables.gather(1, (positions // page).clamp(max=block_tables.shape[1] - 1))
    index = torch.where(valid, pages * page + positions % page, 0)
    flat = kv.view(-1, kv.shape[-1])
    found = flat.view(torch.uint8)[index].view(kv.dtype) if kv.element_size() == 1 else flat[index]
    # Whatever lies in rows nobody owns, NaN included, must not reach a product.
    return torch.where(valid.unsqueeze(-1), found.to(dtype), 0.0)


def attend(query: Tensor, keys: Tensor, visible: Tensor, scale: float, lora: int) -> tuple[Tensor, Tensor]:
    """query [N, n, row] over keys [N, c, row] where ``visible`` [N, n, c]: normalised [N, n, lora], lse [N, n]."""
    scores = (query @ keys.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=EMPTY_LSE)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    mixed = (weights @ keys[..., :lora]) / total.clamp(min=torch.finfo(total.dtype).tiny)
    lse = torch.where(total > 0, top + torch.log(total), EMPTY_LSE)
    return mixed, lse.squeeze(-1)


def _split_keys(length: Tensor, longest: int, splits: int) -> tuple[Tensor, Tensor]:
    """Each request's keys cut into equal runs: positions [B, splits, width], and which of them exist.

    ``length`` [B, 1] keys per request, at most ``longest``.
    """
    chunk = ((length + splits - 1) // splits).unsqueeze(-1)
    inside = torch.arange(max(1, -(-longest // splits)), device=length.device)
    positions = torch.arange(splits, device=length.device)[:, None] * chunk + inside
    return positions, (inside < chunk) & (positions < length.unsqueeze(-1))


def _owned_keys(length: Tensor, longest: int, context: OpContext) -> tuple[Tensor, Tensor]:
    """The keys each rank owns, in the same form: positions [B, R, width]. A rank may own none."""
    run, ranks = context.interleave, context.dcp
    inside = torch.arange(-(-longest // (run * ranks)) * run, device=length.device)
    rank = torch.arange(ranks, device=length.device)[:, None]
    positions = ((inside // run * ranks + rank) * run + inside % run).expand(len(length), -1, -1)
    return positions, positions < length.unsqueeze(-1)


@torch_provider("mla_core")
def mla_core(
    context: OpContext, query: Tensor, kv: Tensor, block_tables: Tensor, lens: Tensor, partial: Tensor, lse: Tensor
) -> None:
    """Attention of every row over the cached latents, in parts: equal splits of the keys, or the keys of each rank."""
    config, p = context.config, context.precision
    splits, ranks, _, heads, lora = partial.shape
    requests, count = block_tables.shape[0], len(lens)
    steps = count // requests
    seen = lens.view(requests, steps)
    length = seen[:, -1:]  # keys of the request; earlier rows of a verify step see fewer
    longest = int(length.max()) if lens.device.type == "cpu" else block_tables.shape[1] * kv.shape[1]
    order = (requests, splits, steps, ranks, heads)
    if context.dcp > 1:
        positions, valid = _owned_keys(length, max(1, longest), context)
        received = mesh.take(query, count, 2, "query", context.debug).to(p.compute)  # [R dst, R src, M, h, row]
        rows = received.view(splits, ranks, requests, steps, heads, -1).permute(2, 0, 3, 1, 4, 5)
    else:
        positions, valid = _split_keys(length, longest, splits)
        own = query.to(p.compute).view(ranks, requests, steps, heads, -1).permute(1, 2, 0, 3, 4)
        rows = own.unsqueeze(1).expand(*order, -1)
    width = positions.shape[-1]
    keys = gather_keys(kv, block_tables, positions.flatten(1), valid.flatten(1), p.compute)
    keys = keys.view(requests * splits, width, -1)
    visible = valid.unsqueeze(1) & (positions.unsqueeze(1) < seen.view(requests, steps, 1, 1))  # [B, q, splits, width]
    visible = visible.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, ranks * heads, -1)
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    flat = rows.reshape(requests * splits, steps * ranks * heads, -1)
    mixed, logs = attend(flat, keys, visible.reshape(requests * splits, -1, width), scale, lora)

    mixed = mixed.view(*order, lora).permute(1, 3, 0, 2, 4, 5).reshape(splits, ranks, count, heads, lora)
    logs = logs.view(order).permute(1, 3, 0, 2, 4).reshape(splits, ranks, count, heads)
    partial[:, :, :count] = mesh.clean(mixed)
    lse[:, :, :count] = mesh.clean(logs)


@torch_provider("mla_value")
def mla_value(
    context: OpContext, partial: Tensor, lse: Tensor, lens: Tensor, w_uv: Tensor, projected: Tensor, out: Tensor
) -> None:
    """Merge the partial results in their order, expand the values, apply the output gate."""
    p, config = context.precision, context.config
    if context.dcp > 1:
        partial = mesh.take(partial, len(lens), 2, "partial context", context.debug)
        lse = mesh.take(lse, len(lens), 2, "partial log-sum-exp", context.debug)
    share = torch.exp(lse - lse.amax(0))
    share = (share / share.sum(0)).unsqueeze(-1)
    latent = partial[0].to(p.compute) * share[0]
    for source in range(1, partial.shape[0]):
        latent = latent + partial[source] * share[source]
    latent = p.rounded(latent)
    value = p.rounded(latent.transpose(1, 2) @ transposed(context, w_uv))  # [R, h, M, v]
    start = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    gate = projected[..., start : start + out.shape[-1]].to(p.compute)
    gated = value.transpose(1, 2).flatten(2) * torch.sigmoid(gate)
    out.copy_(torch.where((lens > 0).unsqueeze(-1), gated, 0.0))
