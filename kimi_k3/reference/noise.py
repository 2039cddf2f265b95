"""Counter-based random numbers: a function of (seed, position, token, stream), never of what ran before.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator vLLM and
the CUDA libraries use. A request's random numbers therefore do not depend on which requests share its step,
on preemption, or on the path that computed the logits. Pure integer tensor arithmetic: same bits on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What the numbers are for; disjoint counters, so no two uses share noise.
STREAM_SAMPLE, STREAM_ACCEPT, STREAM_DRAFT, STREAM_REHEARSAL = 0, 1, 2, 3

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def signed_seed(seed: int) -> int:
    """The low 64 bits of any integer, as int64."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox-4x32. Words are int64 tensors holding 32-bit values; all broadcast together.

    Products of two 32-bit values wrap in int64, which leaves all 64 bits in place.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = STREAM_SAMPLE) -> Tensor:
    """FP64 numbers in the open interval (0, 1): odd multiples of 2^-53, so that neither end is reached.

    ``seeds`` (any int64), ``positions`` and ``tokens`` (non-negative, below 2^32) broadcast together.
    """
    stream_word = torch.full_like(positions, stream)
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    high, low, *_ = philox((tokens, positions, stream_word, torch.zeros_like(positions)), key)
    return ((high << 20) | (low >> 12)).to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, stream: int = STREAM_SAMPLE) -> Tensor:
    """Standard Gumbel noise, FP64 [rows, vocab]: argmax(log p + noise) is a sample of p. Inputs are [rows]."""
    tokens = torch.arange(vocab, dtype=torch.int64, device=seeds.device)
    u = uniform(seeds[:, None], positions[:, None], tokens[None, :], stream)
    return u.log_().neg_().log_().neg_()
