"""The released checkpoint format: roster, round trip, and one clear error for everything that can be wrong."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3.reference.checkpoint import CheckpointError, checkpoint_digest, load_checkpoint, save_checkpoint
from kimi_k3.reference.config import TINY_A, TINY_B, KimiK3Config
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.roster import parameter_count, roster

SMALL = 300_000  #: bytes per shard: several shards


def tensors(weights: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return {path: weights}
    children = (
        enumerate(weights)
        if isinstance(weights, list)
        else ((f.name, getattr(weights, f.name)) for f in fields(weights))
    )
    return {key: value for name, child in children for key, value in tensors(child, f"{path}.{name}").items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", TINY_B, random_weights(TINY_B, 0), shard_bytes=SMALL)
    return tmp_path / "model"


def edit(checkpoint: Path, name: str, change: Any) -> Path:
    """Apply ``change`` to the tensors of the shard that holds ``name``; returns the shard."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    shard = checkpoint / index["weight_map"][name]
    content = load_file(shard)
    change(content)
    save_file(content, shard)
    return shard


def test_parameter_counts() -> None:
    assert parameter_count(TINY_A) == 4_752_256
    assert parameter_count(TINY_B) == 4_571_520


def test_released_roster_adds_up_to_the_published_size() -> None:
    specs = list(roster(KimiK3Config()))
    assert sum(spec.nbytes for spec in specs) == 1_559_965_606_912
    assert sum(spec.path[-1] == "packed" for spec in specs) == 247_296
    shapes = {spec.name: (spec.shape, spec.dtype) for spec in specs}
    prefix = "language_model.model.layers."
    assert shapes[f"{prefix}0.self_attn.A_log"] == ((128,), torch.float32)
    assert shapes[f"{prefix}0.self_attn.q_conv1d.weight"] == ((12288, 1, 4), torch.float32)
    assert shapes[f"{prefix}3.self_attn.kv_b_proj.weight"] == ((24576, 512), torch.bfloat16)
    assert shapes[f"{prefix}92.block_sparse_moe.experts.895.w2.weight_packed"] == ((3584, 1536), torch.uint8)
    assert shapes[f"{prefix}92.block_sparse_moe.experts.895.w1.weight_scale"] == ((3072, 112), torch.uint8)
    assert shapes["language_model.model.output_attn_res_proj.weight"] == ((1, 7168), torch.bfloat16)
    assert shapes["language_model.lm_head.weight"] == ((163840, 7168), torch.bfloat16)


@pytest.mark.parametrize(("config", "shard_bytes"), [(TINY_A, SMALL), (TINY_A, 10**9), (TINY_B, 1), (TINY_B, SMALL)])
def test_round_trip_is_bit_exact(config: KimiK3Config, shard_bytes: int, tmp_path: Path) -> None:
    weights = random_weights(config, 3)
    save_checkpoint(tmp_path / "model", config, weights, shard_bytes=shard_bytes)
    loaded_config, loaded = load_checkpoint(tmp_path / "model")
    assert loaded_config == config
    before, after = tensors(weights), tensors(loaded)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert torch.equal(value, after[name]), name
    assert not list(tmp_path.glob(".model*")), "temporary folder left behind"


def test_digest_ignores_sharding_and_sees_every_change(checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", TINY_B, random_weights(TINY_B, 0))
    digest = checkpoint_digest(checkpoint)
    assert checkpoint_digest(tmp_path / "one") == digest
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w3.weight_scale"

    def bump(content: dict[str, torch.Tensor]) -> None:
        content[name][0, 0] += 1

    edit(checkpoint, name, bump)
    assert checkpoint_digest(checkpoint) != digest
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    config["text_config"]["num_experts_per_token"] = 4
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    assert checkpoint_digest(tmp_path / "one") != digest


def test_shards_respect_the_limit_and_the_index_is_complete(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) > 5
    assert {f.name for f in files} == set(index["weight_map"].values())
    largest_tensor = max(spec.nbytes for spec in roster(TINY_B))
    for file in files:
        content = load_file(file)
        assert sum(t.nbytes for t in content.values()) <= max(SMALL, largest_tensor)
        assert all(index["weight_map"][name] == file.name for name in content)
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in roster(TINY_B))


def test_a_single_file_without_index_and_a_vision_tower_are_fine(checkpoint: Path, tmp_path: Path) -> None:
    everything = {n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()}
    everything["vision_tower.patch_embed.weight"] = torch.zeros(3)
    single = tmp_path / "single"
    single.mkdir()
    save_file(everything, single / "model.safetensors")
    (single / "config.json").write_text((checkpoint / "config.json").read_text())
    config, weights = load_checkpoint(single)
    assert config == TINY_B
    assert torch.equal(weights.lm_head, random_weights(TINY_B, 0).lm_head)


A_LOG = "language_model.model.layers.0.self_attn.A_log"
CONV = "language_model.model.layers.0.self_attn.q_conv1d.weight"


def _set(name: str, value: Any) -> Any:
    def change(content: dict[str, torch.Tensor]) -> None:
        content[name] = value(content[name])

    return change


def _nonzero_padding(a_log: torch.Tensor) -> torch.Tensor:
    a_log[20] = 1.0
    return a_log


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (CONV, _set(CONV, lambda t: t.bfloat16()), "is bfloat16 [256, 1, 4], expected float32 [256, 1, 4]"),
        (CONV, _set(CONV, lambda t: t[:, 0].contiguous()), "is float32 [256, 4], expected float32 [256, 1, 4]"),
        (CONV, lambda content: content.pop(CONV), f"tensor {CONV}"),
        (A_LOG, _set(A_LOG, _nonzero_padding), "has values behind its 16 heads"),
        (A_LOG, _set(A_LOG, lambda t: t[:12].contiguous()), "is shorter than 16 heads"),
    ],
)
def test_a_wrong_tensor_is_named(checkpoint: Path, name: str, change: Any, says: str) -> None:
    shard = edit(checkpoint, name, change)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint)
    message = str(error.value)
    assert says in message
    assert name in message
    assert shard.name in message
    assert "\n" not in message


def test_missing_and_truncated_shards_are_named(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    shard = checkpoint / index["weight_map"]["language_model.lm_head.weight"]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=shard.name):
        load_checkpoint(checkpoint)
    shard.write_bytes(content[:4])
    with pytest.raises(CheckpointError, match=shard.name):
        load_checkpoint(checkpoint)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: shard is missing"):
        load_checkpoint(checkpoint)


def test_missing_and_unknown_index_entries_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    moved = index["weight_map"].pop("language_model.model.norm.weight")
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor language_model.model.norm.weight is missing"):
        load_checkpoint(checkpoint)
    index["weight_map"]["language_model.model.norm.weight"] = moved
    index["weight_map"]["language_model.model.layers.5.input_layernorm.weight"] = moved
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layers.5.input_layernorm.weight is not part of this model"):
        load_checkpoint(checkpoint)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not readable JSON"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("hidden_act",), "silu", "text_config.hidden_act is 'silu', this code computes 'situ' only"),
        (("num_experts",), None, "text_config.num_experts is missing"),
        (("num_experts",), "32", "text_config.num_experts must be int"),
        (("linear_attn_config", "kda_layers"), [1, 2], "must name each of 1..5 once"),
    ],
)
def test_a_wrong_config_is_named(checkpoint: Path, path: tuple[str, ...], value: Any, says: str) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    node = config["text_config"]
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint)
    assert says in str(error.value)
    assert str(file) in str(error.value)


def test_nothing_is_half_written(tmp_path: Path) -> None:
    weights = random_weights(TINY_B, 0)
    weights.lm_head = weights.lm_head.float()
    with pytest.raises(CheckpointError, match=r"lm_head.weight: weights hold float32"):
        save_checkpoint(tmp_path / "model", TINY_B, weights)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        save_checkpoint(tmp_path / "taken", TINY_B, random_weights(TINY_B, 0))
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither"):
        load_checkpoint(tmp_path / "taken")
