"""The two-sample test against simulation: its level, its power, and differences that bins could hide."""

import random

import pytest

from fasttrack.stats.two_sample import BINS, bin_counts, compare, power, samples_needed

N = 500


def uniform(rng, n=N):
    return [rng.random() for _ in range(n)]


def moved(rng, variation, n=N):
    """Uniform but for ``variation`` of the mass, which moved from the last bin and what lies before it to the first."""
    return [rng.random() / BINS if rng.random() < variation / (1 - 1 / BINS) else rng.random() for _ in range(n)]


def rejections(other, level, runs=400):
    rng = random.Random(5)
    return (
        sum(compare(uniform(rng), other(rng), variation=0.2, level=level).p_value < level for _ in range(runs)) / runs
    )


def test_honest_arms_are_rejected_at_the_level():
    assert rejections(uniform, 0.05) == pytest.approx(0.05, abs=0.035)


def test_the_stated_power_is_a_lower_bound():
    """Mass moved into one bin is what the bound allows for least."""
    n, level = samples_needed(0.2, 0.01, 0.9), 0.01
    rng = random.Random(6)
    seen = [
        compare(uniform(rng, n), moved(rng, 0.2, n), variation=0.2, level=level).p_value < level for _ in range(300)
    ]
    assert sum(seen) / len(seen) > 0.87


def test_samples_needed_are_the_fewest():
    n = samples_needed(0.15, 1e-3, 0.9)
    assert power(n, 0.15, 1e-3) >= 0.9 > power(n - 1, 0.15, 1e-3)
    assert samples_needed(0.1, 1e-3, 0.9) > 2 * n * (0.15 / 0.1) ** 2 / 2.1
    assert power(0, 0.2, 0.01) == 0.0


def test_the_observed_variation_and_the_smaller_arm_are_reported():
    test = compare([0.01] * 30, [0.99] * 20, variation=0.2, level=0.01)
    assert (test.variation, test.samples) == (1.0, (30, 20))
    assert test.power == power(20, 0.2, 0.01)
    assert test.p_value < 1e-9


def test_nothing_decides_nothing():
    assert compare([], uniform(random.Random(1)), variation=0.2, level=0.01).power == 0.0
    assert compare([0.5] * 9, [0.5] * 9, variation=0.2, level=0.01).p_value == 1.0


def test_both_ends_belong_to_bins():
    assert bin_counts([0.0, 1.0, 0.999, 0.125], 8) == [1, 1, 0, 0, 0, 0, 0, 2]
    with pytest.raises(ValueError, match=r"1\.5 is not in"):
        bin_counts([1.5])
