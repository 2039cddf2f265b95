"""CuTe providers of the executor's ops. Importing this module registers them; it needs CuTe DSL and a CUDA torch.

A rank is the leading dimension of every tensor: one launch per rank. On a GPU that plays one rank of a larger group
the dimension is 1. A launcher is built and compiled at the first call of its shape, which therefore has to come before
graph capture: the runtime refuses to compile inside one.

``prefetch`` runs on a side stream, which the end of the step joins again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import Provider, register
from kimi_k3.kernels.embed import Embed
from kimi_k3.kernels.prefetch import Prefetch
from kimi_k3.kernels.shapes import ProjectionShape
from kimi_k3.kernels.stream_projection import StreamProjection, publication_table
from kimi_k3.kernels.stream_projection_settings import setting_for

#: modules of other kernels that register their own providers
OTHERS = ("kimi_k3.kernels.providers_attention",)
ARCHES = ("sm_90", "sm_100", "sm_103")


@functools.cache
def projection(shape: ProjectionShape, m: int, targets: int, live: int, owner_width: int) -> StreamProjection:
    return StreamProjection(shape, (m,), targets=targets, live=live, owner_width=owner_width)


def _table(context: OpContext, key: Tensor, form: str, slots: Sequence[tuple[int, int]]) -> Tensor:
    """The device table of publication addresses of one mailbox, built once."""

    def build(t: Tensor) -> Tensor:
        return publication_table(slots, t.device)

    table: Tensor = context.prepared(key, form, build)
    return table


def in_proj(context: OpContext, x: Tensor, weight: Tensor, replicated: int, out: Tensor) -> None:
    ranks, n, k = weight.shape
    op = projection(ProjectionShape("in_proj", n, k), x.shape[1], 0, 0, 0)
    for r in range(ranks):
        op.check(x[r], weight[r], out[r])
        op.run(x[r], weight[r], out[r])


def gate_up(context: OpContext, x: Tensor, weight: Tensor, out: Tensor) -> None:
    ranks, n, k = weight.shape
    op = projection(ProjectionShape("gate_up", n, k, situ=True), x.shape[1], 0, 0, 0)
    for r in range(ranks):
        op.check(x[r], weight[r], out[r])
        op.run(x[r], weight[r], out[r])


def publish_partial(context: OpContext, x: Tensor, weight: Tensor, box: Tensor) -> None:
    """box [R dst, R src, cap, N]: every column to every rank; or [R owner, R src, cap, W], N = R W: to its owner."""
    ranks, n, k = weight.shape
    targets, width = box.shape[0], box.shape[-1]
    op = projection(ProjectionShape("publish", n, k), x.shape[1], targets, 0, 0 if width == n else width)
    for r in range(ranks):
        table = _table(context, box, f"partial {r}", [(box[d, r].data_ptr(), 0) for d in range(targets)])
        pitch = (box.stride(-2), 0)
        op.check(x[r], weight[r], table=table, pitch=pitch)
        op.run(x[r], weight[r], table=table, pitch=pitch)


def moe_front(context: OpContext, x: Tensor, weight: Tensor, logits_box: Tensor, latent_box: Tensor) -> None:
    """Each rank's router logits (FP32) and latent columns to all ranks."""
    ranks, n, k = weight.shape
    targets = logits_box.shape[0]
    live, latent = logits_box.shape[-1] // targets, latent_box.shape[-1] // targets
    shape = ProjectionShape("moe_front", n, k, fp32_rows=n - latent)
    op = projection(shape, x.shape[1], targets, live, 0)
    for r in range(ranks):
        slots = [
            (latent_box[d, :, r * latent :].data_ptr(), logits_box[d, :, r * live :].data_ptr()) for d in range(targets)
        ]
        table = _table(context, latent_box, f"front {r} {logits_box.data_ptr()}", slots)
        pitch = (latent_box.stride(-2), logits_box.stride(-2))
        op.check(x[r], weight[r], table=table, pitch=pitch)
        op.run(x[r], weight[r], table=table, pitch=pitch)


@functools.cache
def gather(hidden: int, copies: int) -> Embed:
    return Embed(hidden, copies)


def embed(context: OpContext, ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """All ranks' shards are local: one gather over the whole table, written for every rank."""
    gather(weight.shape[-1], out.shape[0]).run(ids, weight.flatten(0, 1), out)


def prefetch(context: OpContext, point: str, weights: list[Tensor]) -> None:
    walker = context.prepared(weights[0], f"prefetch {point}", lambda _: Prefetch(weights))
    with context.beside(weights[0].device):
        walker.run()


def _fits(context: OpContext, device: str) -> bool:
    """BF16 activations, FP32 accumulation, a known architecture."""
    p = context.precision
    return device in ARCHES and p.activations == torch.bfloat16 and p.compute == torch.float32


def _projection_fits(n: int, k: int, situ: bool = False) -> bool:
    try:
        setting_for(ProjectionShape("", n, k, situ=situ), 1)
    except ValueError:
        return False
    return True


def _supports(op: str) -> Any:
    def supports(context: OpContext, device: str) -> bool:
        c, tp = context.config, context.tp
        if not _fits(context, device):
            return False
        hidden, shared, dense = c.hidden_size, c.shared_intermediate_size // tp, c.intermediate_size // tp
        live, latent = c.num_experts // tp, c.routed_expert_hidden_size // tp
        shapes = {
            "embed": hidden % 8 == 0,
            "in_proj": hidden % 64 == 0 and hidden >= 128,
            "oproj_publish": _projection_fits(hidden, min(c.kda_width, c.mla_width) // tp) and hidden // tp % 8 == 0,
            "dense_gate_up": _projection_fits(2 * dense, hidden, True),
            "dense_down_push": _projection_fits(hidden, dense) and hidden // tp % 8 == 0,
            "moe_front": hidden % 64 == 0 and hidden >= 128 and live % 2 == 0 and latent % 8 == 0,
            "shared_gate_up": _projection_fits(2 * shared, hidden, True),
            "shared_down_push": _projection_fits(hidden, shared) and hidden // tp % 8 == 0,
            "prefetch": True,
        }
        return bool(shapes[op])

    return supports


_RUN: dict[str, Callable[..., None]] = {
    "embed": embed,
    "in_proj": in_proj,
    "oproj_publish": publish_partial,
    "dense_gate_up": gate_up,
    "dense_down_push": publish_partial,
    "moe_front": moe_front,
    "shared_gate_up": gate_up,
    "shared_down_push": publish_partial,
    "prefetch": prefetch,
}
for _op, _run in _RUN.items():
    register(Provider(_op, "cute", _run, _supports(_op), priority=10))

for _name in OTHERS:
    if importlib.util.find_spec(_name) is not None:
        importlib.import_module(_name)
