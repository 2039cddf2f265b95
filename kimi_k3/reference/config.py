"""Configuration of the Kimi K3 text model, with the field names of the released ``config.json``.

Layer lists are 1-based, as released; :meth:`KimiK3Config.is_kda` takes the 0-based layer index.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DSparkConfig:
    """The DSpark drafter (``model_type: k3_dspark``): RoPE MLA without gate, non-causal inside the block."""

    hidden_size: int = 7168
    num_hidden_layers: int = 5
    intermediate_size: int = 14336
    num_attention_heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    target_layer_ids: tuple[int, ...] = (2, 23, 47, 71, 89)  #: 0-based, "after layer"
    mask_token_id: int = 163837
    markov_rank: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    rope_factor: float = 32.0  #: YaRN; 1.0 = plain RoPE
    rope_original_max: int = 32768
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0


@dataclass(frozen=True)
class KimiK3Config:
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    kda_layers: tuple[int, ...] = tuple(n for n in range(1, 92) if n % 4)  #: 1-based
    full_attn_layers: tuple[int, ...] = (*range(4, 93, 4), 93)  #: 1-based
    # KDA
    kda_num_heads: int = 96
    kda_head_dim: int = 128
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    kda_a_log_padding: int = 32  #: zero entries after the per-head A_log values on disk
    # MLA (NoPE, gated)
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  #: a width only: nothing is rotated
    v_head_dim: int = 128
    # attention residual
    attn_res_block_size: int = 12
    # feed-forward
    first_k_dense_replace: int = 1
    intermediate_size: int = 33792
    num_experts: int = 896
    num_experts_per_token: int = 16
    moe_intermediate_size: int = 3072
    num_shared_experts: int = 2
    routed_expert_hidden_size: int = 3584
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    mxfp4_group: int = 32
    # the rest
    vocab_size: int = 163840
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    dspark: DSparkConfig | None = field(default=None)

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is a KDA layer (the released lists are 1-based)."""
        return (layer + 1) in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def opens_block(self, layer: int) -> bool:
        """Whether 0-based ``layer`` stores a new attention-residual block."""
        return layer % self.attn_res_block_size == 0

    @property
    def num_blocks(self) -> int:
        """Stored attention-residual blocks of a full forward."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def kda_width(self) -> int:
        return self.kda_num_heads * self.kda_head_dim

    @property
    def mla_width(self) -> int:
        """Width of the concatenated value heads (and of the output gate)."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def kv_row(self) -> int:
        """Elements of one cached MLA row: latent + "rope" part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> KimiK3Config:
        values = dict(data)
        for name in ("kda_layers", "full_attn_layers"):
            if name in values:
                values[name] = tuple(values[name])
        if values.get("dspark"):
            spark = dict(values["dspark"])
            spark["target_layer_ids"] = tuple(spark["target_layer_ids"])
            values["dspark"] = DSparkConfig(**spark)
        return KimiK3Config(**values)

    @staticmethod
    def load(path: Path) -> KimiK3Config:
        return KimiK3Config.from_json(json.loads(path.read_text(encoding="utf-8")))


_TINY_DSPARK = DSparkConfig(
    hidden_size=128,
    num_hidden_layers=2,
    intermediate_size=256,
    num_attention_heads=16,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    target_layer_ids=(1, 3, 6),
    mask_token_id=509,
    markov_rank=16,
    rope_factor=4.0,
    rope_original_max=64,
)

#: 4.75 M parameters, 3:1 KDA:MLA, two stored blocks; heads divide TP8 and TP16.
TINY_A = KimiK3Config(
    hidden_size=128,
    num_hidden_layers=8,
    kda_layers=(1, 2, 3, 5, 6, 7),
    full_attn_layers=(4, 8),
    kda_num_heads=16,
    kda_head_dim=16,
    kda_a_log_padding=8,
    num_attention_heads=16,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    attn_res_block_size=4,
    intermediate_size=256,
    num_experts=32,
    num_experts_per_token=8,
    moe_intermediate_size=64,
    num_shared_experts=2,
    routed_expert_hidden_size=64,
    vocab_size=512,
    max_position_embeddings=4096,
    bos_token_id=506,
    eos_token_id=507,
    pad_token_id=511,
    dspark=_TINY_DSPARK,
)

#: 4.57 M parameters, ends in two MLA layers like the released model, an MLA block opener, TP8-exact experts.
TINY_B = KimiK3Config(
    **{
        **{f: getattr(TINY_A, f) for f in TINY_A.__dataclass_fields__},
        "num_hidden_layers": 5,
        "kda_layers": (1, 2, 3),
        "full_attn_layers": (4, 5),
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 32,
        "moe_intermediate_size": 256,
        "num_shared_experts": 1,
        "dspark": None,
    }
)

PRESETS = {"tiny-a": TINY_A, "tiny-b": TINY_B, "kimi-k3": KimiK3Config()}
