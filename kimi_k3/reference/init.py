"""Seeded random weights for any configuration, scaled so that a forward pass behaves like a model's.

Sub-layers of unit input give roughly unit output, mixture and attention logits have a spread near one, decays
cover fast and slow channels, and logits spread over several units, so that greedy text is diverse and the gap
between the best two tokens is usually far above rounding. Each tensor draws from a generator keyed by the seed
and its own name: adding a layer changes no other tensor.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from kimi_k3.reference import mxfp4
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
)

LOGIT_SPREAD = 3.0  #: standard deviation of the logits
#: Correlation between the experts of a layer. Independent experts would make a random model chaotic in BF16: one
#: routing tie decided otherwise would replace an eighth of a layer's output.
EXPERT_SIMILARITY = 0.9
_GATED_GAIN = 2.0  #: undoes the shrinkage of a sigmoid gate or a SiTU in front of an output projection
_QUERY_GAIN = 1.5  #: softmax logits of the MLA: peaked enough that distant tokens matter


class Draw:
    """Named random tensors of one model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator(name)) * std + mean

    def uniform(self, name: str, *shape: int, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=self.generator(name)) * (high - low) + low

    def linear(self, name: str, out: int, inputs: int, gain: float = 1.0) -> Tensor:
        return self.normal(name, out, inputs, std=gain / math.sqrt(inputs)).bfloat16()

    def norm(self, name: str, width: int) -> Tensor:
        return self.normal(name, width, std=0.1, mean=1.0).bfloat16()

    def residual(self, name: str, width: int) -> AttnResWeights:
        proj = self.normal(f"{name}.proj", width, std=1 / math.sqrt(width)).bfloat16()
        return AttnResWeights(self.norm(f"{name}.norm", width), proj)

    def experts(self, name: str, count: int, out: int, inputs: int, group: int, gain: float = 1.0) -> MXFP4Tensor:
        packed = torch.empty(count, out, inputs // 2, dtype=torch.uint8)
        scale = torch.empty(count, out, inputs // group, dtype=torch.uint8)
        common = self.normal(f"{name}.common", out, inputs)
        for expert in range(count):  # one at a time: a released layer would not fit in FP32
            own = self.normal(f"{name}.{expert}", out, inputs)
            values = EXPERT_SIMILARITY * common + math.sqrt(1 - EXPERT_SIMILARITY**2) * own
            quantized = mxfp4.quantize(values * (gain / math.sqrt(inputs)), group)
            packed[expert], scale[expert] = quantized.packed, quantized.scale
        return MXFP4Tensor(packed, scale)


def _kda(config: KimiK3Config, draw: Draw, name: str) -> KDAWeights:
    hidden, width, heads, dim = config.hidden_size, config.kda_width, config.kda_num_heads, config.kda_head_dim
    taps = config.short_conv_kernel_size
    return KDAWeights(
        q_proj=draw.linear(f"{name}.q_proj", width, hidden),
        k_proj=draw.linear(f"{name}.k_proj", width, hidden),
        v_proj=draw.linear(f"{name}.v_proj", width, hidden),
        g_proj=draw.linear(f"{name}.g_proj", width, hidden),
        f_a_proj=draw.linear(f"{name}.f_a_proj", dim, hidden),
        f_b_proj=draw.linear(f"{name}.f_b_proj", width, dim),
        b_proj=draw.linear(f"{name}.b_proj", heads, hidden),
        q_conv=draw.normal(f"{name}.q_conv", width, taps, std=1 / math.sqrt(taps)),
        k_conv=draw.normal(f"{name}.k_conv", width, taps, std=1 / math.sqrt(taps)),
        v_conv=draw.normal(f"{name}.v_conv", width, taps, std=1 / math.sqrt(taps)),
        a_log=draw.uniform(f"{name}.a_log", heads, low=-0.7, high=0.7),
        dt_bias=draw.normal(f"{name}.dt_bias", width, mean=-2.5, std=1.5),
        o_norm=draw.norm(f"{name}.o_norm", dim).float(),
        o_proj=draw.linear(f"{name}.o_proj", hidden, width, _GATED_GAIN),
    )


def _mla(config: KimiK3Config, draw: Draw, name: str) -> MLAWeights:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.mla_width
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    return MLAWeights(
        q_a_proj=draw.linear(f"{name}.q_a_proj", config.q_lora_rank, hidden),
        q_a_norm=draw.norm(f"{name}.q_a_norm", config.q_lora_rank),
        q_b_proj=draw.linear(f"{name}.q_b_proj", heads * head, config.q_lora_rank, _QUERY_GAIN),
        kv_a_proj=draw.linear(f"{name}.kv_a_proj", config.kv_row, hidden),
        kv_a_norm=draw.norm(f"{name}.kv_a_norm", config.kv_lora_rank),
        kv_b_proj=draw.linear(f"{name}.kv_b_proj", kv_rows, config.kv_lora_rank),
        g_proj=draw.linear(f"{name}.g_proj", width, hidden),
        o_proj=draw.linear(f"{name}.o_proj", hidden, width, 2 * _GATED_GAIN),  # attention also averages
    )


def _dense(hidden: int, width: int, draw: Draw, name: str) -> DenseWeights:
    return DenseWeights(
        gate_proj=draw.linear(f"{name}.gate_proj", width, hidden),
        up_proj=draw.linear(f"{name}.up_proj", width, hidden),
        down_proj=draw.linear(f"{name}.down_proj", hidden, width, _GATED_GAIN),
    )


def _moe(config: KimiK3Config, draw: Draw, name: str) -> MoEWeights:
    hidden, latent, width = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    count, group = config.num_experts, config.mxfp4_group
    return MoEWeights(
        gate=draw.linear(f"{name}.gate", count, hidden),
        correction_bias=draw.normal(f"{name}.correction_bias", count, std=0.1),
        latent_down=draw.linear(f"{name}.latent_down", latent, hidden),
        latent_norm=draw.norm(f"{name}.latent_norm", latent),
        latent_up=draw.linear(f"{name}.latent_up", hidden, latent),
        w1=draw.experts(f"{name}.w1", count, width, latent, group),
        w3=draw.experts(f"{name}.w3", count, width, latent, group),
        w2=draw.experts(f"{name}.w2", count, latent, width, group, _GATED_GAIN),
        shared=_dense(hidden, config.shared_intermediate_size, draw, f"{name}.shared"),
    )


def random_layer(config: KimiK3Config, layer: int, seed: int) -> LayerWeights:
    """Layer ``layer`` (0-based) of :func:`random_weights`; a large model can be built layer by layer."""
    draw, name = Draw(seed), f"layers.{layer}"
    kda, moe = config.is_kda(layer), config.is_moe(layer)
    return LayerWeights(
        input_layernorm=draw.norm(f"{name}.input_layernorm", config.hidden_size),
        post_attention_layernorm=draw.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        self_attention_res=draw.residual(f"{name}.self_attention_res", config.hidden_size),
        mlp_res=draw.residual(f"{name}.mlp_res", config.hidden_size),
        attention=_kda(config, draw, f"{name}.attention") if kda else _mla(config, draw, f"{name}.attention"),
        ffn=_moe(config, draw, f"{name}.ffn")
        if moe
        else _dense(config.hidden_size, config.intermediate_size, draw, f"{name}.ffn"),
    )


def random_weights(config: KimiK3Config, seed: int) -> ModelWeights:
    """All parameters in checkpoint dtypes (BF16; FP32 and MXFP4 where released so), on the CPU.

    Equal ``(config, seed)`` give equal bits on every machine with the same torch CPU generator.
    """
    draw = Draw(seed)
    return ModelWeights(
        embed_tokens=draw.normal("embed_tokens", config.vocab_size, config.hidden_size).bfloat16(),
        layers=[random_layer(config, layer, seed) for layer in range(config.num_hidden_layers)],
        output_attn_res=draw.residual("output_attn_res", config.hidden_size),
        norm=draw.norm("norm", config.hidden_size),
        lm_head=draw.linear("lm_head", config.vocab_size, config.hidden_size, LOGIT_SPREAD),
    )
