"""Planned chances against answers drawn one by one, and against what must hold whatever the assumptions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fasttrack.stats import Design, joint_odds, joint_pass_probability, odds, pass_probability, repeats_needed
from fasttrack.stats.error_rates import bernoulli_pass_rate
from fasttrack.stats.power import repeats_for_all

AIME = Design(30, 64, 0.9, 0.02, "benchmark")
GPQA = Design(198, 16, 0.85, 0.02)


def test_thirty_questions_at_eight_repeats_cannot_show_two_points():
    assert pass_probability(replace(AIME, repeats=8), 0.0) < 0.3
    assert pass_probability(replace(AIME, repeats=8, estimand="population"), 0.0) < 0.01
    assert repeats_needed(replace(AIME, estimand="population")) is None  # no number of repeats replaces questions


def test_odds_add_up_and_move_the_right_way():
    at = [odds(GPQA, drop, draws=4000) for drop in (0.0, 0.01, 0.02, 0.04)]
    assert all(o.passes + o.fails + o.inconclusive == pytest.approx(1) for o in at)
    assert [o.passes for o in at] == sorted((o.passes for o in at), reverse=True)
    assert [o.fails for o in at] == sorted(o.fails for o in at)
    assert at[2].passes <= 0.057
    assert at[0].fails <= 0.001
    assert at[3].fails > 0.3


@pytest.mark.parametrize("design", [AIME, GPQA])
def test_repeats_needed_reach_the_power_and_fewer_do_not(design):
    needed = repeats_needed(design, power=0.9)
    assert needed is not None
    assert pass_probability(replace(design, repeats=needed), 0.0, draws=8000) > 0.88
    assert pass_probability(replace(design, repeats=int(0.8 * needed)), 0.0, draws=8000) < 0.89


def test_joint_verdict_of_independent_tasks():
    both, drops = [AIME, GPQA], [0.0, 0.0]
    product = math.prod(pass_probability(d, 0.0, draws=20000) for d in both)
    assert joint_odds(both, drops, draws=20000).passes == pytest.approx(product, abs=0.02)
    assert joint_pass_probability(both, 0.0, draws=20000) == pytest.approx(product, abs=0.02)
    assert joint_odds(both, [0.02, 0.0], draws=20000).passes <= 0.057
    assert joint_odds(both, [0.0, 0.02], draws=20000).passes <= 0.057
    assert joint_odds(both, [0.02, 0.02], draws=20000).fails <= 0.04  # two tasks of three tests each
    assert joint_odds([], []).passes == 1


def test_repeats_for_all_tasks_reach_the_joint_power():
    needed = repeats_for_all([AIME, GPQA], power=0.9)
    assert None not in needed
    better = [replace(d, repeats=k) for d, k in zip([AIME, GPQA], needed, strict=True)]
    assert joint_odds(better, [0.0, 0.0], draws=8000).passes > 0.88


def test_coupled_arms_need_fewer_repeats():
    assert pass_probability(replace(GPQA, coupled=0.9), 0.0) > pass_probability(GPQA, 0.0) + 0.1


def test_the_distribution_of_one_question_has_the_planned_mean_and_variance():
    rng = np.random.default_rng(0)
    values, chances = np.arange(-16, 17) / 16, GPQA._net(0.02)
    ability = rng.beta(0.85 * 2, 0.15 * 2, size=400_000)
    net = (rng.binomial(16, ability * (1 - 0.02 / 0.85)) - rng.binomial(16, ability)) / 16
    assert values @ chances == pytest.approx(-0.02, abs=1e-9)
    assert values**2 @ chances == pytest.approx((net**2).mean(), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("design", [AIME, GPQA, Design(200, 32, 0.6, 0.02), Design(500, 4, 0.95, 0.02)])
@pytest.mark.parametrize("drop", [0.0, 0.01])
def test_planned_power_holds_within_two_points(design, drop):
    planned = pass_probability(design, drop, draws=20_000)
    assert bernoulli_pass_rate(design, drop, draws=4_000) == pytest.approx(planned, abs=0.02 + 0.007)
