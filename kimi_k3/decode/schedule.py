"""The fused schedule as data: which ops a layer launches, in which order, on which stream.

The executor runs exactly this list; an audit of launch order reads it too. ``side`` ops overlap with the main
stream on a GPU and join it before the op that reads their mailbox; here they run in list order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k3.decode.prefetch import MAX_ROWS as PREFETCH_ROWS
from kimi_k3.decode.prefetch import POINTS
from kimi_k3.reference.config import KimiK3Config

#: (op, stream) of each half of a layer.
ATTENTION = {
    "kda": (("in_proj", "main"), ("kda_core", "main")),
    "mla": (("in_proj", "main"), ("mla_query", "main"), ("mla_core", "main"), ("mla_value", "main")),
}
OUTPUT = (("oproj_publish", "main"), ("oproj_reduce_attnres", "main"))
FEED_FORWARD = {
    "moe": (
        ("moe_front", "main"),
        ("shared_gate_up", "side"),
        ("route", "main"),
        ("shared_down_push", "side"),
        ("fc1", "main"),
        ("fc2_publish", "main"),
        ("moe_tail", "main"),
    ),
    "dense": (("dense_gate_up", "main"), ("dense_down_push", "main"), ("dense_reduce", "main")),
}


@dataclass(frozen=True)
class Call:
    """One launch. ``layer`` is 0-based; the final attention residual has ``layer == num_hidden_layers``, embed -1."""

    op: str
    layer: int
    stream: str = "main"
    point: str = ""  #: prefetch point


def layer_kinds(config: KimiK3Config, layer: int) -> tuple[str, str]:
    """("kda" or "mla", "moe" or "dense")."""
    return "kda" if config.is_kda(layer) else "mla", "moe" if config.is_moe(layer) else "dense"


def layer_ops(attention: str, feed_forward: str) -> tuple[tuple[str, str], ...]:
    """One layer from the attention residual in front of it to the publication of its feed-forward output."""
    return (("attn_res", "main"), *ATTENTION[attention], *OUTPUT, *FEED_FORWARD[feed_forward])


def step_schedule(config: KimiK3Config, rows: int) -> list[Call]:
    """Every launch of one step of ``rows`` padded rows, in order."""
    calls = [Call("embed", -1)]
    for layer in range(config.num_hidden_layers):
        for op, stream in layer_ops(*layer_kinds(config, layer)):
            calls.append(Call(op, layer, stream))
            if rows <= PREFETCH_ROWS:
                calls += [Call("prefetch", layer, "prefetch", p.name) for p in POINTS if p.after == op]
    calls.append(Call("attn_res", config.num_hidden_layers))
    return calls
