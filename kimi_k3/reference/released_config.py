"""The ``config.json`` of the released checkpoint: field names, nesting, and the constants the code relies on."""

from __future__ import annotations

from typing import Any

from kimi_k3.reference.config import DSparkConfig, KimiK3Config

#: Our field -> path inside ``text_config``.
FIELDS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "kda_layers": ("linear_attn_config", "kda_layers"),
    "full_attn_layers": ("linear_attn_config", "full_attn_layers"),
    "kda_num_heads": ("linear_attn_config", "num_heads"),
    "kda_head_dim": ("linear_attn_config", "head_dim"),
    "short_conv_kernel_size": ("linear_attn_config", "short_conv_kernel_size"),
    "gate_lower_bound": ("linear_attn_config", "gate_lower_bound"),
    "num_attention_heads": ("num_attention_heads",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "attn_res_block_size": ("attn_res_block_size",),
    "first_k_dense_replace": ("first_k_dense_replace",),
    "intermediate_size": ("intermediate_size",),
    "num_experts": ("num_experts",),
    "num_experts_per_token": ("num_experts_per_token",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "num_shared_experts": ("num_shared_experts",),
    "routed_expert_hidden_size": ("routed_expert_hidden_size",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "situ_beta": ("activation_situ_beta",),
    "situ_linear_beta": ("activation_situ_linear_beta",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "rms_norm_eps": ("rms_norm_eps",),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
    "pad_token_id": ("pad_token_id",),
}

#: Everything else the computation takes for granted. Another value is another model.
CONSTANTS: dict[tuple[str, ...], Any] = {
    ("model_type",): "kimi_linear",
    ("linear_attn_config", "use_full_rank_gate"): True,
    ("mla_use_nope",): True,
    ("mla_use_output_gate",): True,
    ("moe_layer_freq",): 1,
    ("latent_moe_use_norm",): True,
    ("moe_router_activation_func",): "sigmoid",
    ("moe_renormalize",): True,
    ("use_grouped_topk",): True,
    ("num_expert_group",): 1,
    ("topk_group",): 1,
    ("topk_method",): "noaux_tc",
    ("hidden_act",): "situ",
    ("tie_word_embeddings",): False,
    ("num_nextn_predict_layers",): 0,
}

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "symmetric": True,
                "scale_dtype": "torch.uint8",
            },
        }
    },
}

DSPARK = "dspark_config"  #: ours: geometry of the drafter that belongs to a generated checkpoint


def _insert(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _lookup(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"text_config.{'.'.join(path)} is missing")
        value = value[key]
    return value


def to_released(config: KimiK3Config) -> dict[str, Any]:
    """The contents of ``config.json``."""
    text: dict[str, Any] = {}
    for path, constant in CONSTANTS.items():
        _insert(text, path, constant)
    for name, path in FIELDS.items():
        value = getattr(config, name)
        _insert(text, path, list(value) if isinstance(value, tuple) else value)
    text["num_key_value_heads"] = config.num_attention_heads
    released = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "quantization_config": QUANTIZATION,
    }
    data = config.to_json()
    if data["dspark"] is not None:
        released[DSPARK] = {k: list(v) if isinstance(v, tuple) else v for k, v in data["dspark"].items()}
    return released


def from_released(data: dict[str, Any], a_log_padding: int) -> KimiK3Config:
    """The configuration in ``config.json``; ``a_log_padding`` is known from the tensors only.

    Raises ValueError for a missing field, a field of another type, or a constant of another model.
    """
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("text_config is missing")
    for path, constant in CONSTANTS.items():
        found = _lookup(text, path)
        if found != constant:
            raise ValueError(f"text_config.{'.'.join(path)} is {found!r}, this code computes {constant!r} only")
    values: dict[str, Any] = {"kda_a_log_padding": a_log_padding}
    for name, path in FIELDS.items():
        values[name] = _typed(_lookup(text, path), getattr(_DEFAULT, name), path)
    if data.get(DSPARK) is not None:
        spark = dict(data[DSPARK])
        spark["target_layer_ids"] = tuple(spark["target_layer_ids"])
        values["dspark"] = DSparkConfig(**spark)
    config = KimiK3Config(**values)
    listed = sorted(config.kda_layers + config.full_attn_layers)
    if listed != list(range(1, config.num_hidden_layers + 1)):
        raise ValueError(f"kda_layers and full_attn_layers must name each of 1..{config.num_hidden_layers} once")
    return config


_DEFAULT = KimiK3Config()


def _typed(value: Any, example: Any, path: tuple[str, ...]) -> Any:
    if isinstance(example, tuple):
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError(f"text_config.{'.'.join(path)} must be a list of integers")
    if isinstance(example, float) and type(value) in (int, float):
        return float(value)
    if type(value) is not type(example):
        raise ValueError(f"text_config.{'.'.join(path)} must be {type(example).__name__}, not {value!r}")
    return value
