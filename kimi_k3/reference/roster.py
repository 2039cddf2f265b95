"""Every tensor of a released checkpoint: name, shape and dtype on disk, and where it lives in memory.

Names, shapes and packings follow the released safetensors headers. Disk and memory differ in four ways:
attention-residual queries carry a leading 1, convolutions a middle 1, ``A_log`` is padded with zeros behind the
heads, and experts are separate tensors on disk and stacked in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from kimi_k3.reference.config import KimiK3Config

MODEL = "language_model.model."
HEAD = "language_model.lm_head.weight"

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8


@dataclass(frozen=True)
class TensorSpec:
    name: str  #: on disk
    shape: tuple[int, ...]  #: on disk
    dtype: torch.dtype
    path: tuple[str | int, ...]  #: attribute names and list indices inside ``ModelWeights``
    expert: int | None = None  #: index into the stacked tensor at ``path``
    padding: int = 0  #: trailing zero entries that exist on disk only

    @property
    def memory_shape(self) -> tuple[int, ...]:
        if self.padding:
            return (self.shape[0] - self.padding,)
        return tuple(size for i, size in enumerate(self.shape) if size != 1 or not self.squeezed(i))

    def squeezed(self, dimension: int) -> bool:
        """Whether a dimension of size 1 exists on disk only."""
        return (len(self.shape) == 2 and dimension == 0 and self.path[-1] == "proj") or (
            len(self.shape) == 3 and dimension == 1
        )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _attention(config: KimiK3Config, layer: int) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype, int]]:
    """(disk suffix, attribute, shape, dtype, padding) of the attention of one layer."""
    hidden = config.hidden_size
    if config.is_kda(layer):
        width, heads, dim = config.kda_width, config.kda_num_heads, config.kda_head_dim
        for part in ("q_proj", "k_proj", "v_proj", "g_proj"):
            yield f"{part}.weight", part, (width, hidden), BF16, 0
        yield "f_a_proj.weight", "f_a_proj", (dim, hidden), BF16, 0
        yield "f_b_proj.weight", "f_b_proj", (width, dim), BF16, 0
        yield "b_proj.weight", "b_proj", (heads, hidden), BF16, 0
        for part in ("q", "k", "v"):
            yield f"{part}_conv1d.weight", f"{part}_conv", (width, 1, config.short_conv_kernel_size), F32, 0
        padding = config.kda_a_log_padding
        yield "A_log", "a_log", (heads + padding,), F32, padding
        yield "dt_bias", "dt_bias", (width,), F32, 0
        yield "o_norm.weight", "o_norm", (dim,), F32, 0
        yield "o_proj.weight", "o_proj", (hidden, width), BF16, 0
        return
    heads, nope, rope, v = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    yield "q_a_proj.weight", "q_a_proj", (config.q_lora_rank, hidden), BF16, 0
    yield "q_a_layernorm.weight", "q_a_norm", (config.q_lora_rank,), BF16, 0
    yield "q_b_proj.weight", "q_b_proj", (heads * (nope + rope), config.q_lora_rank), BF16, 0
    yield "kv_a_proj_with_mqa.weight", "kv_a_proj", (config.kv_row, hidden), BF16, 0
    yield "kv_a_layernorm.weight", "kv_a_norm", (config.kv_lora_rank,), BF16, 0
    yield "kv_b_proj.weight", "kv_b_proj", (heads * (nope + v), config.kv_lora_rank), BF16, 0
    yield "g_proj.weight", "g_proj", (config.mla_width, hidden), BF16, 0
    yield "o_proj.weight", "o_proj", (hidden, config.mla_width), BF16, 0


def _mlp(prefix: str, path: tuple[str | int, ...], hidden: int, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}gate_proj.weight", (width, hidden), BF16, (*path, "gate_proj"))
    yield TensorSpec(f"{prefix}up_proj.weight", (width, hidden), BF16, (*path, "up_proj"))
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, width), BF16, (*path, "down_proj"))


def _moe(config: KimiK3Config, prefix: str, path: tuple[str | int, ...]) -> Iterator[TensorSpec]:
    hidden, latent, width = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    yield TensorSpec(f"{prefix}gate.weight", (config.num_experts, hidden), BF16, (*path, "gate"))
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", (config.num_experts,), F32, (*path, "correction_bias"))
    yield TensorSpec(f"{prefix}routed_expert_down_proj.weight", (latent, hidden), BF16, (*path, "latent_down"))
    yield TensorSpec(f"{prefix}routed_expert_norm.weight", (latent,), BF16, (*path, "latent_norm"))
    yield TensorSpec(f"{prefix}routed_expert_up_proj.weight", (hidden, latent), BF16, (*path, "latent_up"))
    yield from _mlp(f"{prefix}shared_experts.", (*path, "shared"), hidden, config.shared_intermediate_size)
    for expert in range(config.num_experts):
        for part, out, inputs in (("w1", width, latent), ("w3", width, latent), ("w2", latent, width)):
            name = f"{prefix}experts.{expert}.{part}.weight_"
            yield TensorSpec(f"{name}packed", (out, inputs // 2), U8, (*path, part, "packed"), expert)
            scales = inputs // config.mxfp4_group
            yield TensorSpec(f"{name}scale", (out, scales), U8, (*path, part, "scale"), expert)


def roster(config: KimiK3Config) -> Iterator[TensorSpec]:
    """All tensors of the text model, embedding first, head last."""
    hidden = config.hidden_size
    yield TensorSpec(f"{MODEL}embed_tokens.weight", (config.vocab_size, hidden), BF16, ("embed_tokens",))
    for layer in range(config.num_hidden_layers):
        prefix, path = f"{MODEL}layers.{layer}.", ("layers", layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{prefix}{norm}.weight", (hidden,), BF16, (*path, norm))
        for site in ("self_attention_res", "mlp_res"):
            yield TensorSpec(f"{prefix}{site}_norm.weight", (hidden,), BF16, (*path, site, "norm"))
            yield TensorSpec(f"{prefix}{site}_proj.weight", (1, hidden), BF16, (*path, site, "proj"))
        for suffix, attribute, shape, dtype, padding in _attention(config, layer):
            yield TensorSpec(
                f"{prefix}self_attn.{suffix}", shape, dtype, (*path, "attention", attribute), padding=padding
            )
        if config.is_moe(layer):
            yield from _moe(config, f"{prefix}block_sparse_moe.", (*path, "ffn"))
        else:
            yield from _mlp(f"{prefix}mlp.", (*path, "ffn"), hidden, config.intermediate_size)
    yield TensorSpec(f"{MODEL}output_attn_res_norm.weight", (hidden,), BF16, ("output_attn_res", "norm"))
    yield TensorSpec(f"{MODEL}output_attn_res_proj.weight", (1, hidden), BF16, ("output_attn_res", "proj"))
    yield TensorSpec(f"{MODEL}norm.weight", (hidden,), BF16, ("norm",))
    yield TensorSpec(HEAD, (config.vocab_size, hidden), BF16, ("lm_head",))


def parameter_count(config: KimiK3Config) -> int:
    """Parameters of the text model: scales and zero padding are storage, two MXFP4 values share a byte."""
    total = 0
    for spec in roster(config):
        if spec.path[-1] == "packed":
            total += 2 * prod(spec.shape)
        elif spec.path[-1] != "scale":
            total += prod(spec.shape) - spec.padding
    return total
