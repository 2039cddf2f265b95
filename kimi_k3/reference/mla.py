"""Multi-head latent attention without positions (NoPE) and with a sigmoid output gate.

One cache row per token, ``[latent | "rope" part]``, is shared by all heads; despite its name the second part is
neither rotated nor normalised. Prefill expands rows to per-head keys and values (un-absorbed); decode and verify
move the expansion to the query and the output (absorbed). Both forms read every key, the step's own rows
included, from the cache, so an FP8 cache has the same effect however a prompt is cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.layout import RowGroup
from kimi_k3.reference.numerics import RowParallel, cast, linear, rms_norm, to_fp8
from kimi_k3.reference.precision import FP8, Precision
from kimi_k3.reference.weights import MLAWeights

SCORE_BUDGET = 1 << 24  #: attention scores held at once; larger steps are computed in parts


def write_rows(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Store ``rows`` [T, row] in ``cache`` [pages, page_size, row] at flat rows ``slot_mapping`` [T]; -1 is skipped."""
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        rows, slot_mapping = rows[kept], slot_mapping[kept]
    flat, values = cache.view(-1, cache.shape[-1]), cast(rows, cache.dtype)
    if cache.dtype == FP8:  # indexed writes of FP8 tensors do not exist on every device
        flat, values = flat.view(torch.uint8), values.view(torch.uint8)
    flat[slot_mapping] = values


def read_rows(cache: Tensor, block_tables: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """The first ``lengths`` [n] rows of each request, padded with zeros: [n, max(lengths), row] in ``dtype``.

    ``block_tables`` [n, max_pages]; whatever lies behind a request's length is not read, NaN included.
    """
    page_size, width = cache.shape[1], cache.shape[2]
    position = torch.arange(int(lengths.max()), device=cache.device)
    pages = block_tables[:, position // page_size]
    known = (position < lengths.unsqueeze(-1)) & (pages >= 0)
    index = torch.where(known, pages * page_size + position % page_size, 0)
    flat = cache.view(-1, width)
    if cache.dtype == FP8:
        rows = flat.view(torch.uint8)[index].view(FP8)
    else:
        rows = flat[index]
    return torch.where(known.unsqueeze(-1), rows.to(dtype), 0.0)


def causal_softmax(scores: Tensor, positions: Tensor) -> Tensor:
    """Softmax of ``scores`` [n, q, heads, s] over keys ``j <= positions`` [n, q]."""
    keys = torch.arange(scores.shape[-1], device=scores.device)
    hidden = keys > positions[:, :, None, None]
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


@dataclass
class MLAInputs:
    """Projected rows, [T, ...], rounded."""

    query: Tensor  #: [T, heads, nope + rope]
    row: Tensor  #: [T, kv_lora + rope] the token's cache row
    gate: Tensor  #: [T, heads * v] output-gate logits


class MLA:
    """One MLA layer. ``weights`` are in the compute dtype."""

    def __init__(self, config: KimiK3Config, weights: MLAWeights, precision: Precision, tp: int = 1) -> None:
        self.heads = config.num_attention_heads
        if self.heads % tp:
            raise ValueError(f"{self.heads} MLA heads cannot be sharded over {tp} ranks")
        self.nope, self.rope, self.v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_lora, self.kv_lora = config.q_lora_rank, config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        self.eps = config.rms_norm_eps
        self.precision = precision
        w = weights
        self.in_proj = torch.cat([w.q_a_proj, w.kv_a_proj, w.g_proj])
        self.q_a_norm, self.kv_a_norm = w.q_a_norm, w.kv_a_norm
        self.q_b_proj = w.q_b_proj
        self.kv_b_proj = w.kv_b_proj
        expand = w.kv_b_proj.unflatten(0, (self.heads, self.nope + self.v))
        self.w_uk, self.w_uv = expand.split([self.nope, self.v], 1)  # [heads, nope | v, kv_lora]
        self.o_proj = RowParallel(w.o_proj, tp, precision)

    def __call__(self, x: Tensor, batch: StepBatch, groups: list[RowGroup], cache: Tensor) -> Tensor:
        """``x`` [T, H] (normalised) -> [T, H]; writes the step's rows to ``cache``."""
        inputs = self.project(x)
        write_rows(cache, inputs.row, batch.slot_mapping)
        heads = self.attend(inputs.query, batch, groups, cache)
        gated = self.precision.rounded(heads * torch.sigmoid(inputs.gate))
        return self.o_proj(gated)

    def project(self, x: Tensor) -> MLAInputs:
        rounded = self.precision.rounded
        projected = linear(x, self.in_proj, self.precision)
        qc, c, kr, gate = projected.split([self.q_lora, self.kv_lora, self.rope, self.heads * self.v], -1)
        qc = rounded(rms_norm(qc, self.q_a_norm, self.eps))
        c = rounded(rms_norm(c, self.kv_a_norm, self.eps))
        query = linear(qc, self.q_b_proj, self.precision).unflatten(-1, (self.heads, self.nope + self.rope))
        return MLAInputs(query, torch.cat([c, kr], -1), gate)

    def attend(self, query: Tensor, batch: StepBatch, groups: list[RowGroup], cache: Tensor) -> Tensor:
        """[T, heads, nope + rope] -> concatenated value heads [T, heads * v], before the gate."""
        out = query.new_zeros(query.shape[0], self.heads * self.v)
        for group in groups:
            longest = int((group.context + group.lens).max())
            work = group.rows.numel() * self.heads * longest
            for part in group.split(-(-work // SCORE_BUDGET)):
                rows = read_rows(
                    cache, batch.block_tables[part.requests], part.context + part.lens, self.precision.compute
                )
                positions = part.context.unsqueeze(-1) + torch.arange(part.width, device=rows.device)
                attend = self.unabsorbed if part.prefill else self.absorbed
                part.scatter(out, attend(part.gather(query), rows, positions))
        return out

    def unabsorbed(self, query: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """``query`` [n, q, heads, nope + rope] over ``rows`` [n, s, row] -> [n, q, heads * v]."""
        latent, rope = rows.split([self.kv_lora, self.rope], -1)
        expanded = linear(latent, self.kv_b_proj, self.precision).unflatten(-1, (self.heads, self.nope + self.v))
        key, value = expanded.split([self.nope, self.v], -1)
        qn, qr = query.split([self.nope, self.rope], -1)
        scores = torch.einsum("nqhd,nshd->nqhs", qn, key) + torch.einsum("nqhd,nsd->nqhs", qr, rope)
        p = causal_softmax(scores * self.scale, positions)
        return self.precision.rounded(torch.einsum("nqhs,nshd->nqhd", p, value)).flatten(-2)

    def absorbed(self, query: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The same attention with the expansion absorbed; an FP8 cache also rounds the query rows to FP8."""
        rounded = self.precision.rounded
        qn, qr = query.split([self.nope, self.rope], -1)
        ql = rounded(torch.einsum("nqhd,hdc->nqhc", qn, self.w_uk))
        wide = torch.cat([ql, qr], -1)
        if self.precision.kv == FP8:
            wide = to_fp8(wide).to(wide.dtype)
        scores = (wide.flatten(1, 2) @ rows.mT).unflatten(1, wide.shape[1:3])
        p = causal_softmax(scores * self.scale, positions)
        ol = rounded((p.flatten(1, 2) @ rows[..., : self.kv_lora]).unflatten(1, wide.shape[1:3]))
        return rounded(torch.einsum("nqhc,hvc->nqhv", ol, self.w_uv)).flatten(-2)
