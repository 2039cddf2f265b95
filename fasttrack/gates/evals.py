"""Answers are preserved: error against a higher-precision oracle, and paired task scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import GateResult, Number, Scope, Verdict, group_by, select, some, units_of
from fasttrack.records import EvalItemRecord, FidelityRecord, StepRecord

#: A KL divergence below this, per position, is rounding of the FP64 sum itself, in nats.
KL_FLOOR = 1e-15
DEFAULT_TASK_MARGIN = 2.0  #: points of 100


def fidelity(scope: Scope, records: Sequence[Any]) -> GateResult:
    """err(optimized) <= (1 + m) err(stock), both against the oracle, with a 95 % bound over sequences.

    The error of a sequence is the square root of its summed KL divergence, which grows linearly with
    the error of the logits; arms are compared by the mean log ratio over paired sequences.
    """
    from fasttrack.stats.paired import t_bounds  # scipy takes half a second, and listing gates must not

    name = "evals.fidelity"
    found = select(records, FidelityRecord)
    by_cell = group_by(found, lambda r: str(r.cell))
    limit = math.log1p(scope.manifest.margins.fidelity)
    failed, unsure, numbers = list[str](), list[str](), list[Number]()
    for cell, own in by_cell.items():
        stock = {r.sequence: r for r in own if r.arm == "stock"}
        pairs = [(stock[r.sequence], r) for r in own if r.arm == "optimized" and r.sequence in stock]
        if not pairs:
            unsure.append(f"{cell}: no pair of sequences")
            continue
        bounds = t_bounds([_log_ratio(a, b) for a, b in pairs])
        flips = sum(b.top1_flips - b.near_ties for _, b in pairs)
        allowed = sum(a.top1_flips - a.near_ties for a, _ in pairs)
        nonfinite = sum(b.nonfinite for _, b in pairs)
        numbers += [
            Number(
                f"error ratio {cell}",
                math.exp(bounds.mean),
                f"optimized / stock, 95 % upper bound {_exp(bounds.upper):.4g}, {bounds.n} sequences",
                f"bound <= {math.exp(limit):.4g}",
            ),
            Number(
                f"top-1 flips beyond near ties {cell}",
                flips,
                f"of {sum(b.positions for _, b in pairs)}",
                f"<= {allowed}",
            ),
            Number(f"non-finite {cell}", nonfinite, "log-probabilities", "0"),
        ]
        if nonfinite:
            failed.append(f"{cell}: {nonfinite} non-finite log-probabilities")
        elif flips > allowed:
            failed.append(f"{cell}: {flips} top-1 flips beyond near ties, stock {allowed}")
        elif bounds.lower > limit:
            failed.append(f"{cell}: {math.exp(bounds.mean):.3g} times stock's error")
        elif bounds.upper > limit:
            unsure.append(f"{cell}: {math.exp(bounds.mean):.3g} times stock's error, bound {_exp(bounds.upper):.3g}")
        elif vacuous := _not_specialised(records, pairs[0][1].unit):
            unsure.append(f"{cell}: {vacuous}")
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No sequence was teacher-forced.")
    if failed:
        return GateResult(
            gate=name, verdict="fail", reason=f"Less faithful than stock: {some(failed)}.", numbers=numbers
        )
    if unsure:
        return GateResult(gate=name, verdict="inconclusive", reason=f"Not decided: {some(unsure)}.", numbers=numbers)
    reason = f"The optimised arm's error to the oracle is at most {math.exp(limit):.3g} times stock's own."
    return GateResult(gate=name, verdict="pass", reason=reason, numbers=numbers)


def _log_ratio(stock: FidelityRecord, optimised: FidelityRecord) -> float:
    if not math.isfinite(optimised.kl_sum):
        return math.log(1e9)
    floor = KL_FLOOR * max(1, stock.positions)
    return 0.5 * math.log((optimised.kl_sum + floor) / (stock.kl_sum + floor))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _not_specialised(records: Sequence[Any], unit: str) -> str:
    """Why the sequences of ``unit`` do not speak about the optimised path, empty when they do."""
    steps = [s for s in select(units_of(records, unit), StepRecord, arm="optimized") if s.kind in ("decode", "verify")]
    stock = [s for s in steps if s.path != "specialized"]
    if not steps:
        return "no step of the optimised arm was recorded"
    return f"{len(stock)} of {len(steps)} pure decode steps ran stock" if stock else ""


def task_scores(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Per task, the optimised arm loses at most the margin, paired per question, repeats averaged first."""
    name = "evals.task_scores"
    found = select(records, EvalItemRecord)
    if not found:
        return GateResult(gate=name, verdict="not_run", reason="No task was run.")
    verdicts, numbers = dict[str, tuple[Verdict, str]](), list[Number]()
    for task, own in group_by(found, lambda r: r.task).items():
        verdicts[task], described = _task(scope, task, [r for r in own if r.finish_reason != "skipped"])
        numbers += described
        skipped = sum(r.finish_reason == "skipped" for r in own)
        if skipped:
            numbers.append(Number(f"{task} skipped", skipped, "items above the engine's context", ""))
    for task in (t.name for t in scope.manifest.tasks):
        verdicts.setdefault(task, ("inconclusive", f"{task} was not run"))
    order: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
    verdict = next(v for v in order if v in {one for one, _ in verdicts.values()})
    reason = some((text for one, text in verdicts.values() if one == verdict), most=4)
    return GateResult(gate=name, verdict=verdict, reason=reason[:1].upper() + reason[1:] + ".", numbers=numbers)


def _task(scope: Scope, task: str, own: list[EvalItemRecord]) -> tuple[tuple[Verdict, str], list[Number]]:
    from fasttrack.stats.paired import score_bounds

    scores = {
        arm: {
            item: sum(r.score for r in group) / len(group) for item, group in group_by(of_arm, lambda r: r.item).items()
        }
        for arm, of_arm in group_by(own, lambda r: r.arm).items()
    }
    stock, optimised = scores.get("stock", {}), scores.get("optimized", {})
    items = [item for item in stock if item in optimised]
    if not items or len(items) != len(stock) or len(items) != len(optimised):
        what = f"{task}: stock answered {len(stock)} questions, the optimised arm {len(optimised)}, both {len(items)}"
        return ("inconclusive", what), []
    if not any(r.details.get("specialized_steps", 1) for r in own if r.arm == "optimized"):
        return ("inconclusive", f"{task}: no step of the optimised arm ran specialised"), []
    margin = scope.manifest.margins.task_points.get(task, DEFAULT_TASK_MARGIN)
    means = [100 * sum(arm[i] for i in items) / len(items) for arm in (stock, optimised)]
    bounds = score_bounds([optimised[i] - stock[i] for i in items])
    numbers = [
        Number(f"{task} stock", means[0], f"points, {len(items)} questions", ""),
        Number(f"{task} optimized", means[1], f"points, {len(items)} questions", ""),
        Number(
            f"{task} difference",
            100 * bounds.mean,
            f"points, 95 % lower bound {100 * bounds.lower:.3g}",
            f"bound >= -{margin:g}",
        ),
    ]
    for edge, word in ((0.0, "floor"), (100.0, "ceiling")):
        if means == [edge, edge]:
            return (
                "inconclusive",
                f"{task}: both arms score at the {word} ({edge:g}), so no difference could show",
            ), numbers
    if 100 * bounds.lower >= -margin:
        return ("pass", f"{task}: a drop of more than {margin:g} points is excluded"), numbers
    if 100 * bounds.upper < -margin:
        return ("fail", f"{task}: the optimised arm loses more than {margin:g} points"), numbers
    return ("inconclusive", f"{task}: {len(items)} questions cannot exclude a drop of {margin:g} points"), numbers
