"""What an evaluation can see, before it runs: simulated chances of each verdict under stated assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import roots_jacobi
from scipy.stats import norm

from fasttrack.stats.many import score_z_many
from fasttrack.stats.paired import Estimand

Array = NDArray[np.float64]
CONFIDENCE = 0.95
#: The gate looks for three breaches per task: of its score, of cut-off and of unparsed answers. Holm's first step
#: holds the smallest p-value against the level divided by all of them.
TESTS_PER_TASK = 3
_NODES = 60


@dataclass(frozen=True)
class Design:
    """One task as it will be run, with what is assumed of it.

    Stock answers question ``i`` with probability p_i ~ Beta(mean * c, (1 - mean) * c), c = ``concentration``
    (small = questions are either easy or hopeless). The optimised arm has p_i scaled so that the mean falls
    by ``drop``. ``coupled`` is the share of run pairs whose two arms draw the same random number: 1 for a
    temperature of 0 with hardly any divergence, 0 for independent sampling (the safe assumption). Fuzzy scores
    are planned as right-or-wrong ones: no scores of the same mean vary more.
    """

    questions: int
    repeats: int
    mean: float
    margin: float  #: in score units, 0.02 = two points
    estimand: Estimand = "population"
    concentration: float = 2.0
    coupled: float = 0.0

    def chances(self, ability: Array, lost: Array | float) -> tuple[Array, Array]:
        """Per run of questions of these abilities: P(only stock is right), P(only the optimised arm is).

        ``lost`` is the share of its ability that the optimised arm loses.
        """
        other = ability * (1 - np.asarray(lost))
        apart, c = ability - other, self.coupled
        harm = c * np.maximum(apart, 0) + (1 - c) * ability * (1 - other)
        gain = c * np.maximum(-apart, 0) + (1 - c) * other * (1 - ability)
        return harm, gain

    def simulate(self, drop: float, draws: int, seed: int) -> Array:
        """Score statistics [draws] of the hypothesis "the drop is the margin" when it is ``drop``."""
        rng = np.random.default_rng(seed)
        if self.estimand == "population":
            values = np.arange(-self.repeats, self.repeats + 1) / self.repeats
            counts = rng.multinomial(self.questions, self._net(drop), size=draws)
            return score_z_many(values, counts.astype(np.float64), -self.margin)
        # Which benchmark it is, is drawn as well; the drop is that of its own questions.
        size = (draws, self.questions)
        ability = rng.beta(*self._shape, size=size)
        harm, gain = self.chances(ability, drop / np.maximum(ability.mean(1, keepdims=True), drop))
        lost = rng.binomial(self.repeats, harm)
        won = rng.binomial(self.repeats - lost, np.clip(gain / np.maximum(1 - harm, 1e-12), 0, 1)).sum(1)
        runs, lost = self.questions * self.repeats, lost.sum(1)
        return score_z_many(
            np.array([-1.0, 0.0, 1.0]), np.stack([lost, runs - lost - won, won], 1).astype(np.float64), -self.margin
        )

    @property
    def _shape(self) -> tuple[float, float]:
        return self.mean * self.concentration, (1 - self.mean) * self.concentration

    def _net(self, drop: float) -> Array:
        """Distribution [2 repeats + 1] of one question's net gain: the sum over repeats, mixed over abilities."""
        alpha, beta = self._shape
        nodes, weights = roots_jacobi(_NODES, beta - 1, alpha - 1)  # Gauss quadrature of the Beta density
        harm, gain = self.chances((nodes + 1) / 2, min(1.0, drop / self.mean))
        width = 2 * self.repeats + 1
        turn = np.exp(-2j * np.pi * np.arange(width) / width)
        once = harm[:, None] / turn + (1 - harm - gain)[:, None] + gain[:, None] * turn
        mixed = (weights / weights.sum()) @ once**self.repeats
        chances = np.roll(np.fft.ifft(mixed).real, self.repeats).clip(0)
        return np.asarray(chances / chances.sum())


@dataclass(frozen=True)
class Odds:
    """Chances of each verdict; they add up to 1."""

    passes: float
    fails: float

    @property
    def inconclusive(self) -> float:
        return max(0.0, 1 - self.passes - self.fails)


def joint_odds(designs: Sequence[Design], drops: Sequence[float], *, draws: int = 2000, seed: int = 0) -> Odds:
    """Chances of the verdict over all tasks: pass when every bound is inside its margin, fail on a breach.

    A breach is one task's, at the level that Holm's procedure gives the smallest p-value of :data:`TESTS_PER_TASK`
    tests per task. Tasks are independent.
    """
    if not designs:
        return Odds(1.0, 0.0)
    z = np.stack([d.simulate(drop, draws, seed + i) for i, (d, drop) in enumerate(zip(designs, drops, strict=True))])
    passed = (z > norm.ppf(CONFIDENCE)).all(0)
    failed = (z <= norm.ppf((1 - CONFIDENCE) / (TESTS_PER_TASK * len(designs)))).any(0)
    return Odds(float(passed.mean()), float(failed.mean()))


def odds(design: Design, drop: float, *, draws: int = 2000, seed: int = 0) -> Odds:
    """:func:`joint_odds` of one task alone."""
    return joint_odds([design], [drop], draws=draws, seed=seed)


def pass_probability(design: Design, drop: float, *, draws: int = 2000, seed: int = 0) -> float:
    """Probability that the task's bound lies inside its margin when the true mean drop is ``drop``."""
    return odds(design, drop, draws=draws, seed=seed).passes


def joint_pass_probability(designs: Sequence[Design], drop: float, *, draws: int = 2000, seed: int = 0) -> float:
    """Probability that every task passes when each drops by ``drop``: the product, tasks being independent."""
    return math.prod(pass_probability(d, drop, draws=draws, seed=seed + i) for i, d in enumerate(designs))


def repeats_needed(
    design: Design, *, power: float = 0.9, most: int = 512, draws: int = 1000, seed: int = 0
) -> int | None:
    """Fewest repeats, to within a tenth, that pass an unchanged model with probability ``power``.

    None when ``most`` repeats do not suffice: under the population estimand the number of questions limits
    what can be seen, whatever the repeats. That a drop equal to the margin passes at most one time in twenty
    needs no repeats: the bound sees to it.
    """

    def enough(repeats: int) -> bool:
        return pass_probability(replace(design, repeats=repeats), 0.0, draws=draws, seed=seed) >= power

    low, high = 0, 1
    while not enough(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high - low > max(1, high // 10):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def repeats_for_all(designs: Sequence[Design], *, power: float = 0.9, draws: int = 1000) -> list[int | None]:
    """Repeats per task with which all tasks together pass an unchanged model with probability ``power``."""
    each = power ** (1 / max(1, len(designs)))
    return [repeats_needed(d, power=each, draws=draws, seed=i) for i, d in enumerate(designs)]
