"""From logits to tokens, in vLLM's order: allowed-token masks, penalties, temperature, top-k, top-p, sample.

Logits are copied to FP32 (FP64 logits stay FP64). Each row is handled for itself, with noise that depends on
its seed and position only, so a token does not depend on its neighbours in the batch. Log-probabilities are
those of the untouched logits, as in vLLM's ``raw_logprobs``. Shared by the stock and the specialised path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3.reference.noise import gumbel, signed_seed
from kimi_k3.reference.requests import SamplingParams


@dataclass(frozen=True)
class SamplerRow:
    """What one row of logits is to be sampled with.

    ``position`` is that of the token to be chosen. ``allowed`` is bool [vocab]; ``prompt_mask`` bool [vocab] and
    ``output_counts`` [vocab] are needed with penalties only and already contain the drafts before this row.
    """

    params: SamplingParams
    position: int
    allowed: Tensor | None = None
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None


def sampling_logits(logits: Tensor) -> Tensor:
    """A private FP32 (or FP64) copy of logits [rows, vocab]."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def apply_penalties(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Repetition (prompt and output), then frequency and presence (output), in place."""
    index = [i for i, row in enumerate(rows) if row.params.penalised]
    if not index:
        return

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(rows[i].params, name) for i in index], dtype=logits.dtype, device=logits.device)[
            :, None
        ]

    def stack(name: str) -> Tensor:
        tensors = [getattr(rows[i], name) for i in index]
        if any(t is None for t in tensors):
            raise ValueError(f"a row with penalties has no {name}")
        return torch.stack(tensors)

    chosen, counts = logits[index], stack("output_counts")
    repetition = torch.where(stack("prompt_mask") | (counts > 0), column("repetition_penalty"), 1.0)
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen -= column("frequency_penalty") * counts
    chosen -= column("presence_penalty") * (counts > 0)
    logits[index] = chosen


def filter_top_k_top_p(logits: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Set what top-k and then top-p exclude to -inf. ``logits`` [rows, vocab] are divided by the temperature.

    Top-k keeps everything equal to the k-th value. Top-p keeps the smallest set of most likely tokens whose
    probability, renormalised after top-k, reaches p; of equal tokens the lower id goes first.
    """
    vocab = logits.shape[-1]
    ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)
    k = torch.tensor([vocab if k <= 0 else min(k, vocab) for k in top_k], device=logits.device)
    p = torch.tensor(list(top_p), dtype=logits.dtype, device=logits.device)[:, None]
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, (k - 1)[:, None]), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # p = 1 keeps all: round-off must not cut the tail.
    ordered = ordered.masked_fill((before >= p) & (p < 1.0), -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, index, ordered)


def target_logits(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """The logits whose softmax is the distribution to sample from; a greedy row's are not divided or filtered.

    ``logits`` [rows, vocab] must be :func:`sampling_logits`' copy; it is changed.
    """
    for i, row in enumerate(rows):
        if row.allowed is not None:
            if not bool(row.allowed.any()):
                raise ValueError(f"row {i}: the token mask allows no token")
            logits[i].masked_fill_(~row.allowed, -torch.inf)
    apply_penalties(logits, rows)
    heated = [i for i, row in enumerate(rows) if row.params.temperature not in (0.0, 1.0)]
    if heated:
        temperature = [rows[i].params.temperature for i in heated]
        logits[heated] /= torch.tensor(temperature, dtype=logits.dtype, device=logits.device)[:, None]
    filtered = [i for i, r in enumerate(rows) if not r.params.greedy and (r.params.top_k > 0 or r.params.top_p < 1.0)]
    if filtered:
        params = [rows[i].params for i in filtered]
        logits[filtered] = filter_top_k_top_p(logits[filtered], [p.top_k for p in params], [p.top_p for p in params])
    return logits


def draw(target: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """One token per row of :func:`target_logits` [rows, vocab]; greedy ties and Gumbel ties go to the lower id."""
    tokens = target.argmax(-1)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if random:
        seeds = torch.tensor([signed_seed(rows[i].params.seed) for i in random], dtype=torch.int64)
        positions = torch.tensor([rows[i].position for i in random], dtype=torch.int64)
        noise = gumbel(seeds.to(target.device), positions.to(target.device), target.shape[-1])
        tokens[random] = (target[random].to(torch.float64) + noise).argmax(-1)
    return [int(t) for t in tokens.tolist()]


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """One token per row of model logits [rows, vocab]."""
    return draw(target_logits(sampling_logits(logits), rows), rows)


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural log-probabilities of the untouched logits, FP32 or FP64 [rows, vocab]."""
    return torch.log_softmax(sampling_logits(logits), dim=-1)


def top_log_probabilities(logprobs: Tensor, token: int, count: int) -> dict[int, float]:
    """The ``count`` most likely tokens of one row [vocab] and the chosen one, most likely first."""
    values, index = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    found = dict(zip((int(i) for i in index.tolist()), (float(v) for v in values.tolist()), strict=True))
    found.setdefault(token, float(logprobs[token]))
    return found
