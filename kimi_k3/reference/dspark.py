"""The DSpark drafter: a few MLA layers that draft a block of tokens at once, conditioned on the target's taps.

Context rows are projections of the target's taps, one per token, written for accepted tokens only. A block forward
runs the last token and ``draft_length - 1`` mask tokens; inside the block attention is not causal. Tokens are then
drawn one after the other, each row's logits corrected by a low-rank table of the token before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.config import DSparkConfig
from kimi_k3.reference.dspark_weights import DSparkLayerWeights, DSparkWeights
from kimi_k3.reference.mla import causal_softmax, read_rows, write_rows
from kimi_k3.reference.model import Model
from kimi_k3.reference.numerics import RowParallel, linear, rms_norm, to_fp8
from kimi_k3.reference.precision import FP8, Precision
from kimi_k3.reference.weights import DenseWeights, convert

#: Chooses one token per row from logits [n, vocab]; the second argument is the place in the block.
Choice = Callable[[Tensor, int], Tensor]


def yarn_frequencies(config: DSparkConfig) -> Tensor:
    """Inverse frequencies [rope / 2], FP64. YaRN: fast dimensions keep their frequency, slow ones are divided by
    the factor, with a linear ramp in between (Peng et al., "YaRN", 2023)."""
    dim, base = config.qk_rope_head_dim, config.rope_theta
    inverse = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.rope_factor == 1.0:
        return inverse

    def dimension(rotations: float) -> float:
        """Which dimension turns ``rotations`` times over the original context."""
        return dim * math.log(config.rope_original_max / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(config.rope_beta_fast)), 0)
    high = min(math.ceil(dimension(config.rope_beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inverse * (1 - ramp) + inverse / config.rope_factor * ramp


def attention_scale(config: DSparkConfig) -> float:
    """Softmax scale with YaRN's magnitude correction, ``(0.1 ln(factor) + 1)**2`` on ``1 / sqrt(head)``."""
    magnitude = 0.1 * math.log(config.rope_factor) + 1 if config.rope_factor > 1 else 1.0
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5) * magnitude**2


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate interleaved pairs ``(2i, 2i + 1)`` of ``x`` [..., rope] by ``angles`` [..., rope / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class DraftLayer:
    """One drafter layer: RoPE MLA without gate, SiLU MLP, ordinary residuals. Weights in the compute dtype."""

    def __init__(self, config: DSparkConfig, weights: DSparkLayerWeights, precision: Precision, tp: int) -> None:
        self.heads, self.nope, self.rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        if self.heads % tp:
            raise ValueError(f"{self.heads} drafter heads cannot be sharded over {tp} ranks")
        self.kv_lora, self.v, self.eps = config.kv_lora_rank, config.v_head_dim, config.rms_norm_eps
        self.scale = attention_scale(config)
        self.precision, self.w = precision, weights
        expand = weights.kv_b_proj.unflatten(0, (self.heads, self.nope + self.v))
        self.w_uk, self.w_uv = expand.split([self.nope, self.v], 1)
        self.o_proj = RowParallel(weights.o_proj, tp, precision)
        mlp: DenseWeights = weights.mlp
        self.gate_up = torch.cat([mlp.gate_proj, mlp.up_proj])
        self.down = RowParallel(mlp.down_proj, tp, precision)

    def cache_rows(self, x: Tensor, angles: Tensor) -> Tensor:
        """``x`` [T, H] -> cache rows [T, kv_lora + rope]: normalised latent and rotated part."""
        latent, rope = linear(x, self.w.kv_a_proj, self.precision).split([self.kv_lora, self.rope], -1)
        latent = self.precision.rounded(rms_norm(latent, self.w.kv_a_norm, self.eps))
        return torch.cat([latent, self.precision.rounded(rotate(rope, angles))], -1)

    def forward(
        self, x: Tensor, angles: Tensor, slots: Tensor, block_tables: Tensor, lengths: Tensor, cache: Tensor
    ) -> Tensor:
        """``x`` [n, q, H] -> [n, q, H]. Writes the block's rows to ``cache`` at ``slots`` [n, q]; every row attends to
        the first ``lengths`` [n] cached rows of its request."""
        rounded, w = self.precision.rounded, self.w
        h = rounded(rms_norm(x, w.input_layernorm, self.eps))
        write_rows(cache, self.cache_rows(h, angles).flatten(0, 1), slots.flatten())
        qc = rounded(rms_norm(linear(h, w.q_a_proj, self.precision), w.q_a_norm, self.eps))
        query = linear(qc, w.q_b_proj, self.precision).unflatten(-1, (self.heads, self.nope + self.rope))
        qn, qr = query.split([self.nope, self.rope], -1)
        ql = rounded(torch.einsum("nqhd,hdc->nqhc", qn, self.w_uk))
        wide = torch.cat([ql, rounded(rotate(qr, angles.unsqueeze(-2)))], -1)
        if self.precision.kv == FP8:
            wide = to_fp8(wide).to(wide.dtype)
        rows = read_rows(cache, block_tables, lengths, self.precision.compute)
        scores = (wide.flatten(1, 2) @ rows.mT).unflatten(1, wide.shape[1:3])
        last = (lengths - 1).unsqueeze(-1).expand(x.shape[:2])  # not causal: all rows see the whole block
        p = causal_softmax(scores * self.scale, last)
        ol = rounded((p.flatten(1, 2) @ rows[..., : self.kv_lora]).unflatten(1, wide.shape[1:3]))
        o = rounded(torch.einsum("nqhc,hvc->nqhv", ol, self.w_uv)).flatten(-2)
        x = rounded(x + self._rows(self.o_proj, o))
        h = rounded(rms_norm(x, w.post_attention_layernorm, self.eps))
        gate, up = linear(h, self.gate_up, self.precision).chunk(2, -1)
        return rounded(x + self._rows(self.down, rounded(F.silu(gate) * up)))

    @staticmethod
    def _rows(layer: RowParallel, x: Tensor) -> Tensor:
        return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class DSpark:
    """The drafter of ``target``, at the target's precision and on its device; embedding and head are the target's.

    ``draft_length`` tokens per block, 1 or more. ``weights`` in checkpoint dtypes.
    """

    def __init__(self, target: Model, weights: DSparkWeights, draft_length: int, config: DSparkConfig | None = None):
        spark = config or target.config.dspark
        if spark is None:
            raise ValueError("neither the target's configuration nor the caller names a drafter")
        if spark.hidden_size != target.config.hidden_size:
            raise ValueError(f"drafter width {spark.hidden_size}, target width {target.config.hidden_size}")
        if draft_length < 1:
            raise ValueError(f"draft length {draft_length}, expected at least 1")
        self.config, self.target, self.draft_length = spark, target, draft_length
        self.precision, self.device = target.precision, target.device
        w = convert(weights, self.precision.compute, self.device)
        self.weights = w
        self.layers = [DraftLayer(spark, layer, self.precision, target.tp) for layer in w.layers]
        self.frequencies = yarn_frequencies(spark).to(self.device)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What to ask of the target's forward pass."""
        return self.config.target_layer_ids

    def allocate(self, pages: int, page_size: int) -> list[Tensor]:
        """Zero-filled caches, one [pages, page_size, row] per drafter layer; pages are shared with the target."""
        row = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        return [torch.zeros(pages, page_size, row, dtype=self.precision.kv, device=self.device) for _ in self.layers]

    def _angles(self, positions: Tensor) -> Tensor:
        """FP32 like a stored table, FP64 where everything is."""
        angles = positions.unsqueeze(-1) * self.frequencies
        return angles if self.precision.compute == torch.float64 else angles.float()

    @torch.inference_mode()
    def write_context(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor, caches: Sequence[Tensor]) -> None:
        """Context rows of ``T`` tokens from the target's taps [T, taps, H]. Rejected rows have slot -1
        (:func:`accepted_slots`) and are not written."""
        rounded, eps = self.precision.rounded, self.config.rms_norm_eps
        projected = linear(taps.flatten(-2), self.weights.context_proj, self.precision)
        context = rounded(rms_norm(projected, self.weights.context_norm, eps))
        angles = self._angles(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            write_rows(cache, layer.cache_rows(context, angles), slot_mapping)

    @torch.inference_mode()
    def block_forward(
        self, last_tokens: Tensor, positions: Tensor, block_tables: Tensor, caches: Sequence[Tensor]
    ) -> Tensor:
        """Final-normed hidden states [n, draft_length, H] of one block per request.

        ``last_tokens`` [n] at ``positions`` [n] start the blocks; context rows before them must be written. Block
        rows that ``block_tables`` [n, max_pages] do not cover are neither stored nor attended to.
        """
        count, page_size = self.draft_length, caches[0].shape[1]
        ids = torch.full((len(last_tokens), count), self.config.mask_token_id, device=self.device)
        ids[:, 0] = last_tokens
        at = positions.unsqueeze(-1) + torch.arange(count, device=self.device)
        covered = (block_tables >= 0).sum(-1) * page_size
        page = (at // page_size).clamp(max=block_tables.shape[1] - 1)
        slots = block_tables.gather(1, page) * page_size + at % page_size
        slots = torch.where(at < covered.unsqueeze(-1), slots, -1)
        lengths = torch.minimum(positions + count, covered)
        x = self.precision.rounded(self.target.embed_tokens[ids])
        angles = self._angles(at)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.forward(x, angles, slots, block_tables, lengths, cache)
        return self.precision.rounded(rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps))

    @torch.inference_mode()
    def draft(
        self,
        last_tokens: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        caches: Sequence[Tensor],
        choose: Choice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [n, draft_length] and the logits they were chosen from [n, draft_length, vocab].

        Without ``choose`` each is the argmax: then the proposal is one-hot. Row ``j`` predicts ``position + j + 1``.
        """
        hidden = self.block_forward(last_tokens, positions, block_tables, caches)
        base = self.target.compute_logits(hidden)
        previous, tokens, logits = last_tokens, [], []
        for j in range(self.draft_length):
            row = self.precision.rounded(base[:, j] + self.markov_bias(previous))
            previous = row.argmax(-1) if choose is None else choose(row, j)
            tokens.append(previous)
            logits.append(row)
        return torch.stack(tokens, 1), torch.stack(logits, 1)

    def markov_bias(self, previous: Tensor) -> Tensor:
        """What the token before adds to a row's logits: [n] -> [n, vocab]."""
        return linear(self.weights.markov_w1[previous], self.weights.markov_w2, self.precision)

    @torch.inference_mode()
    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Probability [n, q] that each draft is accepted, for adaptive verification; ``previous`` [n, q] tokens."""
        features = torch.cat([hidden, self.weights.markov_w1[previous]], -1)
        logit = linear(features, self.weights.confidence_weight, self.precision) + self.weights.confidence_bias
        return torch.sigmoid(logit.squeeze(-1))


def accepted_slots(batch: StepBatch, kept: Sequence[int]) -> Tensor:
    """``batch.slot_mapping`` with -1 for rows that were not accepted: request ``i`` keeps its first ``kept[i]``."""
    mapping = batch.slot_mapping.clone()
    start = 0
    for length, count in zip(batch.query_lens, kept, strict=True):
        mapping[start + count : start + length] = -1
        start += length
    return mapping
