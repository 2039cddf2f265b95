"""Do two arms sample from the same distributions? A two-sample chi-square test whose power is stated beforehand.

Sampled tokens come as quantiles of stock's own distribution, uniform on [0, 1] where the arm samples what stock
samples (:class:`fasttrack.records.SampledRecord`). They are counted in bins of equal width, and the counts of the two
arms are compared. With ``n`` tokens per arm the non-centrality of the statistic is ``n/2 * sum (p - q)^2 / m`` with
``m = (p + q) / 2``, and by Cauchy and Schwarz at least ``2 n d^2`` wherever the total variation between the binned
distributions is ``d``: so the power stated for ``d`` holds for every such difference, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BINS = 8


@dataclass(frozen=True)
class TwoSample:
    """``power``: probability that a difference of the stated total variation is rejected at the stated level."""

    samples: tuple[int, int]
    statistic: float
    p_value: float
    power: float
    variation: float  #: observed total variation between the binned samples


def bin_counts(quantiles: Sequence[float], bins: int = BINS) -> list[int]:
    """Counts in ``bins`` equal bins of [0, 1]. ValueError for a quantile outside."""
    counts = [0] * bins
    for u in quantiles:
        if not 0.0 <= u <= 1.0:
            raise ValueError(f"quantile {u} is not in [0, 1]")
        counts[min(int(u * bins), bins - 1)] += 1
    return counts


def power(samples: int, variation: float, level: float, bins: int = BINS) -> float:
    """Least probability that a total variation of ``variation`` is seen with ``samples`` tokens per arm."""
    from scipy.stats import chi2, ncx2

    if samples < 1:
        return 0.0
    return float(ncx2.sf(chi2.isf(level, bins - 1), bins - 1, 2 * samples * variation**2))


def samples_needed(variation: float, level: float, wanted: float, bins: int = BINS) -> int:
    """Fewest tokens per arm that see ``variation`` with probability ``wanted`` at ``level``."""
    low, high = 0, 1
    while power(high, variation, level, bins) < wanted:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, variation, level, bins) >= wanted else (middle, high)
    return high


def compare(
    one: Sequence[float], other: Sequence[float], *, variation: float, level: float, bins: int = BINS
) -> TwoSample:
    """Chi-square test of homogeneity on binned quantiles; a bin that both arms leave empty decides nothing."""
    from scipy.stats import chi2

    a, b = bin_counts(one, bins), bin_counts(other, bins)
    n, m = len(one), len(other)
    if not n or not m:
        return TwoSample((n, m), 0.0, 1.0, 0.0, 0.0)
    statistic = 0.0
    used = 0
    for x, y in zip(a, b, strict=True):
        if x + y:
            used += 1
            for seen, size in ((x, n), (y, m)):
                expected = (x + y) * size / (n + m)
                statistic += (seen - expected) ** 2 / expected
    p_value = float(chi2.sf(statistic, used - 1)) if used > 1 else 1.0
    apart = sum(abs(x / n - y / m) for x, y in zip(a, b, strict=True)) / 2
    return TwoSample((n, m), statistic, p_value, power(min(n, m), variation, level, bins), apart)
