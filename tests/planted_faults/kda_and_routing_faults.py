"""Faults of the optimised path, planted behind its ops: each changes one formula and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import Provider

Run = Callable[..., None]


def _only(count: list[int], every: int, wanted: int) -> bool:
    """Whether this is call number ``wanted`` of a step of ``every`` calls."""
    count[0] += 1
    return (count[0] - 1) % every == wanted


def decay(real: Run, layers: int, *, layer: int = 1, head: int = 5, change: float = 0.005) -> Run:
    """One head's decay is off by ``change``: the old state enters the recurrence that much too small."""
    calls = [0]

    def run(context: OpContext, *args: Any) -> None:
        recurrent, slots = args[7], args[8]
        if _only(calls, layers, layer):
            own = slots[:, 0][slots[:, 0] > 0]
            recurrent[own, head] *= 1 - change
        real(context, *args)

    return run


def swapped_expert(real: Run, layers: int, *, layer: int = 2, one: int = 3, other: int = 11) -> Run:
    """Rows routed to ``one`` go to ``other`` and the other way round; the tables follow."""
    calls = [0]

    def run(context: OpContext, *args: Any) -> None:
        real(context, *args)
        if _only(calls, layers, layer):
            ids, order, counts = args[4], args[6], args[7]
            ids.copy_(torch.where(ids == one, other, torch.where(ids == other, one, ids)))
            _tables(ids, order, counts)

    return run


def biased_weights(real: Run, layers: int) -> Run:
    """The correction bias, which is for choosing alone, is added to the weights as well."""

    def run(context: OpContext, *args: Any) -> None:
        logits_box, bias, ids, weights = args[0], args[2], args[4], args[5]
        scores = torch.sigmoid(logits_box[:, : ids.shape[1]]) + bias
        real(context, *args)
        picked = scores.gather(-1, ids)
        weights.copy_(picked * (context.config.routed_scaling_factor / picked.sum(-1, keepdim=True)))

    return run


def swapped_weights(real: Run, layers: int, *, layer: int = 2, one: int = 3, other: int = 11) -> Run:
    """Two experts' first matrices were loaded in each other's place: routing is right, the result is not."""
    calls, kept = [0], dict[int, tuple[Tensor, Tensor]]()

    def run(context: OpContext, *args: Any) -> None:
        args_ = list(args)
        if _only(calls, layers, layer):
            packed, scale = args[3], args[4]
            if packed.data_ptr() not in kept:
                order = torch.arange(packed.shape[1])
                order[[one, other]] = order[[other, one]]
                kept[packed.data_ptr()] = packed[:, order].contiguous(), scale[:, order].contiguous()
            args_[3:5] = kept[packed.data_ptr()]
        real(context, *args_)

    return run


def _tables(ids: Tensor, order: Tensor, counts: Tensor) -> None:
    pairs = ids.flatten(1)
    order.copy_(pairs.argsort(dim=-1, stable=True))
    counts.zero_().scatter_add_(1, pairs, torch.ones_like(pairs))


#: Fault -> the op it sits behind, and how to make it from the real provider.
FAULTS: dict[str, tuple[str, Callable[[Run, int], Run]]] = {
    "decay of one head off by 0.5 %": ("kda_core", decay),
    "one expert swapped with another": ("route", swapped_expert),
    "router bias added to the weights": ("route", biased_weights),
    "two experts' weights swapped": ("fc1", swapped_weights),
}


def plant(fault: str, built: Any) -> None:
    """Put ``fault`` behind its op in an engine of the specialised path."""
    op, make = FAULTS[fault]
    context = built.engine.executor.context
    config = context.config
    layers = range(config.num_hidden_layers)
    calls = sum(config.is_kda(i) if op == "kda_core" else config.is_moe(i) for i in layers)
    context.providers[op] = Provider(op, "torch", make(context.providers[op].run, calls))
