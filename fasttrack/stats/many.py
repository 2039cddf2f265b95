"""The score statistic of many simulated evaluations at once, for power and for error rates.

The same statistic as :func:`fasttrack.stats.paired.score_z`, solved by a bracketed Newton iteration over whole
arrays. Paired differences of ``k`` binary repeats take 2k + 1 values, so a draw is a vector of counts over them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_ITERATIONS = 60


def score_z_many(values: Array, counts: Array, mean0: float) -> Array:
    """Score statistics [draws] of the hypothesis that the mean is ``mean0``.

    ``values`` [S] in [-1, 1] are the possible differences, ``counts`` [draws, S] how often each occurred.
    """
    total = counts.sum(1)
    mean = counts @ values / total
    result = np.zeros(len(counts))
    for sign in (1.0, -1.0):
        side = sign * (mean - mean0) > 0
        if side.any():
            variance = _variance(sign * (values - mean0), counts[side], -1.0 - sign * mean0)
            with np.errstate(divide="ignore"):
                result[side] = (mean[side] - mean0) * np.sqrt(total[side] / variance)
    return result


def _variance(x: Array, counts: Array, end: float) -> Array:
    """Variances [draws] under the likeliest distribution with mean 0 on the observed ``x`` and the point ``end``."""
    draws, total = len(counts), counts.sum(1)
    if end >= 0:
        return np.zeros(draws)
    lowest = np.where(counts > 0, x, np.inf).min(1)
    limit = np.full(draws, -1.0 / end)
    inside = x > end + 1e-12
    at_limit = counts[:, inside] @ (x[inside] / (1 - x[inside] / end))
    massive = (lowest > end + 1e-12) & (at_limit > 0)  # the end point takes mass
    with np.errstate(divide="ignore"):
        high = np.where(lowest < 0, -1.0 / lowest, limit) * (1 - 1e-12)
    multiplier = np.where(massive, limit, 0.5 * high)
    open_ = ~massive
    if open_.any():
        multiplier[open_] = _root(x, counts[open_], high[open_])
    scale = 1 + multiplier[:, None] * x
    weights = np.where(counts > 0, counts / (total[:, None] * np.where(counts > 0, scale, 1.0)), 0.0)
    spare = np.where(massive, np.maximum(0.0, 1.0 - weights.sum(1)), 0.0)
    return weights @ (x * x) + spare * end * end


def _root(x: Array, counts: Array, high: Array) -> Array:
    """The multiplier in (0, high) at which the constrained mean is 0; the slope is negative throughout."""
    low, at = np.zeros(len(counts)), 0.5 * high
    high = high.copy()
    for _ in range(_ITERATIONS):
        ratio = np.where(counts > 0, x / np.where(counts > 0, 1 + at[:, None] * x, 1.0), 0.0)
        value, slope = (counts * ratio).sum(1), -(counts * ratio * ratio).sum(1)
        low, high = np.where(value > 0, at, low), np.where(value > 0, high, at)
        step = at - value / slope
        step = np.where((step > low) & (step < high), step, 0.5 * (low + high))
        if np.abs(step - at).max() < 1e-12:
            break
        at = step
    return at


def tally(net: NDArray[np.int64], repeats: int) -> tuple[Array, Array]:
    """Net gains [draws, questions] in [-repeats, repeats] -> values [2 repeats + 1] and counts [draws, ...]."""
    width = 2 * repeats + 1
    keys = net + repeats + width * np.arange(len(net))[:, None]
    counts = np.bincount(keys.ravel(), minlength=width * len(net)).reshape(len(net), width)
    return np.arange(-repeats, repeats + 1) / repeats, counts.astype(np.float64)
