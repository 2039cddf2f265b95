"""The Kimi K3 text model: one forward pass over a step's rows, mutating the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from kimi_k3.reference.attn_res import AttnResSite, ResidualStream
from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.kda import KDA
from kimi_k3.reference.layout import RowGroup, group_rows
from kimi_k3.reference.mla import MLA
from kimi_k3.reference.moe import DenseMLP, LatentMoE
from kimi_k3.reference.numerics import linear, rms_norm
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.weights import KDAWeights, LayerWeights, ModelWeights, MoEWeights, convert

STATE_SCHEMES = ("native", "recover")


class Layer:
    """One decoder layer on compute-dtype weights."""

    def __init__(
        self,
        config: KimiK3Config,
        index: int,
        weights: LayerWeights,
        precision: Precision,
        tp: int,
        cache_experts: bool | None,
    ) -> None:
        self.index = index
        self.opens_block = config.opens_block(index)
        self.input_norm = weights.input_layernorm
        self.post_norm = weights.post_attention_layernorm
        self.attention_site = AttnResSite(weights.self_attention_res, config.rms_norm_eps)
        self.ffn_site = AttnResSite(weights.mlp_res, config.rms_norm_eps)
        self.attention: KDA | MLA
        if isinstance(weights.attention, KDAWeights):
            self.attention = KDA(config, weights.attention, precision, tp)
        else:
            self.attention = MLA(config, weights.attention, precision, tp)
        self.ffn: DenseMLP | LatentMoE
        if isinstance(weights.ffn, MoEWeights):
            self.ffn = LatentMoE(config, weights.ffn, precision, tp, cache_experts)
        else:
            self.ffn = DenseMLP(config, weights.ffn, precision, tp)

    def attend(self, x: Tensor, batch: StepBatch, groups: list[RowGroup], caches: Caches) -> Tensor:
        if isinstance(self.attention, KDA):
            return self.attention(x, batch, groups, caches.conv[self.index], caches.recurrent[self.index])
        return self.attention(x, batch, groups, caches.kv[self.index])


class Model:
    """The model at one precision. ``tp`` > 1 reproduces the arithmetic of tensor-parallel ranks in one process:
    row-parallel products per rank, rounded, added in rank order.

    ``cache_experts``: keep dequantised expert weights; None decides by size. Computations are in
    ``precision.compute`` on ``device``; the caches passed to :meth:`forward` must be on the same device.

    ``state_scheme``: ``native`` writes the state after every row of a step to its own slot; ``recover`` keeps one
    slot per request, which only :meth:`commit` advances, once it is known how many rows were accepted.
    """

    def __init__(
        self,
        config: KimiK3Config,
        weights: ModelWeights,
        precision: Precision,
        tp: int = 1,
        device: torch.device | str = "cpu",
        cache_experts: bool | None = None,
        state_scheme: str = "native",
    ) -> None:
        if state_scheme not in STATE_SCHEMES:
            raise ValueError(f"state_scheme {state_scheme!r}, expected one of {', '.join(STATE_SCHEMES)}")
        if len(weights.layers) != config.num_hidden_layers:
            raise ValueError(f"weights of {len(weights.layers)} layers for a model of {config.num_hidden_layers}")
        self.config, self.precision, self.tp = config, precision, tp
        self.weights = weights  #: as given, in checkpoint dtypes: what an executor shards
        self.device = torch.device(device)
        compute = precision.compute
        self.embed_tokens = convert(weights.embed_tokens, compute, device)
        self.layers = [  # one at a time: only one layer exists twice
            Layer(config, index, convert(layer, compute, device), precision, tp, cache_experts)
            for index, layer in enumerate(weights.layers)
        ]
        self.state_scheme = state_scheme
        for layer in self.layers:
            if isinstance(layer.attention, KDA) and state_scheme == "recover":
                layer.attention.uncommitted = []
        self.output_site = AttnResSite(convert(weights.output_attn_res, compute, device), config.rms_norm_eps)
        self.norm = convert(weights.norm, compute, device)
        self.lm_head = convert(weights.lm_head, compute, device)

    @overload
    def forward(self, batch: StepBatch, caches: Caches) -> Tensor: ...

    @overload
    def forward(self, batch: StepBatch, caches: Caches, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, caches: Caches, aux_layers: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Final-normed hidden states [T, H] of every row, in the compute dtype; updates ``caches``.

        With ``aux_layers`` (0-based, "after layer") also the drafter's taps [T, len(aux_layers), H], in
        ascending layer order.
        """
        groups = group_rows(batch)
        embedding = self.precision.rounded(self.embed_tokens[batch.token_ids])
        stream = ResidualStream(embedding, self.config.num_blocks, self.precision)
        taps = []
        for layer in self.layers:
            x = stream.read_attention(layer.attention_site, layer.opens_block, layer.input_norm)
            stream.add_attention(layer.attend(x, batch, groups, caches))
            stream.add_ffn(layer.ffn(stream.read_ffn(layer.ffn_site, layer.post_norm)))
            if aux_layers is not None and layer.index in aux_layers:
                taps.append(stream.tap())
        mixed = stream.read_final(self.output_site)
        hidden = self.precision.rounded(rms_norm(mixed, self.norm, self.config.rms_norm_eps))
        if aux_layers is None:
            return hidden
        return hidden, torch.stack(taps, 1) if taps else hidden.new_empty(hidden.shape[0], 0, hidden.shape[1])

    @torch.inference_mode()
    def commit(self, accepted: Tensor, caches: Caches) -> None:
        """With the ``recover`` scheme, after every step: keep the first ``accepted`` [B] rows of each decode or
        verify request of the last batch (prefill requests are ignored)."""
        for layer in self.layers:
            if isinstance(layer.attention, KDA):
                layer.attention.commit(accepted, caches.conv[layer.index], caches.recurrent[layer.index])

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [R, H], final-normed -> logits [R, vocab], rounded like a GEMM output, in the compute dtype."""
        return linear(hidden, self.lm_head, self.precision)
