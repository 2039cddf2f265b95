"""Every rank's share of the weights, stacked along a leading rank dimension.

Values and dtypes are the checkpoint's; providers make their own forms (``OpContext.prepared``). Replicated weights
are held once, without a rank dimension. Rows follow the released order; packed projections are documented below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.weights import (
    AttnResWeights,
    DenseWeights,
    KDAWeights,
    LayerWeights,
    MLAWeights,
    ModelWeights,
    MoEWeights,
    MXFP4Tensor,
    convert,
)

ROW_TILE = 16  #: packed projections are padded to this many rows


@dataclass
class KDAShard:
    in_proj: Tensor  #: [R, pad16(4 d + F + h), H]: q | k | v | gate | f_a (replicated) | beta | zero rows
    f_b: Tensor  #: [R, d, F]
    conv: Tensor  #: [R, 3, d, taps] q, k, v
    a_log: Tensor  #: [R, h]
    dt_bias: Tensor  #: [R, d]
    o_norm: Tensor  #: [head_dim]
    o_proj: Tensor  #: [R, H, d]


@dataclass
class MLAShard:
    in_proj: Tensor  #: [R, pad16(q_lora + lora + rope + d), H]: q_a | kv_a (both replicated) | gate | zero rows
    q_norm: Tensor  #: [q_lora]
    kv_norm: Tensor  #: [lora]
    q_b: Tensor  #: [R, h (nope + rope), q_lora]
    w_uk: Tensor  #: [R, h, nope, lora]
    w_uv: Tensor  #: [R, h, v, lora]
    o_proj: Tensor  #: [R, H, d]


@dataclass
class MLPShard:
    gate_up: Tensor  #: [R, 2 I, H] gate rows then up rows
    down: Tensor  #: [R, H, I]


@dataclass
class MoEShard:
    front: Tensor  #: [R, pad16(E / R) + L / R, H]: router rows | zero rows | latent-down rows
    bias: Tensor  #: [E]
    w13: MXFP4Tensor  #: [R, E, 2 I, L] gate rows then up rows, I padded to whole scale groups with zeros
    w2: MXFP4Tensor  #: [R, E, L, I]
    norm: Tensor  #: [L]
    up: Tensor  #: [R, W, L]
    shared: MLPShard


@dataclass
class SiteShard:
    """One attention-residual site with the norm behind it. Replicated."""

    query: Tensor  #: [H] score norm times projection, folded exactly
    gamma: Tensor  #: [H]


@dataclass
class LayerShard:
    attention_site: SiteShard
    ffn_site: SiteShard
    attention: KDAShard | MLAShard
    ffn: MLPShard | MoEShard


@dataclass
class ModelShards:
    embed: Tensor  #: [R, V / R, H]
    layers: list[LayerShard]
    final_site: SiteShard


def rows(weight: Tensor, tp: int) -> Tensor:
    """[R N, ...] -> [R, N, ...]."""
    return weight.unflatten(0, (tp, -1))


def columns(weight: Tensor, tp: int) -> Tensor:
    """[out, R K] -> [R, out, K]."""
    return weight.unflatten(1, (tp, -1)).transpose(0, 1).contiguous()


def replicated(weight: Tensor, tp: int) -> Tensor:
    return weight.expand(tp, *weight.shape)


def pad_rows(weight: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """Zero rows up to a multiple: [R, N, K] -> [R, N', K]."""
    return pad(weight, (0, 0, 0, -weight.shape[1] % multiple))


def shard_site(site: AttnResWeights, gamma: Tensor) -> SiteShard:
    dtype = torch.promote_types(site.norm.dtype, torch.float32)  # a product of two BF16 values is exact in FP32
    return SiteShard(site.norm.to(dtype) * site.proj.to(dtype), gamma)


def shard_kda(w: KDAWeights, tp: int) -> KDAShard:
    heads = [rows(x, tp) for x in (w.q_proj, w.k_proj, w.v_proj, w.g_proj)]
    packed = torch.cat([*heads, replicated(w.f_a_proj, tp), rows(w.b_proj, tp)], 1)
    return KDAShard(
        in_proj=pad_rows(packed).contiguous(),
        f_b=rows(w.f_b_proj, tp),
        conv=torch.stack([rows(x, tp) for x in (w.q_conv, w.k_conv, w.v_conv)], 1).flatten(3),
        a_log=rows(w.a_log, tp),
        dt_bias=rows(w.dt_bias, tp),
        o_norm=w.o_norm,
        o_proj=columns(w.o_proj, tp),
    )


def shard_mla(w: MLAWeights, config: KimiK3Config, tp: int) -> MLAShard:
    kv_b = rows(w.kv_b_proj, tp).unflatten(1, (config.num_attention_heads // tp, -1))
    packed = torch.cat([replicated(w.q_a_proj, tp), replicated(w.kv_a_proj, tp), rows(w.g_proj, tp)], 1)
    return MLAShard(
        in_proj=pad_rows(packed).contiguous(),
        q_norm=w.q_a_norm,
        kv_norm=w.kv_a_norm,
        q_b=rows(w.q_b_proj, tp),
        w_uk=kv_b[:, :, : config.qk_nope_head_dim].contiguous(),
        w_uv=kv_b[:, :, config.qk_nope_head_dim :].contiguous(),
        o_proj=columns(w.o_proj, tp),
    )


def shard_mlp(w: DenseWeights, tp: int) -> MLPShard:
    return MLPShard(torch.cat([rows(w.gate_proj, tp), rows(w.up_proj, tp)], 1), columns(w.down_proj, tp))


def _expert_rows(w: MXFP4Tensor, tp: int, padded: int) -> MXFP4Tensor:
    """Rows of every expert, zero rows behind them: [E, R I, K] -> [R, E, padded, K]."""

    def cut(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (tp, -1)).transpose(0, 1)
        return pad(parts, (0, 0, 0, padded - parts.shape[2]))

    return MXFP4Tensor(cut(w.packed), cut(w.scale))


def _expert_columns(w: MXFP4Tensor, tp: int, group: int) -> MXFP4Tensor:
    """Columns of every expert, zero columns behind them: [E, N, R I] -> [R, E, N, padded].

    A rank's columns are whole scale groups, or lie inside one group and share its scale.
    """
    packed = w.packed.unflatten(-1, (tp, -1))  # [E, N, R, I / 2]
    inside = packed.shape[-1] * 2
    padded = -(-inside // group) * group
    first = torch.arange(tp)[:, None] * inside // group + torch.arange(padded // group)
    return MXFP4Tensor(
        pad(packed, (0, (padded - inside) // 2)).permute(2, 0, 1, 3).contiguous(),
        w.scale[:, :, first.to(w.scale.device)].permute(2, 0, 1, 3).contiguous(),
    )


def shard_moe(w: MoEWeights, config: KimiK3Config, tp: int) -> MoEShard:
    group = config.mxfp4_group
    padded = -(-(config.moe_intermediate_size // tp) // group) * group
    gate, up = _expert_rows(w.w1, tp, padded), _expert_rows(w.w3, tp, padded)
    w13 = MXFP4Tensor(torch.cat([gate.packed, up.packed], 2), torch.cat([gate.scale, up.scale], 2))
    return MoEShard(
        front=torch.cat([pad_rows(rows(w.gate, tp)), rows(w.latent_down, tp)], 1),
        bias=w.correction_bias,
        w13=w13,
        w2=_expert_columns(w.w2, tp, group),
        norm=w.latent_norm,
        up=rows(w.latent_up, tp),
        shared=shard_mlp(w.shared, tp),
    )


def shard_layer(w: LayerWeights, config: KimiK3Config, tp: int) -> LayerShard:
    attention = w.attention
    return LayerShard(
        attention_site=shard_site(w.self_attention_res, w.input_layernorm),
        ffn_site=shard_site(w.mlp_res, w.post_attention_layernorm),
        attention=shard_kda(attention, tp) if isinstance(attention, KDAWeights) else shard_mla(attention, config, tp),
        ffn=shard_mlp(w.ffn, tp) if isinstance(w.ffn, DenseWeights) else shard_moe(w.ffn, config, tp),
    )


def shard_model(
    weights: ModelWeights, config: KimiK3Config, tp: int, device: torch.device | str | None = None
) -> ModelShards:
    """Shards of all ``tp`` ranks, on ``device`` (None: where the weights are). The deployment gate has checked that
    every width divides."""
    return ModelShards(
        embed=convert(rows(weights.embed_tokens, tp), device=device),
        layers=[convert(shard_layer(layer, config, tp), device=device) for layer in weights.layers],
        final_site=convert(shard_site(weights.output_attn_res, weights.norm), device=device),
    )
