"""Free-running text and acceptance on made-up records."""

import random

import pytest
from harness import toy_scope

from fasttrack.gates import GATES
from fasttrack.gates.evals_text import drop_of_proportions, wilson
from fasttrack.gates.primaries import Primary, conclude, ratio_of_totals
from fasttrack.records import AcceptanceRecord, CellKey, Evidence, FreeRunRecord, StepRecord

PROOF = Evidence(kind="emulated")
CELL = CellKey(step="decode", tp=2, requests=4)
UNIT = "evals/free_running/decode/tp2"
STEP = StepRecord(
    unit=UNIT,
    arm="optimized",
    evidence=PROOF,
    run="r",
    index=1,
    kind="decode",
    requests=4,
    rows=4,
    padded_rows=0,
    draft_length=0,
    tp=2,
    dcp=1,
    context_max=9,
    path="specialized",
    reason=None,
    ops={},
)


def texts(hazards, n=200, tokens=40, **flags):
    """Texts that leave the reference's with these chances per token; ``flags`` set a field for 30 optimised texts."""
    rng, records = random.Random(5), [STEP]
    for arm, hazard in zip(("stock", "optimized"), hazards, strict=True):
        for i in range(n):
            agreed = next((t for t in range(tokens) if rng.random() < hazard), tokens)
            own = {"repetitive": False, "truncated": True, "nonfinite": 0}
            own |= flags if arm == "optimized" and i < 30 else {}
            records.append(
                FreeRunRecord(
                    unit=UNIT,
                    arm=arm,
                    cell=CELL,
                    evidence=PROOF,
                    batch="0",
                    request=f"r{i}",
                    reference="oracle",
                    tokens=tokens,
                    agreed=agreed,
                    diverged=agreed < tokens,
                    **own,
                )
            )
    return records


@pytest.mark.parametrize(
    ("records", "expected", "word"),
    [
        (texts((0.02, 0.02)), "pass", "1.5"),
        (texts((0.02, 0.001)), "pass", "1.5"),
        (texts((0.02, 0.06)), "fail", "times stock's rate of leaving the oracle's text"),
        (texts((0.02, 0.02), n=12), "inconclusive", "bound 18.4"),
        (texts((0.0, 0.0)), "pass", "1.5"),
        (texts((0.0, 0.05)), "fail", "inf times"),
        (texts((0.02, 0.02), repetitive=True), "fail", "repetitive texts rise by 15 points"),
        (texts((0.02, 0.02), truncated=False), "pass", "1.5"),
        (texts((0.02, 0.02), nonfinite=1), "fail", "30 non-finite"),
        (texts((0.02, 0.02))[1:], "inconclusive", "no step"),
        (texts((0.02, 0.02))[:-1], "inconclusive", "one arm only"),
        ([], "not_run", "No text"),
    ],
)
def test_free_running(records, expected, word):
    result = GATES["evals.free_running"](toy_scope(), records)
    assert result.verdict == expected, result.reason
    assert word in result.reason


def drafts(stock, optimized, mode="measured", offered=4000):
    cell = CellKey(step="verify", tp=2, requests=4, draft_length=len(stock))
    return [
        AcceptanceRecord(
            unit="evals/acceptance/x",
            arm=arm,
            cell=cell,
            evidence=PROOF,
            mode=mode,
            position=position,
            offered=offered,
            stood=round(share * offered),
        )
        for arm, shares in (("stock", stock), ("optimized", optimized))
        for position, share in enumerate(shares, start=1)
    ]


@pytest.mark.parametrize(
    ("records", "expected", "word"),
    [
        (drafts([0.8, 0.6], [0.8, 0.6]), "pass", "2 points"),
        (drafts([0.8, 0.6], [0.85, 0.62]), "pass", "2 points"),
        (drafts([0.8, 0.6], [0.8, 0.5]), "fail", "position 2 stand 10 points less often"),
        (drafts([0.8, 0.6], [0.8, 0.6], offered=100), "inconclusive", "position"),
        (drafts([0.8], [0.8])[:1], "inconclusive", "one arm only"),
        ([*drafts([0.8], [0.8]), *drafts([0.8], [0.5], mode="synthetic(3)")], "pass", "2 points"),
        ([], "not_run", "No draft"),
    ],
)
def test_acceptance(records, expected, word):
    result = GATES["evals.acceptance"](toy_scope(), records)
    assert result.verdict == expected, result.reason
    assert word in result.reason


def test_measured_and_synthetic_acceptance_are_listed_apart():
    numbers = GATES["evals.acceptance"](
        toy_scope(), [*drafts([0.8], [0.8]), *drafts([0.5], [0.5], mode="synthetic(3)")]
    ).numbers
    lengths = {n.unit.split(", ")[1]: n.value for n in numbers if n.name.startswith("acceptance length")}
    assert lengths == {"measured": pytest.approx(1.8), "synthetic(3)": pytest.approx(1.5)}


def test_wilson_against_a_published_example():
    """Newcombe 1998, table I: 81 of 263, 95 % two-sided: 0.2553 to 0.3662; 0 of 20: 0 to 0.1611."""
    assert wilson(81, 263, 1.959964) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20, 1.959964) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_drop_of_proportions_against_a_published_example():
    """Newcombe 1998, method 10, 56/70 and 48/80: the difference 0.2 has two-sided 95 % limits 0.0524 and 0.3339."""
    from scipy.stats import norm

    drop, upper, p = drop_of_proportions((56, 70), (48, 80), 0.0)
    z = norm.ppf(0.95)
    expected = 0.2 + ((wilson(56, 70, z)[1] - 0.8) ** 2 + (0.6 - wilson(48, 80, z)[0]) ** 2) ** 0.5
    assert (drop, upper) == (pytest.approx(0.2), pytest.approx(expected))
    assert 0.3 < upper < 0.3339
    assert p < 0.01


def test_ratio_of_totals_covers_its_truth():
    """Paired Poisson counts: the one-sided 95 % bound lies below a true ratio of 1.5 in about 5 % of the draws."""
    import numpy as np

    rng, below = np.random.default_rng(0), 0
    for _ in range(1000):
        level = rng.gamma(2.0, 3.0, size=80)  # clusters differ, and move both arms alike
        stock, other = rng.poisson(level), rng.poisson(1.5 * level)
        ones = [1.0] * 80
        below += ratio_of_totals(stock.tolist(), other.tolist(), 1.5, (ones, ones)).upper < 1.5
    assert 0.03 < below / 1000 < 0.075


def test_conclusions():
    def verdict(*primaries, **more):
        return conclude("g", primaries, numbers=[], passed="fine", failed="bad", **more).verdict

    assert verdict(Primary(True, 0.9, "a"), Primary(True, None, "b")) == "pass"
    assert verdict(Primary(True, 0.9, "a"), Primary(False, 0.9, "b")) == "inconclusive"
    assert verdict(Primary(True, 0.9, "a"), unsure=["c"]) == "inconclusive"
    assert verdict(Primary(True, 0.9, "a"), unsure=["c"], broken=["d"]) == "fail"
    assert verdict(Primary(False, 0.04, "a")) == "fail"
    assert verdict(*[Primary(False, 0.04, "a")] * 2) == "inconclusive"  # neither reaches half of 0.05
    assert verdict(*[Primary(False, 0.02, "a")] * 2) == "fail"
