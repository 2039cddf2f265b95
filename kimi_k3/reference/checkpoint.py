"""Checkpoints as released: sharded safetensors, an index, and ``config.json``.

Reading checks every tensor against :func:`kimi_k3.reference.roster.roster`; tensors outside
``language_model.`` (the vision tower) are ignored. Writing is atomic: a temporary folder is renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.released_config import from_released, to_released
from kimi_k3.reference.roster import TensorSpec, roster
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

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_PREFIX = "language_model."
DEFAULT_SHARD_BYTES = 5 * 1000**3


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one line that names the file and, where there is one, the tensor."""


# ---------------------------------------------------------------------------------------------------- writing


def save_checkpoint(
    path: Path | str, config: KimiK3Config, weights: ModelWeights, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write ``weights`` to the new folder ``path``, at most ``shard_bytes`` per shard (a larger tensor has its own).

    Raises CheckpointError if ``path`` exists and is not an empty folder, or if a tensor's dtype or shape is not the
    released one.
    """
    write_folder(Path(path), list(roster(config)), weights, to_released(config), shard_bytes)


def write_folder(
    path: Path, specs: Sequence[TensorSpec], weights: object, config: dict[str, Any], shard_bytes: int
) -> None:
    """Write the tensors ``specs`` find in ``weights``, the index and ``config`` to the new folder ``path``."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: already exists")
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, shard in zip(names, shards, strict=True):
            save_file({spec.name: _to_disk(weights, spec) for spec in shard}, folder / name, metadata={"format": "pt"})
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        total = sum(spec.nbytes for shard in shards for spec in shard)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / CONFIG, config)
        folder.chmod(0o755)  # mkdtemp makes it private
        os.replace(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _to_disk(weights: object, spec: TensorSpec) -> Tensor:
    value: Any = weights
    for step in spec.path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    if spec.expert is not None:
        value = value[spec.expert]
    if value.dtype != spec.dtype or tuple(value.shape) != spec.memory_shape:
        raise CheckpointError(
            f"tensor {spec.name}: weights hold {_describe(value.dtype, value.shape)}, "
            f"the released form is {_describe(spec.dtype, spec.memory_shape)}"
        )
    if spec.padding:
        value = torch.cat([value, value.new_zeros(spec.padding)])
    return value.reshape(spec.shape).cpu().contiguous().clone()  # a view would drag its whole storage along


# ---------------------------------------------------------------------------------------------------- reading


class Shards:
    """Tensors of a checkpoint by name, whichever file they are in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint folder")
        self._open: dict[str, Any] = {}
        if (path / INDEX).is_file():
            weight_map = read_json(path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{path / INDEX}: weight_map must map tensor names to file names")
            self.files: dict[str, str] = weight_map
        elif (path / SINGLE).is_file():
            self.files = dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        else:
            raise CheckpointError(f"{path}: neither {INDEX} nor {SINGLE}")

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{file}: shard is missing")
            with _naming(file):
                self._open[name] = safe_open(file, framework="pt")
        return self._open[name]

    def header(self, name: str) -> tuple[torch.dtype | str, tuple[int, ...]]:
        """Dtype and shape of a tensor; CheckpointError where it is missing."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file = self.path / self.files[name]
        shard = self._shard(self.files[name])
        with _naming(file, name):
            entry = shard.get_slice(name)
            return _DTYPES.get(entry.get_dtype(), entry.get_dtype()), tuple(entry.get_shape())

    def read(self, spec: TensorSpec) -> Tensor:
        """The tensor in its memory shape, after checking it against ``spec``."""
        dtype, shape = self.header(spec.name)
        file = self.path / self.files[spec.name]
        if dtype != spec.dtype or shape != spec.shape:
            raise CheckpointError(
                f"{file}: tensor {spec.name} is {_describe(dtype, shape)}, expected {_describe(spec.dtype, spec.shape)}"
            )
        with _naming(file, spec.name):
            value: Tensor = self._shard(self.files[spec.name]).get_tensor(spec.name)
        if spec.padding:
            value, padding = value[: -spec.padding], value[-spec.padding :]
            if bool(padding.any()):
                raise CheckpointError(
                    f"{file}: tensor {spec.name} has values behind its {len(value)} heads, not padding"
                )
        return value.reshape(spec.memory_shape)


_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def _describe(dtype: torch.dtype | str, shape: tuple[int, ...] | torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


@contextmanager
def _naming(file: Path, tensor: str | None = None) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        where = f"{file}: tensor {tensor}" if tensor else f"{file}"
        raise CheckpointError(f"{where}: truncated or not safetensors ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not readable JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return data


def _read_config(path: Path, shards: Shards) -> KimiK3Config:
    data = read_json(path / CONFIG)
    try:
        config = from_released(data, a_log_padding=0)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from None
    kda = [layer for layer in range(config.num_hidden_layers) if config.is_kda(layer)]
    if not kda:
        return config
    name = next(s.name for s in roster(config) if s.path == ("layers", kda[0], "attention", "a_log"))
    padding = shards.header(name)[1][0] - config.kda_num_heads  # the released heads are padded to a power of two
    if padding < 0:
        raise CheckpointError(
            f"{path / shards.files[name]}: tensor {name} is shorter than {config.kda_num_heads} heads"
        )
    return from_released(data, padding)


def load_checkpoint(path: Path | str) -> tuple[KimiK3Config, ModelWeights]:
    """Configuration and weights of a checkpoint folder, on the CPU. Raises CheckpointError."""
    path = Path(path)
    shards = Shards(path)
    config = _read_config(path, shards)
    specs = list(roster(config))
    unknown = {n for n in shards.files if n.startswith(TEXT_PREFIX)} - {spec.name for spec in specs}
    if unknown:
        name = min(unknown)
        raise CheckpointError(f"{path / shards.files[name]}: tensor {name} is not part of this model")
    tree: dict[Any, Any] = {}
    for spec in specs:
        value = shards.read(spec)
        node = tree
        for step in spec.path[:-1]:
            node = node.setdefault(step, {})
        if spec.expert is None:
            node[spec.path[-1]] = value
        else:
            stack = node.setdefault(spec.path[-1], value.new_empty(config.num_experts, *value.shape))
            stack[spec.expert] = value
    return config, _model(config, tree)


def _model(config: KimiK3Config, tree: dict[Any, Any]) -> ModelWeights:
    layers = []
    for index in range(config.num_hidden_layers):
        node = tree["layers"][index]
        ffn: DenseWeights | MoEWeights
        if config.is_moe(index):
            experts = {part: MXFP4Tensor(**node["ffn"][part]) for part in ("w1", "w2", "w3")}
            ffn = MoEWeights(**{**node["ffn"], **experts, "shared": DenseWeights(**node["ffn"]["shared"])})
        else:
            ffn = DenseWeights(**node["ffn"])
        kind = KDAWeights if config.is_kda(index) else MLAWeights
        residuals = {site: AttnResWeights(**node[site]) for site in ("self_attention_res", "mlp_res")}
        layers.append(LayerWeights(**{**node, **residuals, "attention": kind(**node["attention"]), "ffn": ffn}))
    return ModelWeights(**{**tree, "layers": layers, "output_attn_res": AttnResWeights(**tree["output_attn_res"])})


# ---------------------------------------------------------------------------------------------------- identity


def checkpoint_digest(path: Path | str) -> str:
    """SHA-256 over configuration and text tensors (name, dtype, shape, bytes), whatever the sharding.

    The configuration counts because two models can differ in it alone. Raises CheckpointError.
    """
    path = Path(path)
    shards = Shards(path)
    config = _read_config(path, shards)
    digest = hashlib.sha256(json.dumps(to_released(config), sort_keys=True).encode())
    for spec in sorted(roster(config), key=lambda s: s.name):
        digest.update(f"{spec.name} {_describe(spec.dtype, spec.shape)}\n".encode())
        digest.update(shards.read(spec).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
