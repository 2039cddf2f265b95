"""False passes at a drop equal to the margin, 10,000 draws a cell, over everything the README's table shows."""

import numpy as np
import pytest

from fasttrack.stats import Design, PairedScores, lower_bound, pass_probability
from fasttrack.stats.error_rates import MARGIN, World, report, worlds

#: Three standard errors of a 5 % rate over 10,000 draws above the nominal level.
LIMIT = 0.057


@pytest.mark.slow
@pytest.mark.parametrize("questions", [30, 200, 500])
@pytest.mark.parametrize("estimand", ["population", "benchmark"])
def test_false_pass_rate(questions, estimand):
    repeats = (1, 8, 32) if questions == 30 else (1, 8)
    cells = list(worlds((questions,), repeats, estimands=(estimand,)))
    rates = {cell: cell.pass_rate(10_000) for cell in cells}
    worst = max(rates, key=lambda cell: rates[cell])
    assert rates[worst] <= LIMIT, (worst, rates[worst])


@pytest.mark.parametrize("pattern", ["spread", "broken"])
@pytest.mark.parametrize("estimand", ["population", "benchmark"])
@pytest.mark.parametrize("mean", [0.6, 0.95])
def test_worlds_drop_by_what_they_say(pattern, estimand, mean):
    world = World(200, 8, mean, 0.1, 0.02, pattern, estimand)
    harm, gain = world.chances(4000, np.random.default_rng(1))
    assert (harm >= 0).all()
    assert (gain >= 0).all()
    assert (harm + gain <= 1 + 1e-9).all()
    drops = (harm - gain).mean(1)
    assert drops.mean() == pytest.approx(MARGIN, abs=5e-4)
    if estimand == "benchmark":
        assert drops == pytest.approx(MARGIN, abs=1e-9)
    assert (harm + gain).mean() == pytest.approx(0.1, abs=0.03)


def test_a_smaller_drop_passes_more_often():
    rates = [World(200, 32, 0.8, 0.05, drop).pass_rate(400) for drop in (0.0, 0.01, 0.02, 0.03)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9
    assert rates[3] < 0.01


def test_the_report_is_a_table_of_every_cell():
    text = report(20)
    assert text.count("| population |") == 9
    assert "joint verdict" in text
    assert "AIME25 2, GPQA-Diamond 2" in text


def fuzzy(rng, questions, repeats, drop):
    """Similarity scores between 0 and 1: a question's ability, blurred by every run; the drop scales it."""
    ability = rng.beta(1.2, 0.8, size=(questions, 1))

    def runs(level):
        return np.clip(rng.beta(6 * level + 1e-3, 6 * (1 - level) + 1e-3, size=(questions, repeats)), 0, 1)

    return PairedScores(runs(ability), runs(ability * (1 - drop / 0.6)))


@pytest.mark.slow
def test_false_pass_rate_of_fuzzy_scores():
    rng = np.random.default_rng(3)
    passed = [lower_bound(fuzzy(rng, 100, 4, MARGIN), "population") >= -MARGIN for _ in range(1500)]
    assert np.mean(passed) <= LIMIT + 0.012  # three standard errors of 1,500 draws


@pytest.mark.slow
def test_fuzzy_scores_pass_unchanged_at_least_as_often_as_planned():
    rng = np.random.default_rng(4)
    passed = [lower_bound(fuzzy(rng, 200, 16, 0.0), "population") >= -MARGIN for _ in range(300)]
    planned = pass_probability(Design(200, 16, 0.6, MARGIN), 0.0)
    assert np.mean(passed) > planned - 0.03
