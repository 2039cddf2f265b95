"""Rungs (c) and (e): free-running text, and acceptance per draft position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, group_by, select
from fasttrack.gates.evals import deployment_of, nothing_measured, vacuous
from fasttrack.gates.primaries import Primary, conclude, ratio_of_totals
from fasttrack.records import AcceptanceRecord, FreeRunRecord

RATES = ("repetitive", "truncated")


def free_running(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Greedy text leaves the reference's at most (1 + m) times as often per token as stock's does; rates of
    repetitive and cut-off texts rise by at most their margin; no number that is none appears."""
    name = "evals.free_running"
    found = select(records, FreeRunRecord)
    if not found:
        return nothing_measured(name, records, ("free_running",), "No text ran freely")
    margins = scope.manifest.margins
    limit, points = 1 + margins.divergence, margins.rate_points / 100
    primaries, broken, unsure, numbers = list[Primary](), list[str](), list[str](), list[Number]()
    for key, own in group_by(found, lambda r: f"{r.cell.step}/{r.cell.context}" if r.cell else "decode").items():
        pairs, lonely = _pairs(own)
        if lonely:
            unsure.append(f"{key}: {lonely} requests in one arm only")
        if not pairs:
            continue
        judged, described = _divergence(key, pairs, limit)
        primaries.append(Primary(judged.inside, None, judged.text))
        numbers.append(described)
        for deployment, part in group_by(pairs, lambda pair: deployment_of(pair[0].cell)).items():
            judged, _ = _divergence(f"{key} {deployment}", part, limit)
            primaries.append(Primary(True, judged.p, judged.text))
        for rate in RATES:
            judged, described = _rate(key, rate, pairs, points)
            primaries.append(judged)
            numbers.append(described)
        nonfinite = [sum(r.nonfinite for r in arm) for arm in zip(*pairs, strict=True)]
        numbers.append(Number(f"non-finite {key}", nonfinite[1], f"log-probabilities, stock {nonfinite[0]}", "0"))
        if nonfinite[1] > nonfinite[0]:
            broken.append(f"{key}: {nonfinite[1]} non-finite log-probabilities, stock {nonfinite[0]}")
        unsure += vacuous(records, pairs)
    passed = f"Free-running text leaves the reference's at most {limit:.3g} times as often as stock's"
    failed = "Free-running text is worse than stock's"
    return conclude(name, primaries, numbers=numbers, passed=passed, failed=failed, broken=broken, unsure=unsure)


def _pairs(records: Sequence[FreeRunRecord]) -> tuple[list[tuple[FreeRunRecord, FreeRunRecord]], int]:
    by_arm: dict[str, dict[Any, FreeRunRecord]] = {"stock": {}, "optimized": {}}
    for r in records:
        if r.arm in by_arm:
            by_arm[r.arm][r.unit, r.batch, r.request] = r
    stock, optimized = by_arm["stock"], by_arm["optimized"]
    return [(stock[k], optimized[k]) for k in stock if k in optimized], len(stock.keys() ^ optimized.keys())


def _divergence(key: str, pairs: Sequence[tuple[FreeRunRecord, FreeRunRecord]], limit: float) -> tuple[Primary, Number]:
    """Divergences per token at risk: a text is at risk until it has left the reference's."""
    events = [[float(r.diverged) for r in arm] for arm in zip(*pairs, strict=True)]
    risk = [[float(r.agreed + r.diverged) for r in arm] for arm in zip(*pairs, strict=True)]
    seen = ratio_of_totals(events[0], events[1], limit, (risk[0], risk[1]))
    agreed = [sorted(r.agreed for r in arm)[len(pairs) // 2] for arm in zip(*pairs, strict=True)]
    counts = f"{sum(events[1]):g} of {len(pairs)} texts left the reference's, stock {sum(events[0]):g}"
    text = f"{key}: {seen.ratio:.3g} times stock's rate of leaving the {pairs[0][0].reference}'s text ({counts})"
    unit = f"optimized / stock, 95 % upper bound {seen.upper:.4g}, {counts}, median agreement {agreed[1]} / {agreed[0]}"
    return Primary(seen.inside, seen.p, text), Number(f"divergence {key}", seen.ratio, unit, f"bound <= {limit:.4g}")


def _rate(
    key: str, rate: str, pairs: Sequence[tuple[FreeRunRecord, FreeRunRecord]], margin: float
) -> tuple[Primary, Number]:
    import numpy as np

    from fasttrack.stats.paired import breach_p_value, score_bound

    rises = np.array([float(getattr(b, rate)) - float(getattr(a, rate)) for a, b in pairs])
    bound, shares = -score_bound(-rises), [sum(getattr(r, rate) for r in arm) for arm in zip(*pairs, strict=True)]
    text = f"{key}: {rate} texts rise by {100 * rises.mean():.3g} points, bound {100 * bound:.3g}"
    unit = f"of {len(pairs)} texts, stock {shares[0]}, rise's 95 % upper bound {100 * bound:.3g} points"
    number = Number(f"{rate} {key}", shares[1], unit, f"bound <= {100 * margin:g}")
    return Primary(bound <= margin, breach_p_value(-rises, margin), text), number


def acceptance(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Drafts stand at each position as often as in stock, to within the margin. Only measured acceptance is judged.

    Per position: Newcombe's interval for a difference of proportions (Statistics in Medicine 17, 1998), steps taken
    as independent. Acceptance says nothing about correctness; a drop says that the drafter sees other states.
    """
    name = "evals.acceptance"
    found = select(records, AcceptanceRecord)
    if not found:
        return nothing_measured(name, records, ("acceptance",), "No draft was verified")
    margin = scope.manifest.margins.acceptance_points / 100
    primaries, numbers = list[Primary](), list[Number]()
    for (deployment, mode), own in group_by(found, lambda r: (deployment_of(r.cell), r.mode)).items():
        lengths = []
        for position, here in sorted(group_by(own, lambda r: r.position).items()):
            totals = {
                arm: (sum(r.stood for r in part), sum(r.offered for r in part))
                for arm, part in group_by(here, lambda r: r.arm).items()
            }
            if len(totals) < 2 or not all(offered for _, offered in totals.values()):
                primaries.append(Primary(False, None, f"{deployment} {mode}: position {position} in one arm only"))
                continue
            stock, optimized = totals["stock"], totals["optimized"]
            drop, upper, p = drop_of_proportions(stock, optimized, margin)
            lengths.append((stock[0] / stock[1], optimized[0] / optimized[1]))
            text = f"{deployment}: drafts at position {position} stand {100 * drop:.3g} points less often"
            unit = f"of {optimized[1]} drafts, stock {stock[0]} of {stock[1]}, {mode}, drop's bound {100 * upper:.3g}"
            limit = f"bound <= {100 * margin:g} points" if mode == "measured" else ""
            numbers.append(Number(f"acceptance {deployment} position {position}", optimized[0], unit, limit))
            if mode == "measured":
                primaries.append(Primary(upper <= margin, p, text))
        if lengths:
            both = [1 + sum(arm) for arm in zip(*lengths, strict=True)]
            unit = f"tokens a step, {mode}, stock {both[0]:.4g}"
            numbers.append(Number(f"acceptance length {deployment}", both[1], unit, ""))
    passed = f"At every draft position acceptance drops by less than {100 * margin:g} points"
    return conclude(name, primaries, numbers=numbers, passed=passed, failed="Drafts stand less often than in stock")


def wilson(successes: int, trials: int, z: float) -> tuple[float, float]:
    """Wilson's score interval for a proportion."""
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return middle - reach, middle + reach


def drop_of_proportions(
    stock: tuple[int, int], optimized: tuple[int, int], margin: float
) -> tuple[float, float, float]:
    """Drop from ``stock`` to ``optimized`` (successes, trials), its upper 95 % bound, and the p-value of a breach."""
    from scipy.stats import norm

    z = float(norm.ppf(0.95))
    one, other = stock[0] / stock[1], optimized[0] / optimized[1]
    upper = one - other + math.hypot(wilson(*stock, z)[1] - one, other - wilson(*optimized, z)[0])
    # The pooled share keeps the variance away from 0 where an arm accepts everything or nothing.
    shares = [(s + 0.5) / (n + 1) for s, n in (stock, optimized)]
    error = math.sqrt(sum(share * (1 - share) / n for share, n in zip(shares, (stock[1], optimized[1]), strict=True)))
    return one - other, upper, float(norm.sf((one - other - margin) / error))
