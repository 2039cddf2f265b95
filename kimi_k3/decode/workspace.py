"""Buffers of one prepared step and the arguments of its calls, bound once: running a step is walking a list.

Nothing is allocated for results while a step runs, as under a captured GPU graph; a step's inputs are copied into
the same tensors every time. Padding rows are decode rows of token 0 with null slots: they take part in every
exchange and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode import prefetch
from kimi_k3.decode.mesh import Mailboxes, identical
from kimi_k3.decode.ops import OpContext, overload
from kimi_k3.decode.plan import TWO_PHASE_ROWS, PlanLimits, kv_splits
from kimi_k3.decode.schedule import Call, step_schedule
from kimi_k3.decode.shards import KDAShard, LayerShard, MLAShard, MLPShard, ModelShards, MoEShard
from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.numerics import FP8


class StepInputs:
    """Persistent input tensors of a step with ``rows`` rows of ``requests`` requests."""

    def __init__(self, rows: int, requests: int, slot_width: int, pages: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.ids, self.lens, self.slot_mapping = zeros(rows), zeros(rows), zeros(rows)
        self.block_tables = zeros(requests, pages)
        self.slots, self.accepted = zeros(requests, slot_width), zeros(requests)

    def load(self, batch: StepBatch) -> None:
        """Copy a batch in; everything behind it becomes padding."""
        rows, requests = batch.num_rows, batch.num_requests
        pages = min(batch.block_tables.shape[1], self.block_tables.shape[1])
        for target, values, padding in (
            (self.ids, batch.token_ids, 0),
            (self.slot_mapping, batch.slot_mapping, -1),
            (self.accepted, batch.accepted, 1),
        ):
            target[: len(values)] = values
            target[len(values) :] = padding
        self.lens[:rows] = batch.positions + 1
        self.lens[rows:] = 0
        self.block_tables[:requests, :pages] = batch.block_tables[:, :pages]
        self.slots[:requests] = batch.state_slots[:, : self.slots.shape[1]]
        self.slots[requests:] = 0


class PreparedStep:
    """One prepared (rows, rows per request): buffers, and the bound calls in schedule order."""

    def __init__(
        self,
        context: OpContext,
        shards: ModelShards,
        caches: Caches,
        boxes: Mailboxes,
        limits: PlanLimits,
        rows: int,
        query_len: int,
        aux_layers: Sequence[int] = (),
    ) -> None:
        config, precision = context.config, context.precision
        self.context, self.shards, self.caches, self.boxes = context, shards, caches, boxes
        self.rows, self.requests = rows, rows // query_len
        self.two_phase = rows >= TWO_PHASE_ROWS
        self.aux_layers = tuple(sorted(aux_layers))
        self.device = shards.embed.device
        tp, hidden, k = context.tp, config.hidden_size, config.num_experts_per_token
        heads, splits = config.num_attention_heads // tp, kv_splits(self.requests, limits)
        page_size = caches.page_size
        pages = -(-limits.max_context // page_size)
        self.inputs = StepInputs(rows, self.requests, 1 + limits.draft_length, pages, self.device)

        acts, compute = precision.activations, precision.compute
        self.x = self._buffer(tp, rows, hidden)  # normalised input of the next projection
        self.prefix = self._buffer(tp, rows, hidden)
        self.blocks = self._buffer(tp, rows, config.num_blocks, hidden)
        self.out = self._buffer(tp, rows, hidden)
        self.projected = {
            kind: self._buffer(tp, rows, shard.in_proj.shape[1])
            for kind, shard in {type(layer.attention): layer.attention for layer in shards.layers}.items()
        }
        self.kda_local = self._buffer(tp, rows, config.kda_width // tp)
        self.mla_local = self._buffer(tp, rows, config.mla_width // tp)
        row_dtype = precision.kv
        self.query = self._buffer(tp, rows, heads, config.kv_row, dtype=row_dtype if row_dtype == FP8 else acts)
        self.kv_rows = {layer: self._buffer(tp, rows, config.kv_row, dtype=row_dtype) for layer in caches.kv}
        self.partial = self._buffer(splits, tp, rows, heads, config.kv_lora_rank, dtype=compute)
        self.lse = self._buffer(splits, tp, rows, heads, dtype=compute)
        self.latent = self._buffer(tp, rows, config.routed_expert_hidden_size)
        self.ids = self._buffer(tp, rows, k, dtype=torch.int64)
        self.weights = self._buffer(tp, rows, k)
        self.order = self._buffer(tp, rows * k, dtype=torch.int64)
        self.counts = self._buffer(tp, config.num_experts, dtype=torch.int64)
        self.widths: dict[int, Tensor] = {}  # intermediate activations by width
        self.taps = {layer: self._buffer(tp, rows, hidden) for layer in self.aux_layers}

        self.points: list[str] = []
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...], Tensor | None]] = []
        for call in step_schedule(config, rows):
            arguments = self._arguments(call)
            # The last argument of a residual op is its output, which every rank holds a copy of.
            watched = arguments[-1] if call.op in ("attn_res", "oproj_reduce_attnres") and tp > 1 else None
            self.calls.append((overload(call.op), (context.handle, *arguments), watched))
            if call.op == "prefetch":
                self.points.append(f"{call.point}@{call.layer}")

    def _buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.context.precision.activations, device=self.device)

    def _width(self, width: int, rows: int) -> Tensor:
        if width not in self.widths:
            self.widths[width] = self._buffer(self.context.tp, rows, width)
        return self.widths[width]

    def run(self, batch: StepBatch) -> list[Tensor]:
        """Execute the step. Returns replicated activations [R, M, H] on which the ranks did not agree, if any.

        A copy that went wrong on one rank would otherwise go unseen: what the rank contributes to sums and exchanges
        is wrong for all ranks alike. Not looked at on a GPU, where asking would stop the stream.
        """
        self.inputs.load(batch)
        return self.launch()

    def launch(self) -> list[Tensor]:
        """Everything of a step but its inputs: what a graph captures. Returns what :meth:`run` does."""
        diverged = []
        watching = self.device.type == "cpu"
        for call, arguments, watched in self.calls:
            call(*arguments)
            if watching and watched is not None and not identical(watched):
                diverged.append(watched.clone())
        self.context.join()
        return diverged

    def result(self, rows: int) -> Tensor:
        """Final-normed hidden states of the true rows, rank 0's copy, compute dtype [rows, H]."""
        return self.out[0, :rows].to(self.context.precision.compute, copy=True)

    def tapped(self, rows: int) -> Tensor:
        """[rows, taps, H], rank 0's copy, in ascending layer order."""
        compute = self.context.precision.compute
        if not self.taps:
            return self.out.new_empty(rows, 0, self.out.shape[-1], dtype=compute)
        return torch.stack([self.taps[layer][0, :rows] for layer in self.aux_layers], 1).to(compute)

    # -- arguments of each op, in the order of ops.SCHEMAS ----------------------------------------------------

    def _arguments(self, call: Call) -> tuple[Any, ...]:
        if call.op == "embed":
            return self.inputs.ids, self.shards.embed, self.prefix
        if call.op == "attn_res":
            return self._attn_res(call.layer)
        layer = self.shards.layers[call.layer]
        if call.op == "prefetch":
            point = next(p for p in prefetch.POINTS if p.name == call.point)
            return call.point, point.weights(self.shards.layers, call.layer) or [self.shards.final_site.gamma]
        if call.op in ("in_proj", "kda_core", "mla_query", "mla_core", "mla_value", "oproj_publish"):
            if isinstance(layer.attention, KDAShard):
                return self._kda(call, layer.attention)
            return self._mla(call, layer.attention)
        if call.op == "oproj_reduce_attnres":
            return self._reduce(call.layer, layer)
        if isinstance(layer.ffn, MoEShard):
            return self._moe(call.op, layer.ffn)
        return self._mlp(call.op.removeprefix("dense_"), layer.ffn)

    def _readable(self, layer: int) -> int:
        """Blocks stored by the layers before ``layer``."""
        return -(-layer // self.context.config.attn_res_block_size)

    def _attn_res(self, layer: int) -> tuple[Any, ...]:
        config = self.context.config
        final = layer == config.num_hidden_layers
        site = self.shards.final_site if final else self.shards.layers[layer].attention_site
        delta = self.boxes.delta if layer > 0 else None
        opens = not final and config.opens_block(layer)
        tap = self.taps.get(layer - 1)
        out = self.out if final else self.x
        stored = config.num_blocks if final else self._readable(layer)
        return delta, self.prefix, self.blocks, site.query, site.gamma, stored, opens, final, tap, out

    def _partial_boxes(self, kind: str) -> tuple[Tensor, Tensor | None]:
        """Mailbox of the partial sums and, in two phases, of the gathered ones."""
        if self.two_phase:
            return getattr(self.boxes, f"{kind}_owner"), getattr(self.boxes, f"{kind}_gather")
        return getattr(self.boxes, kind), None

    def _kda(self, call: Call, shard: KDAShard) -> tuple[Any, ...]:
        projected, inputs = self.projected[KDAShard], self.inputs
        if call.op == "in_proj":
            return self.x, shard.in_proj, 0, projected
        if call.op == "oproj_publish":
            return self.kda_local, shard.o_proj, self._partial_boxes("attention")[0]
        static = (shard.f_b, shard.conv, shard.a_log, shard.dt_bias, shard.o_norm)
        state = (self.caches.conv[call.layer], self.caches.recurrent[call.layer])
        return projected, *static, *state, inputs.slots, inputs.accepted, self.kda_local

    def _mla(self, call: Call, shard: MLAShard) -> tuple[Any, ...]:
        projected, inputs = self.projected[MLAShard], self.inputs
        if call.op == "in_proj":
            return self.x, shard.in_proj, len(shard.q_norm) + self.context.config.kv_row, projected
        if call.op == "oproj_publish":
            return self.mla_local, shard.o_proj, self._partial_boxes("attention")[0]
        kv = self.caches.kv[call.layer]
        query, partial, lse = self.query, self.partial, self.lse
        if self.context.dcp > 1:
            assert self.boxes.query is not None
            assert self.boxes.context is not None
            assert self.boxes.context_lse is not None
            query, partial, lse = self.boxes.query, self.boxes.context, self.boxes.context_lse
        if call.op == "mla_query":
            static = (shard.q_norm, shard.kv_norm, shard.q_b, shard.w_uk)
            return projected, *static, kv, inputs.slot_mapping, inputs.lens, self.kv_rows[call.layer], query
        if call.op == "mla_core":
            return query, kv, inputs.block_tables, inputs.lens, partial, lse
        return partial, lse, inputs.lens, shard.w_uv, projected, self.mla_local

    def _reduce(self, index: int, layer: LayerShard) -> tuple[Any, ...]:
        site, opens = layer.ffn_site, self.context.config.opens_block(index)
        stored = self._readable(index) + opens
        boxes = self._partial_boxes("attention")
        return *boxes, self.prefix, self.blocks, site.query, site.gamma, stored, opens, self.x

    def _mlp(self, op: str, shard: MLPShard) -> tuple[Any, ...]:
        hidden = self._width(shard.down.shape[2], self.rows)
        if op == "gate_up":
            return self.x, shard.gate_up, hidden
        if op == "down_push":
            return hidden, shard.down, self.boxes.shared
        return self.boxes.shared, self.boxes.delta, self.rows

    def _moe(self, op: str, shard: MoEShard) -> tuple[Any, ...]:
        if op.startswith("shared_"):
            return self._mlp(op.removeprefix("shared_"), shard.shared)
        if op == "moe_front":
            return self.x, shard.front, self.boxes.logits, self.boxes.front_latent
        if op == "route":
            boxes = (self.boxes.logits, self.boxes.front_latent)
            return *boxes, shard.bias, self.latent, self.ids, self.weights, self.order, self.counts
        box, gather = self._partial_boxes("latent")
        if op == "moe_tail":
            return box, gather, self.boxes.shared, shard.norm, shard.up, self.boxes.delta, self.rows
        pairs = self.rows * self.context.config.num_experts_per_token
        hidden = self._width_of_experts(pairs, shard)
        if op == "fc1":
            return self.latent, self.order, self.counts, shard.w13.packed, shard.w13.scale, hidden
        return hidden, self.weights, self.order, self.counts, shard.w2.packed, shard.w2.scale, box

    def _width_of_experts(self, pairs: int, shard: MoEShard) -> Tensor:
        width = shard.w2.packed.shape[-1] * 2
        key = -width  # expert rows are (row, slot) pairs, other rows are rows: never the same buffer
        if key not in self.widths:
            self.widths[key] = self._buffer(self.context.tp, pairs, width)
        return self.widths[key]
