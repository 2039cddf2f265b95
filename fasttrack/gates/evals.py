"""Rungs (a) and (b): forced logits and routing, each arm's error against a higher-precision oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, group_by, select, units_of
from fasttrack.gates.evals_coverage import coverage, is_far, longest_context, untouched
from fasttrack.gates.primaries import Primary, conclude, ratio_of_totals
from fasttrack.records import CellKey, FidelityRecord, NotMeasuredRecord, RoutingRecord, StepRecord

#: A KL divergence below this, per position, is rounding of the FP64 sum itself, in nats.
KL_FLOOR = 1e-15
#: Standard deviation of the log ratio of two half-normal errors of one scale: of a sequence whose positions all err
#: alike. Honest sequences average over positions and scatter far less.
LARGEST_SPREAD = math.pi / 2
#: One choice in so many may fall the other way by rounding alone, even where stock happened to have none.
TIES = 1 / 500
#: A group's scatter is taken from the sequences outside of it where there are so many.
ENOUGH_OTHERS = 8
Pairs = list[tuple[Any, Any]]


def fidelity(scope: Scope, records: Sequence[Any]) -> GateResult:
    """err(optimized) <= (1 + m) err(stock), both against the oracle, per step kind and context bucket.

    The error of a position is the square root of its KL divergence, which is linear in the error of the logits.
    Arms are compared by the mean log ratio over a sequence's positions, with a t bound over sequences of all
    deployments; a breach is looked for in every deployment by itself, and in its sequences of one batch size, of far
    contexts, and of requests that took over from others. What was not covered is not passed.
    """
    from fasttrack.stats.paired import t_bounds  # scipy takes half a second, and listing gates must not

    name = "evals.fidelity"
    found = select(records, FidelityRecord)
    if not found:
        return nothing_measured(name, records, ("fidelity", "fidelity-exact"), "No sequence was teacher-forced")
    primaries, broken, unsure, numbers = list[Primary](), list[str](), list[str](), list[Number]()
    for key, own in group_by(found, _bucket).items():
        exact, margins = own[0].exact, scope.manifest.margins
        limit = 1 + (margins.fidelity_exact if exact else margins.fidelity)
        pairs, lonely = paired(own)
        if lonely:
            unsure.append(f"{key}: {lonely} sequences in one arm only")
        if not pairs:
            continue
        bounds = t_bounds([_log_ratio(a, b) for a, b in pairs])
        numbers.append(
            Number(
                f"error ratio {key}",
                math.exp(bounds.mean),
                f"optimized / stock, 95 % upper bound {_exp(bounds.upper):.4g}, {bounds.n} sequences",
                f"bound <= {limit:.4g}",
            )
        )
        numbers += _described(key, pairs)
        inside = bounds.upper <= math.log(limit)
        text = f"{key}: {math.exp(bounds.mean):.3g} times stock's error, bound {_exp(bounds.upper):.3g}"
        primaries.append(Primary(inside, None, text))
        for deployment, part in group_by(pairs, lambda pair: deployment_of(pair[0].cell)).items():
            ratios = [_log_ratio(a, b) for a, b in part]
            where = f"{key} {deployment}"
            text = f"{where}: {math.exp(sum(ratios) / len(ratios)):.3g} times stock's error"
            primaries.append(Primary(True, _breach(ratios, math.log(limit)), text))
            broken += _broken(where, part, 1 + margins.fidelity)
            primaries += _groups(scope, records, where, part, pairs, limit)
        covered, gaps = coverage(scope, records, own)
        numbers += [replace(n, name=f"{n.name} {key}") for n in covered]
        unsure += [*(f"{key}: {gap}" for gap in gaps), *vacuous(records, pairs)]
    unsure += untouched(scope, found)
    most = 1 + scope.manifest.margins.fidelity
    passed = f"The optimised arm's error to the oracle is at most {most:.3g} times stock's own"
    return conclude(
        name, primaries, numbers=numbers, passed=passed, failed="Less faithful than stock", broken=broken, unsure=unsure
    )


def routing(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Sets of experts unlike the oracle's: at most (1 + m) times as often as in stock, per step kind and bucket.

    A rate below :data:`TIES`, with its own 95 % bound, passes whatever stock's is, and is no breach.
    """
    name = "evals.routing"
    found = select(records, RoutingRecord)
    if not found:
        return nothing_measured(name, records, ("fidelity", "fidelity-exact"), "The engine tells no chosen experts")
    limit = 1 + scope.manifest.margins.routing
    primaries, unsure, numbers = list[Primary](), list[str](), list[Number]()
    for key, own in group_by(found, _bucket).items():
        pairs, lonely = paired(own)
        if lonely:
            unsure.append(f"{key}: {lonely} sequences in one arm only")
        if not pairs:
            continue
        for where, part, judged in (
            (key, pairs, True),
            *((f"{key} {d}", p, False) for d, p in group_by(pairs, lambda pair: deployment_of(pair[0].cell)).items()),
        ):
            differ = [a.sets_differ for a, _ in part], [b.sets_differ for _, b in part]
            seen = ratio_of_totals(*differ, limit, ([a.choices for a, _ in part], [b.choices for _, b in part]))
            choices = sum(b.choices for _, b in part)
            few, p_few = _rare(sum(differ[1]), choices)
            text = f"{where}: {sum(differ[1])} of {choices} sets of experts unlike the oracle's, stock {sum(differ[0])}"
            inside, p = seen.inside or few or not judged, None if judged else max(seen.p, p_few)
            primaries.append(Primary(inside, p, text))
            if judged:
                worst = _worst_layer([b for _, b in part])
                counted = f"{sum(differ[1])} of {choices} choices, stock {sum(differ[0])}"
                unit = f"optimized / stock, 95 % upper bound {seen.upper:.4g}, {counted}{worst}"
                allowed = f"bound <= {limit:.4g}, or a rate bounded by {TIES:.2g}"
                numbers.append(Number(f"expert sets unlike the oracle's {key}", seen.ratio, unit, allowed))
        unsure += vacuous(records, pairs)
    passed = f"Experts differ from the oracle's at most {limit:.3g} times as often as in stock"
    failed = "Other experts than stock chooses"
    return conclude(name, primaries, numbers=numbers, passed=passed, failed=failed, unsure=unsure)


def _rare(events: int, choices: int) -> tuple[bool, float]:
    """Whether the rate's 95 % bound is below :data:`TIES`, and the p-value of its being above."""
    from scipy.stats import chi2, poisson

    upper = float(chi2.ppf(0.95, 2 * (events + 1))) / 2
    return upper <= TIES * choices, float(poisson.sf(events - 1, TIES * choices))


def paired(records: Sequence[Any]) -> tuple[Pairs, int]:
    """(stock, optimised) records of the same unit, batch size and sequence, and how many have no partner."""
    by_arm: dict[str, dict[Any, Any]] = {"stock": {}, "optimized": {}}
    for record in records:
        if record.arm in by_arm:
            by_arm[record.arm][record.unit, str(record.cell), record.sequence] = record
    stock, optimized = by_arm["stock"], by_arm["optimized"]
    return [(stock[k], optimized[k]) for k in stock if k in optimized], len(stock.keys() ^ optimized.keys())


def _bucket(record: Any) -> str:
    cell = record.cell
    step, context = (cell.step, cell.context) if cell else ("decode", "")
    return f"{step}/{context}" + ("/exact" if record.exact else "")


def deployment_of(cell: CellKey | None) -> str:
    return f"tp{cell.tp}/dl{cell.draft_length}/dcp{cell.dcp}" if cell else "any"


def _log_ratio(stock: FidelityRecord, optimised: FidelityRecord) -> float:
    """Mean log ratio of the positions' errors; of the whole sequence's where positions were not recorded."""
    if not math.isfinite(optimised.kl_sum):
        return math.log(1e9)
    if stock.log_error_sum is not None and optimised.log_error_sum is not None:
        return (optimised.log_error_sum - stock.log_error_sum) / max(1, stock.positions)
    floor = KL_FLOOR * max(1, stock.positions)
    return 0.5 * math.log((optimised.kl_sum + floor) / (stock.kl_sum + floor))


def _breach(ratios: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the mean log ratio is at most ``limit``": the smaller of two, doubled.

    A t test sees small breaches in many sequences. In a few it is lost when a gross one scatters, since it takes the
    scatter from what it is to judge; a normal test with :data:`LARGEST_SPREAD` is not.
    """
    from scipy.stats import norm, t

    n, mean = len(ratios), sum(ratios) / len(ratios)
    gross = float(norm.sf((mean - limit) * math.sqrt(n) / LARGEST_SPREAD))
    if n < 2:
        return min(1.0, 2 * gross)
    error = math.sqrt(sum((r - mean) ** 2 for r in ratios) / (n - 1) / n)
    fine = float(t.sf((mean - limit) / error, n - 1)) if error > 0 else float(mean <= limit)
    return min(1.0, 2 * fine, 2 * gross)


def _groups(
    scope: Scope, records: Sequence[Any], where: str, part: Pairs, everyone: Pairs, limit: float
) -> list[Primary]:
    """A deployment's sequences of one batch size, of far contexts, and that took over from others: what is wrong
    there alone is lost in the mean of all."""
    longest = longest_context(scope, [r for r in records if r.unit in {b.unit for _, b in part}], part[0][0].cell)
    groups = {f"{n} requests": group for n, group in group_by(part, lambda pair: pair[1].cell.requests).items()}
    groups["far contexts"] = [pair for pair in part if is_far(scope, pair[1], longest)]
    groups["after others"] = [pair for pair in part if pair[1].late]
    found = []
    for name, group in groups.items():
        if not 0 < len(group) < len(everyone):
            continue
        inside = {id(b) for _, b in group}
        ratios = [_log_ratio(a, b) for a, b in group]
        others = [_log_ratio(a, b) for a, b in everyone if id(b) not in inside]
        text = f"{where} {name}: {math.exp(sum(ratios) / len(ratios)):.3g} times stock's error"
        found.append(Primary(True, _group_breach(ratios, others, math.log(limit)), text))
    return found


def _group_breach(ratios: Sequence[float], others: Sequence[float], limit: float) -> float:
    """One-sided p-value of "the mean log ratio is at most ``limit``" of a few sequences among many.

    Their largest is left out: one tie that fell the other way is no property of the group. A third test takes the
    scatter from the other sequences, as a group is too small to tell its own.
    """
    from scipy.stats import t

    kept = sorted(ratios)[: max(1, len(ratios) - 1)]
    p = _breach(kept, limit)
    if len(ratios) < 2 or len(others) < ENOUGH_OTHERS:
        return p
    mean = sum(others) / len(others)
    spread = math.sqrt(sum((r - mean) ** 2 for r in others) / (len(others) - 1))
    above = sum(kept) / len(kept) - limit
    if spread == 0:
        return float(p if above <= 0 else 0.0)
    return min(1.0, 1.5 * min(p, 2 * float(t.sf(above * math.sqrt(len(kept)) / spread, len(others) - 1))))


def _broken(where: str, pairs: Pairs, slack: float) -> list[str]:
    """What no statistics excuse: numbers that are none, and best tokens lost that no rounding explains.

    Two log-probabilities that are each off by no more than ``slack`` times stock's largest error swap only across
    gaps of twice that.
    """
    nonfinite = sum(b.nonfinite for _, b in pairs) - sum(a.nonfinite for a, _ in pairs)
    texts = [f"{where}: {nonfinite} non-finite log-probabilities"] if nonfinite > 0 else []
    # Where hardly anything rounds, one tie that fell the other way is larger than all other errors.
    largest = [a.largest_error for a, _ in pairs if a.largest_error is not None and not a.exact]
    widest = max(b.largest_flip for _, b in pairs)
    if largest and widest > 2 * slack * max(largest):
        texts.append(
            f"{where}: the best token lost across a gap of {widest:.3g} nats, stock errs by {max(largest):.3g}"
        )
    return texts


def _described(key: str, pairs: Pairs) -> list[Number]:
    positions = sum(b.positions for _, b in pairs)
    sums = [[sum(getattr(r, field) for r in arm) for field in _SUMS] for arm in zip(*pairs, strict=True)]
    texts = ("KL divergence", "error of the forced token's log-probability", "top-1 flips", "near ties among them")
    units = ("nats a token", "nats a token", "a token", "a token")
    return [
        Number(f"{text} {key}", other / positions, f"{unit}, stock {one / positions:.4g}", "")
        for text, unit, one, other in zip(texts, units, *sums, strict=True)
    ]


_SUMS = ("kl_sum", "abs_error_sum", "top1_flips", "near_ties")


def _worst_layer(records: Sequence[RoutingRecord]) -> str:
    layers: dict[int, int] = {}
    for record in records:
        for layer, count in record.layers.items():
            layers[layer] = layers.get(layer, 0) + count
    return f", most in layer {max(layers, key=lambda layer: layers[layer])}" if layers else ""


def vacuous(records: Sequence[Any], pairs: Pairs) -> list[str]:
    """Why the sequences do not speak about the optimised path; empty when they do."""
    reasons = []
    for unit in dict.fromkeys(b.unit for _, b in pairs):
        steps = [s for s in select(units_of(records, unit), StepRecord, arm="optimized") if s.kind != "prefill"]
        pure = [s for s in steps if s.kind in ("decode", "verify")]
        stock = [s for s in pure if s.path != "specialized"]
        if not pure:
            reasons.append(f"{unit}: no step of the optimised arm was recorded")
        elif stock:
            reasons.append(f"{unit}: {len(stock)} of {len(pure)} pure decode steps ran stock")
    return reasons


def nothing_measured(gate: str, records: Sequence[Any], what: Sequence[str], reason: str) -> GateResult:
    said = [r.reason for r in select(records, NotMeasuredRecord) if r.what in what]
    text = f"{reason}: {said[0]}" if said else reason
    return GateResult(gate=gate, verdict="not_run", reason=f"{text.rstrip('.')}.")


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
