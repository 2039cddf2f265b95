"""From several judged numbers to one verdict.

Pass: every primary's one-sided 95 % bound lies inside its margin. That all of them must is an intersection-union
test, which needs no correction. Fail: at least one breach stands after Holm's correction. Else inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fasttrack.gates.base import GateResult, Number, some

LEVEL = 0.05


@dataclass(frozen=True)
class Primary:
    """``inside``: the bound lies inside the margin. ``p``: small when the margin is exceeded beyond doubt; None where
    no breach is looked for. ``text`` says what was found, for a reason."""

    inside: bool
    p: float | None
    text: str


def conclude(
    gate: str,
    primaries: Sequence[Primary],
    *,
    numbers: list[Number],
    passed: str,
    failed: str,
    broken: Sequence[str] = (),
    unsure: Sequence[str] = (),
) -> GateResult:
    """``broken`` fails whatever the statistics say, ``unsure`` keeps from passing. Sentences end without a stop."""
    from fasttrack.stats.paired import holm

    tested = [(primary.p, primary.text) for primary in primaries if primary.p is not None]
    rejected = holm([p for p, _ in tested], LEVEL)
    fails = [*broken, *(text for (_, text), out in zip(tested, rejected, strict=True) if out)]
    if fails:
        return GateResult(gate=gate, verdict="fail", reason=f"{failed}: {some(fails)}.", numbers=numbers)
    doubts = [*unsure, *(primary.text for primary in primaries if not primary.inside)]
    if doubts:
        return GateResult(gate=gate, verdict="inconclusive", reason=f"Not decided: {some(doubts)}.", numbers=numbers)
    return GateResult(gate=gate, verdict="pass", reason=f"{passed}.", numbers=numbers)


@dataclass(frozen=True)
class LogRatio:
    """A ratio of two totals with its standard error on the log scale; degenerate totals have exact rules."""

    ratio: float
    upper: float  #: one-sided 95 % bound
    inside: bool
    p: float


def ratio_of_totals(
    stock: Sequence[float], optimized: Sequence[float], limit: float, weights: tuple[Sequence[float], Sequence[float]]
) -> LogRatio:
    """Rate of events per exposure in the optimised arm over stock's, over paired clusters.

    ``stock`` and ``optimized`` are events per cluster, ``weights`` the exposures of (stock, optimized). The standard
    error is that of the linearised log ratio over clusters, so pairs that move together cost nothing. Without any
    event in the optimised arm the ratio is 0. Without any in stock, ``k`` events in the other arm are as likely as
    ``k`` tosses of a coin that falls (1 + m) / (2 + m), m the margin: that is their p-value, and no bound exists.
    """
    from scipy.stats import norm

    events = (math.fsum(stock), math.fsum(optimized))
    exposure = (math.fsum(weights[0]), math.fsum(weights[1]))
    if events[1] == 0:
        return LogRatio(0.0, 0.0, True, 1.0)
    if events[0] == 0:
        return LogRatio(math.inf, math.inf, False, (limit / (1 + limit)) ** events[1])
    rates = (events[0] / exposure[0], events[1] / exposure[1])
    parts = [
        (o - rates[1] * wo) / events[1] - (s - rates[0] * ws) / events[0]
        for s, o, ws, wo in zip(stock, optimized, *weights, strict=True)
    ]
    n = len(parts)
    error = math.sqrt(math.fsum(part * part for part in parts) * (n / (n - 1) if n > 1 else math.inf))
    log_ratio = math.log(rates[1] / rates[0])
    upper = math.exp(min(700.0, log_ratio + float(norm.ppf(1 - LEVEL)) * error))
    gap = log_ratio - math.log(limit)
    p = float(norm.sf(gap / error)) if error > 0 else float(gap <= 0)
    return LogRatio(math.exp(log_ratio), upper, upper <= limit, p)
