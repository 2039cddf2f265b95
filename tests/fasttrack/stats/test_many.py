"""The array solver against the scalar one, which was written independently of it."""

import numpy as np
import pytest

from fasttrack.stats import score_z
from fasttrack.stats.many import score_z_many, tally


@pytest.mark.parametrize(
    ("n", "repeats", "harm", "gain"),
    [(30, 1, 0.02, 0), (30, 8, 0.05, 0.03), (200, 8, 0.06, 0.04), (60, 32, 0.3, 0.3), (30, 1, 0, 0), (30, 8, 0, 0.5)],
)
@pytest.mark.parametrize("mean0", [-0.02, 0.0, -0.05, 0.03])
def test_many_draws_at_once_equal_one_at_a_time(n, repeats, harm, gain, mean0):
    rng = np.random.default_rng(n + repeats)
    harmed = rng.binomial(repeats, harm, (40, n))
    net = rng.binomial(repeats - harmed, gain) - harmed
    found = score_z_many(*tally(net, repeats), mean0)
    assert found == pytest.approx([score_z(row / repeats, mean0) for row in net], abs=1e-6)


def test_a_mean_at_the_end_of_the_range_is_contradicted_outright():
    values, counts = tally(np.array([[-1, 0, 0], [-1, -1, -1]]), 1)
    assert score_z_many(values, counts, -1.0).tolist() == [np.inf, 0.0]


def test_tally_counts_every_question_once():
    values, counts = tally(np.array([[-2, 0, 1], [2, 2, 2]]), 2)
    assert values.tolist() == [-1, -0.5, 0, 0.5, 1]
    assert counts.tolist() == [[1, 0, 1, 1, 0], [0, 0, 0, 0, 3]]
