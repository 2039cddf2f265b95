"""The model's parameters as plain dataclasses of tensors, in checkpoint orientation ([out, in]).

These hold checkpoint values: BF16 weights, FP32 where released so, MXFP4 experts packed. A compute-dtype
copy is made by :func:`convert` (or :meth:`ModelWeights.to`) once, at start.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor


@dataclass
class AttnResWeights:
    """One attention-residual site: score norm [H] and query [H] (disk: [1, H])."""

    norm: Tensor
    proj: Tensor


@dataclass
class KDAWeights:
    q_proj: Tensor  #: [A, H], A = heads * head_dim
    k_proj: Tensor  #: [A, H]
    v_proj: Tensor  #: [A, H]
    g_proj: Tensor  #: [A, H] output-gate logits
    f_a_proj: Tensor  #: [head_dim, H]
    f_b_proj: Tensor  #: [A, head_dim]
    b_proj: Tensor  #: [heads, H]
    q_conv: Tensor  #: [A, 4] FP32, last tap multiplies the current token
    k_conv: Tensor
    v_conv: Tensor
    a_log: Tensor  #: [heads] FP32, padding removed
    dt_bias: Tensor  #: [A] FP32
    o_norm: Tensor  #: [head_dim] FP32, shared by all heads
    o_proj: Tensor  #: [H, A]


@dataclass
class MLAWeights:
    q_a_proj: Tensor  #: [q_lora, H]
    q_a_norm: Tensor  #: [q_lora]
    q_b_proj: Tensor  #: [heads * (nope + rope), q_lora]
    kv_a_proj: Tensor  #: [kv_lora + rope, H]
    kv_a_norm: Tensor  #: [kv_lora]
    kv_b_proj: Tensor  #: [heads * (nope + v), kv_lora], per head k_nope rows then v rows
    g_proj: Tensor  #: [heads * v, H]
    o_proj: Tensor  #: [H, heads * v]


@dataclass
class DenseWeights:
    gate_proj: Tensor  #: [I, H]
    up_proj: Tensor  #: [I, H]
    down_proj: Tensor  #: [H, I]


@dataclass
class MXFP4Tensor:
    """E2M1 values, two per byte (low nibble first), one E8M0 scale per 32 values of a row."""

    packed: Tensor  #: uint8 [..., out, in / 2]
    scale: Tensor  #: uint8 [..., out, in / 32]


@dataclass
class MoEWeights:
    gate: Tensor  #: [E, H] router
    correction_bias: Tensor  #: [E] FP32, selection only
    latent_down: Tensor  #: [L, H]
    latent_norm: Tensor  #: [L]
    latent_up: Tensor  #: [H, L]
    w1: MXFP4Tensor  #: gate, [E, I, L]
    w3: MXFP4Tensor  #: up, [E, I, L]
    w2: MXFP4Tensor  #: down, [E, L, I]
    shared: DenseWeights


@dataclass
class LayerWeights:
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    self_attention_res: AttnResWeights
    mlp_res: AttnResWeights
    attention: KDAWeights | MLAWeights
    ffn: DenseWeights | MoEWeights


@dataclass
class ModelWeights:
    embed_tokens: Tensor  #: [V, H]
    layers: list[LayerWeights]
    output_attn_res: AttnResWeights
    norm: Tensor  #: [H]
    lm_head: Tensor  #: [V, H]

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ModelWeights:
        """A copy with every floating-point tensor in ``dtype`` on ``device``; MXFP4 experts stay packed."""
        return convert(self, dtype, device)


W = TypeVar("W")


def convert(weights: W, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> W:
    """Any of the dataclasses above, floating-point tensors cast to ``dtype``, everything moved to ``device``."""
    if isinstance(weights, Tensor):
        moved = weights.to(device=device, dtype=dtype if weights.is_floating_point() else None)
        return cast(W, moved)
    if isinstance(weights, list):
        return cast(W, [convert(item, dtype, device) for item in weights])
    if is_dataclass(weights) and not isinstance(weights, type):
        values = {f.name: convert(getattr(weights, f.name), dtype, device) for f in fields(weights)}
        return cast(W, type(weights)(**values))
    raise TypeError(f"not a weight container: {type(weights).__name__}")
