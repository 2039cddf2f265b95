"""Prefetch points: where the schedule starts moving the weights of coming ops towards the cache.

On a GPU a point is a kernel on a side stream that walks the listed weights; on a CPU it does nothing, and the
ledger records it. Activations and anything a step writes never appear here: a prefetched copy could be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kimi_k3.decode.shards import LayerShard, MoEShard

MAX_ROWS = 8  #: above, streaming the experts leaves no cache to prefetch into


@dataclass(frozen=True)
class PrefetchPoint:
    """``weights(layers, i)`` are the weights to move when layer ``i`` has launched the op ``after``."""

    name: str
    after: str
    weights: Callable[[Sequence[LayerShard], int], list[Tensor]]


def _front(layers: Sequence[LayerShard], index: int) -> list[Tensor]:
    ffn = layers[index].ffn
    return [ffn.front] if isinstance(ffn, MoEShard) else [ffn.gate_up]


def _next_in_proj(layers: Sequence[LayerShard], index: int) -> list[Tensor]:
    return [layers[index + 1].attention.in_proj] if index + 1 < len(layers) else []


POINTS = (
    PrefetchPoint("oproj_to_front", "oproj_publish", _front),
    PrefetchPoint("experts_to_in_proj", "fc1", _next_in_proj),
)
