"""Which draft tokens stand, and the token that follows them.

Rows of a verify step: row ``i`` of ``d`` drafts holds the target's distribution for the place of draft ``i``, row
``d`` the one after the last draft. Exactly one token is emitted after the accepted drafts: a correction where a
draft was rejected, a bonus where none was. ``standard`` (Leviathan et al. 2023; Chen et al. 2023) and ``block``
(Sun et al., "Block Verification Accelerates Speculative Decoding", 2024) leave the target's distribution exactly as
it is. ``synthetic`` accepts by given rates, whatever the logits say: for measuring speed at a known acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from kimi_k3.reference.noise import STREAM_ACCEPT, STREAM_SAMPLE, gumbel, uniform

METHODS = ("standard", "block", "synthetic")
PLACEHOLDER = -1  #: a draft that is always rejected


def acceptance_rates(acceptance_length: float, draft_length: int) -> tuple[float, ...]:
    """Unconditional prefix-acceptance rates with the least variance whose steps emit ``acceptance_length`` tokens.

    The length counts emitted tokens, accepted drafts + 1. ValueError outside ``[1, draft_length + 1]``.
    """
    if not 1 <= acceptance_length <= draft_length + 1:
        raise ValueError(f"acceptance length {acceptance_length}, expected between 1 and {draft_length + 1}")
    accepted = acceptance_length - 1
    whole = floor(accepted)
    return tuple(1.0 if i < whole else accepted - whole if i == whole else 0.0 for i in range(draft_length))


@dataclass(frozen=True)
class Rejection:
    """``rates``: for ``synthetic``, the probability that at least the first ``i + 1`` drafts are accepted."""

    method: str = "standard"
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"rejection method {self.method!r}, expected one of {', '.join(METHODS)}")
        if (self.method == "synthetic") != bool(self.rates):
            raise ValueError("acceptance rates belong to the synthetic method, and only to it")
        falling = all(a >= b for a, b in zip((1.0, *self.rates), (*self.rates, 0.0), strict=True))
        if not falling:
            raise ValueError(f"acceptance rates {list(self.rates)}, expected non-increasing within [0, 1]")

    @staticmethod
    def synthetic(acceptance_length: float, draft_length: int) -> Rejection:
        return Rejection("synthetic", acceptance_rates(acceptance_length, draft_length))

    def conditional(self, position: int) -> float:
        """Probability that draft ``position`` is accepted, given that those before it were."""
        before = self.rates[position - 1] if position else 1.0
        return self.rates[position] / before if before else 0.0


def standard_acceptance(p: Tensor, q: Tensor, drafts: Sequence[int]) -> Tensor:
    """Conditional acceptance probability of each draft, ``min(1, p(x) / q(x))``: [d].

    ``p`` [>= d, vocab] target, ``q`` [d, vocab] proposal.
    """
    index = torch.tensor(drafts, dtype=torch.int64, device=p.device)
    rows = torch.arange(len(drafts), device=p.device)
    return (p[rows, index] / q[rows, index]).clamp(max=1.0)


def block_acceptance(p: Tensor, q: Tensor, drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Block verification: for each prefix length ``i = 1..d`` the probability ``h`` [d] that it passes its own
    test, and the weights ``w`` [d + 1] (``w[0] = 1``) that enter its residual. The longest passing prefix stands.
    """
    weights = [p.new_ones(())]
    passes = []
    for i, token in enumerate(drafts):
        weights.append((weights[-1] * p[i, token] / q[i, token]).clamp(max=1.0))
        if i + 1 == len(drafts):
            passes.append(weights[-1])
        else:
            left = (weights[-1] * p[i + 1] - q[i + 1]).clamp(min=0).sum()
            room = left + 1 - weights[-1]
            passes.append(torch.where(room > 0, left / room, weights[-1]))
    return torch.stack(passes), torch.stack(weights)


def residual(p: Tensor, q: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """``max(weight * p - q, 0)`` [vocab], not normalised; ``p`` itself where nothing is left."""
    left = (weight * p - q).clamp(min=0)
    return torch.where(left.sum() > 0, left, p)


def one_hot(drafts: Sequence[int], like: Tensor) -> Tensor:
    """The proposal of greedy drafts, [d, vocab]; a placeholder proposes nothing."""
    q = like.new_zeros(len(drafts), like.shape[-1])
    for i, token in enumerate(drafts):
        if token != PLACEHOLDER:
            q[i, token] = 1.0
    return q


def verify_drafts(
    target: Tensor,
    drafts: Sequence[int],
    rejection: Rejection,
    *,
    greedy: bool,
    seed: int,
    position: int,
    proposal: Tensor | None = None,
) -> list[int]:
    """The emitted tokens, between 1 and ``d + 1``: accepted drafts, then one of the target's.

    ``target`` [d + 1, vocab]: logits after temperature, filters and penalties (greedy: any whose argmax counts).
    ``proposal`` [d, vocab]: probabilities the drafts were sampled from; None where they were chosen greedily.
    ``position``: of the first row's token. Noise depends on ``seed``, position and token only (``seed``: int64).
    """
    count = _usable(drafts)
    best = target.argmax(-1).tolist()
    chance = rejection.method == "synthetic" or not greedy
    u = _uniforms(seed, position, len(drafts)) if drafts and chance else []
    if rejection.method == "synthetic":
        if len(drafts) > len(rejection.rates):
            raise ValueError(f"{len(drafts)} drafts, but acceptance rates for {len(rejection.rates)}")
        kept = 0
        while kept < count and u[kept] < rejection.conditional(kept):
            kept += 1
    elif greedy:
        kept = 0
        while kept < count and best[kept] == drafts[kept]:
            kept += 1
    if greedy:
        return [*drafts[:kept], best[kept]]
    p = target.double().softmax(-1)
    q = one_hot(drafts, p) if proposal is None else proposal.double()
    weight: Tensor | float = 1.0
    if rejection.method == "standard":
        accept = standard_acceptance(p, q, drafts[:count]).tolist()
        kept = 0
        while kept < count and u[kept] < accept[kept]:
            kept += 1
    elif rejection.method == "block" and count:
        passes, weights = block_acceptance(p, q, drafts[:count])
        kept = max((i + 1 for i in range(count) if u[i] < float(passes[i])), default=0)
        weight = weights[kept]
    elif rejection.method == "block":
        kept = 0
    # Behind the last usable draft there is nothing to correct for.
    left = p[kept] if kept == count else residual(p[kept], q[kept], weight)
    noise = gumbel(torch.tensor([seed]), torch.tensor([position + kept]), p.shape[-1], STREAM_SAMPLE)[0]
    return [*drafts[:kept], int((left.log() + noise.to(left.device)).argmax())]


def _usable(drafts: Sequence[int]) -> int:
    return next((i for i, token in enumerate(drafts) if token == PLACEHOLDER), len(drafts))


def _uniforms(seed: int, position: int, count: int) -> list[float]:
    positions = torch.arange(position, position + count)
    zeros = torch.zeros_like(positions)
    return [float(x) for x in uniform(zeros + seed, positions, zeros, STREAM_ACCEPT).tolist()]
