"""What an evaluation can see, before it runs: simulated probabilities of passing under stated assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fasttrack.stats.paired import Estimand, score_z

Z95 = 1.6448536269514722


@dataclass(frozen=True)
class Design:
    """One task as it will be run, with what is assumed of it.

    Stock answers question ``i`` with probability p_i ~ Beta(mean * c, (1 - mean) * c), c = ``concentration``
    (small = questions are either easy or hopeless). The optimised arm has p_i scaled so that the mean falls
    by ``drop``. ``coupled`` is the share of run pairs whose two arms draw the same random number: 1 for a
    temperature of 0 with hardly any divergence, 0 for independent sampling (the safe assumption).
    """

    questions: int
    repeats: int
    mean: float
    margin: float  #: in score units, 0.02 = two points
    estimand: Estimand = "population"
    concentration: float = 2.0
    coupled: float = 0.0

    def draw(self, drop: float, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Run-level differences, [draws, questions, repeats]."""
        shape = (draws, self.questions, self.repeats)
        alpha, beta = self.mean * self.concentration, (1 - self.mean) * self.concentration
        chance = rng.beta(alpha, beta, size=(draws, self.questions, 1))
        lowered = np.clip(chance * (1 - drop / self.mean), 0, 1)
        first = rng.random(shape, dtype=np.float32)
        second = np.where(
            rng.random(shape, dtype=np.float32) < self.coupled, first, rng.random(shape, dtype=np.float32)
        )
        return (second < lowered).astype(np.float64) - (first < chance)


def passes(runs: NDArray[np.float64], margin: float, estimand: Estimand) -> bool:
    """Whether [questions, repeats] differences pass: the lower bound lies above -margin."""
    deltas = runs.mean(axis=1) if estimand == "population" else runs.ravel()
    return score_z(deltas, -margin) > Z95


def pass_probability(design: Design, drop: float, *, draws: int = 1000, seed: int = 0) -> float:
    """Probability that the task's bound lies inside its margin when the true mean drop is ``drop``."""
    rng = np.random.default_rng(seed)
    chunk = max(1, min(draws, int(2e6 // (design.questions * design.repeats))))
    passed = done = 0
    while done < draws:
        count = min(chunk, draws - done)
        runs = design.draw(drop, count, rng)
        passed += sum(passes(one, design.margin, design.estimand) for one in runs)
        done += count
    return passed / draws


def joint_pass_probability(designs: Sequence[Design], drop: float, *, draws: int = 1000, seed: int = 0) -> float:
    """Probability that every task passes; tasks are independent of each other, so it is the product."""
    return math.prod(pass_probability(d, drop, draws=draws, seed=seed + i) for i, d in enumerate(designs))


def repeats_needed(
    design: Design, *, power: float = 0.9, most: int = 256, draws: int = 500, seed: int = 0
) -> int | None:
    """Fewest repeats (powers of two, then halving) that pass an unchanged model with probability ``power``.

    None when ``most`` repeats do not suffice: under the population estimand the number of questions limits
    what can be seen, whatever the repeats.
    """
    low, high = 0, 1
    while pass_probability(replace(design, repeats=high), 0.0, draws=draws, seed=seed) < power:
        low, high = high, high * 2
        if high > most:
            return None
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        enough = pass_probability(replace(design, repeats=middle), 0.0, draws=draws, seed=seed) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high
