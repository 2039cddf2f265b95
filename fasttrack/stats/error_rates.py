"""How often the gates are wrong, by simulation: ``python -m fasttrack.stats.error_rates --write docs/error_rates.md``.

The generator here knows nothing of the planner's model (:mod:`fasttrack.stats.power`): questions have abilities, an
optimised arm that harms and helps them symmetrically by noise, and a true drop that is either spread over all
questions or sits in a few that are lost altogether (the case that fools a t interval).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasttrack.stats.many import score_z_many, tally
from fasttrack.stats.paired import Estimand, PairedScores, score_z
from fasttrack.stats.power import Design, joint_odds, pass_probability

Array = NDArray[np.float64]
Z95 = 1.6448536269514722
MARGIN = 0.02
ABILITY_SPREAD = 2.0  #: abilities are Beta(2 mean, 2 (1 - mean)): many easy questions, some hopeless ones


@dataclass(frozen=True)
class World:
    """One cell of the simulation. ``discordance`` counts runs in which the arms differ, the drop's share included."""

    questions: int
    repeats: int
    mean: float
    discordance: float
    drop: float = MARGIN
    pattern: str = "spread"  #: or "broken": a share of the questions is lost altogether
    estimand: Estimand = "population"

    def chances(self, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """P(harm) and P(gain) per question, [draws, questions]; their mean difference is exactly ``drop``.

        Under the population estimand that is the mean over abilities; under benchmark that of every draw.
        """
        shape = (draws, self.questions)
        ability = rng.beta(ABILITY_SPREAD * self.mean, ABILITY_SPREAD * (1 - self.mean), size=shape)
        solved = np.full((draws, 1), self.mean)
        if self.estimand == "benchmark":
            solved = ability.mean(1, keepdims=True)
        lost = self.drop / solved  # of what stock solves
        spread = ability * (1 - ability)
        noise = max(0.0, self.discordance - self.drop) / 2 * spread / spread.mean()
        noise = np.minimum(noise, np.minimum(ability * np.maximum(0, 1 - lost), 1 - ability))
        if self.pattern == "spread":
            return noise + lost * ability, noise
        if self.estimand == "benchmark":
            # Questions are lost in order until the drop is reached; the last one in part.
            before = ability.cumsum(1) - ability
            share = np.clip((self.drop * self.questions - before) / ability, 0, 1)
        else:
            share = (rng.random(shape) < lost).astype(np.float64)
        return share * ability + (1 - share) * noise, (1 - share) * noise

    def z(self, draws: int, rng: np.random.Generator) -> Array:
        """Score statistics [draws] of the hypothesis "the drop is the margin"."""
        harm, gain = self.chances(draws, rng)
        harmed = rng.binomial(self.repeats, harm)
        gained = rng.binomial(self.repeats - harmed, np.clip(gain / np.maximum(1 - harm, 1e-12), 0, 1))
        if self.estimand == "population":
            return score_z_many(*tally(gained - harmed, self.repeats), -MARGIN)
        lost, won = harmed.sum(1), gained.sum(1)
        counts = np.stack([lost, self.questions * self.repeats - lost - won, won], 1).astype(np.float64)
        return score_z_many(np.array([-1.0, 0.0, 1.0]), counts, -MARGIN)

    def pass_rate(self, draws: int, seed: int = 0) -> float:
        rng = np.random.default_rng([seed, self.questions, self.repeats, round(1000 * self.discordance)])
        chunk = max(1, 4_000_000 // (self.questions * max(1, self.repeats // 4)))
        parts = [self.z(min(chunk, draws - i), rng) > Z95 for i in range(0, draws, chunk)]
        return float(np.concatenate(parts).mean())


def worlds(
    questions: Sequence[int] = (30, 200, 500),
    repeats: Sequence[int] = (1, 8, 32),
    means: Sequence[float] = (0.6, 0.8, 0.95),
    discordances: Sequence[float] = (0.02, 0.05, 0.1),
    patterns: Sequence[str] = ("spread", "broken"),
    estimands: Sequence[Estimand] = ("population", "benchmark"),
) -> Iterator[World]:
    for n, k, mean, discordance, pattern, estimand in itertools.product(
        questions, repeats, means, discordances, patterns, estimands
    ):
        if estimand == "population" or n == min(questions):
            yield World(n, k, mean, discordance, MARGIN, pattern, estimand)


def bernoulli_pass_rate(design: Design, drop: float, draws: int, seed: int = 0) -> float:
    """What the planner predicts, run by run: abilities are drawn, then every answer, then the gate's own bound."""
    rng = np.random.default_rng([seed, 7])
    alpha, beta = design.mean * design.concentration, (1 - design.mean) * design.concentration
    passed = 0
    for _ in range(draws):
        ability = rng.beta(alpha, beta, size=design.questions)
        mean = float(ability.mean()) if design.estimand == "benchmark" else design.mean  # whose drop it is
        shape = (design.questions, design.repeats)
        stock = rng.random(shape) < ability[:, None]
        optimized = rng.random(shape) < (ability * (1 - drop / mean))[:, None]
        scores = PairedScores(stock.astype(np.float64), optimized.astype(np.float64))
        passed += score_z(scores.deltas(design.estimand), -design.margin) > Z95
    return passed / draws


#: The three public sets, with repeats that a serving team could afford.
DESIGNS = {
    "AIME25": Design(30, 64, 0.9, MARGIN, "benchmark"),
    "GPQA-Diamond": Design(198, 32, 0.85, MARGIN),
    "MRCR (200 items)": Design(200, 48, 0.6, MARGIN),
}


def report(draws: int) -> str:
    """The document, as Markdown."""
    start = time.monotonic()
    cells = [(world, world.pass_rate(draws)) for world in worlds()]
    worst_world, worst = max(cells, key=lambda cell: cell[1])
    lines = [
        "# How often the evaluation gates are wrong",
        "",
        f"Made by `python -m fasttrack.stats.error_rates --draws {draws} --write docs/error_rates.md` on "
        f"{time.strftime('%Y-%m-%d', time.gmtime())} (numpy {np.__version__}; simulation, no engine).",
        "",
        "## A drop equal to the margin (2 points) passes at most one time in twenty",
        "",
        f"{draws:,} draws a cell, nominal 5 %. Each entry is the worst over stock means of 60, 80 and 95 %, and over a",
        "drop that is spread over all questions and one that sits in a few questions lost altogether. *Discordance*",
        "is the share of runs in which the arms differ; at 0 % there can be no drop. Repeats of a question share its",
        "ability, so they are correlated. `population`: questions are a sample; `benchmark`: they are all there is.",
        "",
        "| estimand | questions | repeats | 2 % discordance | 5 % | 10 % |",
        "|---|---|---|---|---|---|",
    ]
    for estimand, n, k in dict.fromkeys((w.estimand, w.questions, w.repeats) for w, _ in cells):
        own = [(w, rate) for w, rate in cells if (w.estimand, w.questions, w.repeats) == (estimand, n, k)]
        columns = [max(rate for w, rate in own if w.discordance == d) for d in (0.02, 0.05, 0.1)]
        lines.append(f"| {estimand} | {n} | {k} | " + " | ".join(f"{100 * c:.2f} %" for c in columns) + " |")
    lines += [
        "",
        f"Worst of {len(cells)} cells: {100 * worst:.2f} % ({worst_world.estimand}, {worst_world.questions} questions, "
        f"{worst_world.repeats} repeats, mean {worst_world.mean:g}, discordance {worst_world.discordance:g}, "
        f"drop {worst_world.pattern}).",
        "",
        "## The plan's prediction against answers drawn one by one",
        "",
        "Chance of passing. *Predicted* is what `fasttrack plan` prints, *drawn* is the gate's own bound on simulated",
        f"answers ({draws:,} evaluations an entry).",
        "",
        "| task | questions x repeats | true drop | predicted | drawn |",
        "|---|---|---|---|---|",
    ]
    for name, design in DESIGNS.items():
        for drop in (0.0, 0.01, 0.02, 0.04):
            planned = pass_probability(design, drop, draws=4 * draws)
            drawn = bernoulli_pass_rate(design, drop, draws)
            size = f"{design.questions} x {design.repeats}"
            lines.append(f"| {name} | {size} | {100 * drop:g} points | {100 * planned:.1f} % | {100 * drawn:.1f} % |")
    lines += [
        "",
        "## The joint verdict of these three tasks",
        "",
        "Pass: every task's bound inside its margin. Fail: a breach after Holm's correction. Else inconclusive.",
        "",
        "| true drop, points | pass | fail | inconclusive |",
        "|---|---|---|---|",
    ]
    for drops in JOINT_DROPS:
        chance = joint_odds(list(DESIGNS.values()), drops, draws=4 * draws)
        named = ", ".join(f"{name} {100 * d:g}" for name, d in zip(DESIGNS, drops, strict=True))
        values = (chance.passes, chance.fails, chance.inconclusive)
        lines.append(f"| {named} | " + " | ".join(f"{100 * v:.1f} %" for v in values) + " |")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return "\n".join(lines) + "\n"


JOINT_DROPS = ((0.0, 0.0, 0.0), (0.02, 0.0, 0.0), (0.0, 0.02, 0.0), (0.0, 0.0, 0.02), (0.02,) * 3, (0.04,) * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--write", type=Path, help="file to write; default: print")
    arguments = parser.parse_args()
    text = report(arguments.draws)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
