"""One-sided inference on the mean of paired score differences in [-1, 1].

The test is a score test whose variance comes from the nonparametric maximum-likelihood distribution on the
observed values *and the end point of the range*, constrained to the mean under test (empirical likelihood,
Owen 1988). For one binary run per question it is Tango's score test for paired proportions (Statistics in
Medicine 17, 1998); with no discordant pair at all its lower bound is -z^2 / (n + z^2), so that "no difference
seen" in 30 questions never means "no difference".

Two estimands:

- ``population``: the questions are a sample of such questions. The unit is the question, repeats averaged.
- ``benchmark``: these questions are the benchmark and only the runs are random (temperature above 0,
  independent seeds). The unit is the run; pooling runs of unlike questions can only overstate the variance
  (Hoeffding, Annals of Mathematical Statistics 27, 1956), so the bound errs on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binomtest, norm, t

Array = NDArray[np.float64]
Estimand = Literal["population", "benchmark"]


@dataclass(frozen=True)
class PairedScores:
    """Scores of both arms, [questions, repeats], each in [0, 1]. Repeat ``r`` used the same seed in both arms.

    Raises ``ValueError`` for unequal shapes, no question, or a score outside [0, 1].
    """

    stock: Array
    optimized: Array

    def __post_init__(self) -> None:
        if self.stock.shape != self.optimized.shape or self.stock.ndim != 2 or self.stock.size == 0:
            raise ValueError(f"scores must be two equal [questions, repeats] tables, not {self.stock.shape}")
        both = np.stack([self.stock, self.optimized])
        if not np.isfinite(both).all() or both.min() < 0 or both.max() > 1:
            raise ValueError("scores must lie in [0, 1]")

    @property
    def binary(self) -> bool:
        both = np.stack([self.stock, self.optimized])
        return bool(np.isin(both, (0.0, 1.0)).all())

    def deltas(self, estimand: Estimand = "population") -> Array:
        """Optimised minus stock: one value per question, or one per run."""
        runs = self.optimized - self.stock
        return runs.mean(axis=1) if estimand == "population" else runs.ravel()

    def flips(self) -> tuple[int, int]:
        """(harmful, beneficial) runs: how often one arm was right and the other wrong. Description only."""
        runs = self.optimized - self.stock
        return int((runs < 0).sum()), int((runs > 0).sum())


def score_z(deltas: Array, mean0: float) -> float:
    """Standardised distance of the observed mean above ``mean0``, variance under the hypothesis mean = ``mean0``."""
    mean = float(deltas.mean())
    if abs(mean - mean0) < 1e-12:  # equal but for rounding: two points lost out of a hundred questions
        return 0.0
    if mean < mean0:
        return -score_z(-deltas, -mean0)
    variance = _constrained_variance(deltas - mean0, -1.0 - mean0)
    return math.inf if variance <= 0 else (mean - mean0) * math.sqrt(deltas.size / variance)


def _constrained_variance(x: Array, end: float) -> float:
    """Variance of the NPMLE with mean 0 on the points ``x`` (mean above 0) and the unobserved point ``end`` < 0.

    The weights are p_j = 1 / (n (1 + l x_j)) with the Lagrange multiplier l > 0. The end point takes mass
    exactly when the multiplier would exceed -1/end (Karush-Kuhn-Tucker); that always happens when every x > 0.
    """
    if end >= 0:
        return 0.0  # mean0 is the end of the range: any larger mean contradicts it outright
    limit = -1.0 / end
    if x.min() > end and float((x / (1 + limit * x)).sum()) > 0:
        weights = 1.0 / (x.size * (1 + limit * x))
        return float((weights * x * x).sum() + max(0.0, 1.0 - float(weights.sum())) * end * end)
    limit = (1 - 1e-12) * -1.0 / float(x.min())  # the weights stay finite
    multiplier = brentq(lambda m: float((x / (1 + m * x)).sum()), 0.0, limit, xtol=1e-12)
    weights = 1.0 / (x.size * (1 + multiplier * x))
    return float((weights * x * x).sum())


def score_bound(deltas: Array, confidence: float = 0.95) -> float:
    """Lower one-sided confidence bound on the mean difference, by inverting :func:`score_z`."""
    z, mean = float(norm.ppf(confidence)), float(deltas.mean())
    if mean <= -1.0:
        return -1.0

    def excess(mean0: float) -> float:
        return min(score_z(deltas, mean0), 1e6) - z

    return float(brentq(excess, -1.0, mean, xtol=1e-9))


@dataclass(frozen=True)
class Bounds:
    """A mean and its one-sided confidence bounds on either side."""

    n: int
    mean: float
    lower: float
    upper: float


def score_bounds(deltas: Sequence[float], confidence: float = 0.95) -> Bounds:
    """Both one-sided score bounds of paired differences in [-1, 1]."""
    values = np.asarray(deltas, dtype=np.float64)
    lower, upper = score_bound(values, confidence), -score_bound(-values, confidence)
    return Bounds(values.size, float(values.mean()), lower, upper)


def t_bounds(values: Sequence[float], confidence: float = 0.95) -> Bounds:
    """Student-t bounds for unbounded, roughly normal values such as log ratios; infinite for fewer than two."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if data.size < 2:
        return Bounds(data.size, mean, -math.inf, math.inf)
    reach = float(t.ppf(confidence, data.size - 1)) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Bounds(data.size, mean, mean - reach, mean + reach)


def bootstrap_bound(deltas: Array, confidence: float = 0.95, draws: int = 4000, seed: int = 0) -> float:
    """Lower percentile-bootstrap bound over questions. It is blind at zero discordance: never used alone."""
    rng = np.random.default_rng(seed)
    means = deltas[rng.integers(0, deltas.size, size=(draws, deltas.size))].mean(axis=1)
    return float(np.quantile(means, 1 - confidence))


def lower_bound(scores: PairedScores, estimand: Estimand, confidence: float = 0.95) -> float:
    """The bound a gate uses: the score bound; for fuzzy scores also the bootstrap's, whichever is lower."""
    deltas = scores.deltas(estimand)
    bound = score_bound(deltas, confidence)
    return bound if scores.binary else min(bound, bootstrap_bound(scores.deltas("population"), confidence))


def breach_p_value(deltas: Array, margin: float) -> float:
    """One-sided p-value of "the true drop is at most ``margin``": small when the drop is larger."""
    return float(norm.cdf(score_z(deltas, -margin)))


def holm(p_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects at family-wise level ``alpha``."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def mcnemar_exact(harmful: int, beneficial: int) -> float:
    """Two-sided exact McNemar p-value. Description only: a large one is no evidence of equality."""
    total = harmful + beneficial
    return 1.0 if total == 0 else float(binomtest(harmful, total, 0.5).pvalue)
