"""Parameters of the DSpark drafter: dataclasses, seeded random values, and its checkpoint.

Tensor names and shapes are those of the public drafter ``Inferact/Kimi-K3-DSpark``. It shares the target's embedding
and head; copies of them in a checkpoint are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k3.reference.checkpoint import CONFIG, CheckpointError, Shards, read_json, write_folder
from kimi_k3.reference.config import DSparkConfig, KimiK3Config
from kimi_k3.reference.init import Draw
from kimi_k3.reference.roster import BF16, TensorSpec
from kimi_k3.reference.weights import DenseWeights

ARCHITECTURE, MODEL_TYPE = "K3DSparkModel", "k3_dspark"
SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class DSparkLayerWeights:
    input_layernorm: Tensor  #: [H]
    post_attention_layernorm: Tensor  #: [H]
    q_a_proj: Tensor  #: [q_lora, H]
    q_a_norm: Tensor  #: [q_lora]
    q_b_proj: Tensor  #: [heads * (nope + rope), q_lora]
    kv_a_proj: Tensor  #: [kv_lora + rope, H]
    kv_a_norm: Tensor  #: [kv_lora]
    kv_b_proj: Tensor  #: [heads * (nope + v), kv_lora]
    o_proj: Tensor  #: [H, heads * v]
    mlp: DenseWeights


@dataclass
class DSparkWeights:
    context_proj: Tensor  #: [H, taps * H]
    context_norm: Tensor  #: [H]
    layers: list[DSparkLayerWeights]
    final_norm: Tensor  #: [H]
    markov_w1: Tensor  #: [V, rank] embedding of the previous token
    markov_w2: Tensor  #: [V, rank]
    confidence_weight: Tensor  #: [1, H + rank]
    confidence_bias: Tensor  #: [1]


_ATTENTION = {  # attribute -> name on disk below self_attn.
    "q_a_proj": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b_proj": "kv_b_proj",
    "o_proj": "o_proj",
}


def drafter_roster(config: DSparkConfig, vocab_size: int) -> Iterator[TensorSpec]:
    """Every tensor of the drafter, all BF16."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.markov_rank
    head, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_a_norm": (config.q_lora_rank,),
        "q_b_proj": (heads * head, config.q_lora_rank),
        "kv_a_proj": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_norm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + value), config.kv_lora_rank),
        "o_proj": (hidden, heads * value),
    }
    yield TensorSpec("context_proj.weight", (hidden, len(config.target_layer_ids) * hidden), BF16, ("context_proj",))
    yield TensorSpec("context_norm.weight", (hidden,), BF16, ("context_norm",))
    for layer in range(config.num_hidden_layers):
        prefix, path = f"layers.{layer}.", ("layers", layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{prefix}{norm}.weight", (hidden,), BF16, (*path, norm))
        for attribute, name in _ATTENTION.items():
            yield TensorSpec(f"{prefix}self_attn.{name}.weight", shapes[attribute], BF16, (*path, attribute))
        width = config.intermediate_size
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            yield TensorSpec(f"{prefix}mlp.{part}_proj.weight", shape, BF16, (*path, "mlp", f"{part}_proj"))
    yield TensorSpec("final_norm.weight", (hidden,), BF16, ("final_norm",))
    for part in ("markov_w1", "markov_w2"):
        yield TensorSpec(f"markov_head.{part}.weight", (vocab_size, rank), BF16, (part,))
    yield TensorSpec("confidence_head.proj.weight", (1, hidden + rank), BF16, ("confidence_weight",))
    yield TensorSpec("confidence_head.proj.bias", (1,), BF16, ("confidence_bias",))


def drafter_parameter_count(config: DSparkConfig, vocab_size: int) -> int:
    """Without the embedding and the head it shares with the target."""
    return sum(prod(spec.shape) for spec in drafter_roster(config, vocab_size))


def _build(tree: dict[Any, Any], layers: int) -> DSparkWeights:
    built = [
        DSparkLayerWeights(**{**tree["layers"][i], "mlp": DenseWeights(**tree["layers"][i]["mlp"])})
        for i in range(layers)
    ]
    return DSparkWeights(**{**tree, "layers": built})


def _place(tree: dict[Any, Any], path: tuple[str | int, ...], value: Tensor) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _of(config: KimiK3Config) -> DSparkConfig:
    if config.dspark is None:
        raise ValueError("this model's configuration has no drafter")
    return config.dspark


def random_drafter_weights(config: KimiK3Config, seed: int) -> DSparkWeights:
    """Seeded BF16 weights for ``config.dspark``, on the CPU; see :mod:`kimi_k3.reference.init`."""
    spark, draw, tree = _of(config), Draw(seed), dict[Any, Any]()
    for spec in drafter_roster(spark, config.vocab_size):
        name = f"dspark.{spec.name}"
        if len(spec.shape) == 1 and spec.path != ("confidence_bias",):
            value = draw.norm(name, *spec.shape)
        elif spec.path == ("markov_w1",):
            value = draw.normal(name, *spec.shape).bfloat16()
        elif spec.path == ("confidence_bias",):
            value = torch.zeros(spec.shape).bfloat16()
        else:
            value = draw.linear(name, *spec.shape)
        _place(tree, spec.path, value)
    return _build(tree, spark.num_hidden_layers)


def save_drafter(path: Path | str, config: KimiK3Config, weights: DSparkWeights, shard_bytes: int = 10**9) -> None:
    """Write the drafter to the new folder ``path``. Raises CheckpointError as ``save_checkpoint`` does."""
    spark = _of(config)
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(spark).items() if not k.startswith("rope_")}
    scaling = {
        "rope_type": "yarn",
        "factor": spark.rope_factor,
        "original_max_position_embeddings": spark.rope_original_max,
        "beta_fast": spark.rope_beta_fast,
        "beta_slow": spark.rope_beta_slow,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    data = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **values,
        "rope_theta": spark.rope_theta,
        "rope_scaling": scaling,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": len(spark.target_layer_ids),
    }
    write_folder(Path(path), list(drafter_roster(spark, config.vocab_size)), weights, data, shard_bytes)


def load_drafter(path: Path | str) -> tuple[DSparkConfig, DSparkWeights]:
    """The drafter in a checkpoint folder, on the CPU. Raises CheckpointError."""
    path = Path(path)
    shards, file = Shards(path), path / CONFIG
    data = read_json(file)
    try:
        config, vocab_size = _config(data), int(data["vocab_size"])
    except KeyError as error:
        raise CheckpointError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    specs = list(drafter_roster(config, vocab_size))
    unknown = set(shards.files) - {spec.name for spec in specs} - set(SHARED_WITH_TARGET)
    if unknown:
        raise CheckpointError(f"{path / shards.files[min(unknown)]}: tensor {min(unknown)} is not part of this drafter")
    tree: dict[Any, Any] = {}
    for spec in specs:
        _place(tree, spec.path, shards.read(spec))
    return config, _build(tree, config.num_hidden_layers)


def _config(data: dict[str, Any]) -> DSparkConfig:
    if data.get("model_type") != MODEL_TYPE:
        raise ValueError(f"model_type is {data.get('model_type')!r}, expected {MODEL_TYPE!r}")
    scaling = data["rope_scaling"]
    rope = {
        "rope_theta": float(data["rope_theta"]),
        "rope_factor": float(scaling["factor"]),
        "rope_original_max": int(scaling["original_max_position_embeddings"]),
        "rope_beta_fast": float(scaling["beta_fast"]),
        "rope_beta_slow": float(scaling["beta_slow"]),
    }
    plain = {f.name: data[f.name] for f in fields(DSparkConfig) if f.name not in rope}
    return DSparkConfig(**{**plain, **rope, "target_layer_ids": tuple(data["target_layer_ids"])})
