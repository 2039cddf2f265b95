"""From an engine's ``checkpoint`` option to weights: a tiny preset with seeded weights, or a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kimi_k3.reference.checkpoint import CheckpointError, load_checkpoint
from kimi_k3.reference.config import PRESETS, DSparkConfig, KimiK3Config
from kimi_k3.reference.drafter import Drafter, DSparkDrafter
from kimi_k3.reference.dspark import DSpark
from kimi_k3.reference.dspark_weights import DSparkWeights, drafter_roster, load_drafter, random_drafter_weights
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.rehearsal import RehearsalDrafter
from kimi_k3.reference.released_config import to_released
from kimi_k3.reference.roster import TensorSpec, roster
from kimi_k3.reference.tokenizer import TextCodec
from kimi_k3.reference.weights import ModelWeights

#: Presets whose random weights fit any machine.
TINY = tuple(name for name in PRESETS if name.startswith("tiny"))


@dataclass(frozen=True)
class Checkpoint:
    config: KimiK3Config
    weights: ModelWeights  #: on the CPU, shared between engines: not to be changed
    digest: str  #: SHA-256 hex of configuration and tensors
    codec: TextCodec


def weights_digest(config: KimiK3Config, weights: ModelWeights) -> str:
    """What :func:`kimi_k3.reference.checkpoint.checkpoint_digest` gives for these weights once saved."""
    return _digest(to_released(config), roster(config), weights)


def _digest(config: dict[str, Any], specs: Iterable[TensorSpec], weights: Any) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for spec in sorted(specs, key=lambda s: s.name):
        value = weights
        for step in spec.path:
            value = value[step] if isinstance(step, int) else getattr(value, step)
        if spec.expert is not None:
            value = value[spec.expert]
        digest.update(f"{spec.name} {str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}\n".encode())
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=2)
def open_checkpoint(name: str, seed: int = 0) -> Checkpoint:
    """``name``: a preset of :data:`TINY`, with random weights of ``seed``, or the path of a checkpoint folder.

    Raises :class:`CheckpointError` naming the file. The result is cached: the arms of one run share it.
    """
    if name in TINY:
        config, codec = PRESETS[name], TextCodec()
        weights = random_weights(config, seed)
    else:
        folder = Path(name)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint {name!r}: no such folder; expected a folder or {', '.join(TINY)}")
        config, weights = load_checkpoint(folder)
        try:
            codec = TextCodec.load(folder)
        except Exception as error:  # the tokenizers library raises Exception itself, for whatever it finds
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{folder / 'tokenizer.json'}: cannot be read ({what}); expected a tokenizer.json of this model"
            ) from None
        if codec.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{folder}: the tokenizer has {codec.vocab_size} entries, the model {config.vocab_size}; "
                "expected a tokenizer.json of this model"
            )
    return Checkpoint(config, weights, weights_digest(config, weights), codec)


#: Drafters that are not a folder: DSpark with random weights; the target rehearsing its own next tokens (for tests).
RANDOM, REHEARSAL = "random", "rehearsal"


@lru_cache(maxsize=2)
def _drafter_weights(name: str, config: KimiK3Config, seed: int) -> tuple[DSparkConfig, DSparkWeights, str]:
    if name == RANDOM:
        if config.dspark is None:
            raise CheckpointError(f"drafter {name!r}: this checkpoint names no drafter geometry; expected a folder")
        spark, weights = config.dspark, random_drafter_weights(config, seed)
    else:
        if not Path(name).is_dir():
            raise CheckpointError(f"drafter {name!r}: no such folder; expected a folder, {RANDOM} or {REHEARSAL}")
        spark, weights = load_drafter(name)
        known, deepest = weights.markov_w1.shape[0], max(spark.target_layer_ids)
        if known != config.vocab_size or deepest >= config.num_hidden_layers:
            raise CheckpointError(
                f"{name}: drafter of a model with {known} tokens and more than {deepest} layers; "
                f"expected one for {config.vocab_size} tokens and {config.num_hidden_layers} layers"
            )
    return spark, weights, _digest(asdict(spark), drafter_roster(spark, config.vocab_size), weights)


def open_drafter(
    name: str, model: Model, draft_length: int, *, seed: int = 0, hit_rate: float = 0.8, sampling: str = "greedy"
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of ``model`` and what to say about it. ``name``: :data:`RANDOM`, :data:`REHEARSAL`, or a folder.

    Raises :class:`CheckpointError` for files, ValueError for numbers.
    """
    if name == REHEARSAL:
        return RehearsalDrafter(model, draft_length, hit_rate, seed), {"drafter_checkpoint": REHEARSAL}
    spark, weights, digest = _drafter_weights(name, model.config, seed)
    return DSparkDrafter(DSpark(model, weights, draft_length, spark), sampling), {"drafter_checkpoint": digest}
