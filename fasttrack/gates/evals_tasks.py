"""Rung (d): paired task scores. Repeats are averaged within their question, or pooled where the questions are the
benchmark; two scorers must agree; a score at floor or ceiling in both arms decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fasttrack.gates.base import GateResult, Number, Scope, configuration_differences, group_by, select, some
from fasttrack.gates.primaries import Primary, conclude
from fasttrack.records import EvalItemRecord, EvalTaskRecord, NotMeasuredRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fasttrack.manifest.model import TaskConfig

DEFAULT_TASK_MARGIN = 2.0  #: points of 100
ARMS = ("stock", "optimized")
_OWN = ("unit", "attempt", "arm", "evidence", "type", "schema_version")


def task_margin(scope: Scope, task: str) -> float:
    """Points of 100."""
    return scope.manifest.margins.task_points.get(task, DEFAULT_TASK_MARGIN)


def task_scores(scope: Scope, records: Sequence[Any]) -> GateResult:
    """Per task, the optimised arm loses at most the margin, and cut-off and unparsed answers rise by at most theirs."""
    name = "evals.task_scores"
    found = select(records, EvalItemRecord)
    if not found:
        said = [r.reason for r in select(records, NotMeasuredRecord, what="task")]
        reason = f"No task was run: {said[0]}." if said else "No task was run."
        return GateResult(gate=name, verdict="not_run", reason=reason)
    settings = {task.name: task for task in scope.manifest.tasks}
    primaries, unsure, numbers = list[Primary](), list[str](), list[Number]()
    by_task = group_by(found, lambda r: r.task)
    for task, own in by_task.items():
        judged = _Task(scope, task, settings.get(task), own, select(records, EvalTaskRecord, task=task))
        primaries += judged.primaries
        unsure += judged.unsure
        numbers += judged.numbers
    unsure += [f"{task} was not run" for task in settings if task not in by_task]
    passed = "; ".join(p.text for p in primaries if "drop" in p.text) or "No score dropped"
    return conclude(
        name, primaries, numbers=numbers, passed=passed, failed="The optimised arm answers worse", unsure=unsure
    )


class _Task:
    """What is judged of one task, and what keeps it from being judged."""

    def __init__(
        self,
        scope: Scope,
        task: str,
        config: TaskConfig | None,
        records: Sequence[EvalItemRecord],
        runs: Sequence[EvalTaskRecord],
    ) -> None:
        self.task, self.estimand = task, config.estimand if config else "population"
        self.margin = task_margin(scope, task)
        self.rate_margin = scope.manifest.margins.rate_points
        self.primaries: list[Primary] = []
        self.unsure: list[str] = []
        self.numbers: list[Number] = []
        by_arm = {arm: [r for r in records if r.arm == arm] for arm in ARMS}
        problem = self._unlike(runs) or self._usable(by_arm)
        if problem:
            self.unsure.append(f"{task}: {problem}")
            return
        kept = {arm: [r for r in own if r.finish_reason != "skipped"] for arm, own in by_arm.items()}
        skipped = len(by_arm["stock"]) - len(kept["stock"])
        if skipped:
            self.numbers.append(Number(f"{task} skipped", skipped, "runs above the engine's context, each arm", ""))
        if not kept["stock"]:
            self.unsure.append(f"{task}: every item is above the engine's context")
            return
        self._score(kept)
        # Three tests per task: fasttrack.stats.power.TESTS_PER_TASK, on which the plan's odds of failing rest.
        self._rate("cut-off", kept, lambda r: r.finish_reason == "length")
        self._rate("unparsed", kept, lambda r: not r.parsed)

    def _unlike(self, runs: Sequence[EvalTaskRecord]) -> str:
        """What differed between the arms besides the switch."""
        dumps = {r.arm: r.model_dump(exclude=set(_OWN)) for r in runs}
        if len(dumps) < 2:
            return ""
        differences = configuration_differences(dumps["stock"], dumps["optimized"])
        return f"the arms were not asked alike ({some(differences)})" if differences else ""

    def _usable(self, by_arm: dict[str, list[EvalItemRecord]]) -> str:
        asked = {arm: {(r.item, r.repeat): r for r in own} for arm, own in by_arm.items()}
        both = asked["stock"].keys() & asked["optimized"].keys()
        if not both or any(len(keys) != len(both) for keys in asked.values()):
            counts = ", ".join(f"{arm} {len(keys)}" for arm, keys in asked.items())
            return f"runs in one arm only ({counts}, both {len(both)})"
        if len({len(group) for group in group_by(by_arm["stock"], lambda r: r.item).values()}) > 1:
            return "questions have unequal numbers of runs"
        if odd := [key for key in both if asked["stock"][key].prompt_sha256 != asked["optimized"][key].prompt_sha256]:
            return f"{len(odd)} prompts differ between the arms"
        skips = [{k for k, r in runs.items() if r.finish_reason == "skipped"} for runs in asked.values()]
        if skips[0] != skips[1]:
            return f"{len(skips[0] ^ skips[1])} runs were skipped in one arm only"
        disputed = [
            r.item
            for own in by_arm.values()
            for r in own
            if r.second_score is not None and abs(r.second_score - r.score) > 1e-9
        ]
        if disputed:
            return f"two scorers disagree on {len(disputed)} answers ({some(dict.fromkeys(disputed))})"
        if not any(r.details.get("specialized_steps", 1) for r in by_arm["optimized"]):
            return "no step of the optimised arm ran specialised"
        return ""

    def _table(self, values: Sequence[float], runs: Sequence[EvalItemRecord]) -> NDArray[np.float64]:
        """[questions, repeats], both in sorted order."""
        import numpy as np

        order = sorted(range(len(runs)), key=lambda i: (runs[i].item, runs[i].repeat))
        questions = len({r.item for r in runs})
        return np.array([values[i] for i in order]).reshape(questions, -1)

    def _score(self, kept: dict[str, list[EvalItemRecord]]) -> None:
        from fasttrack.stats.paired import PairedScores, breach_p_value, lower_bound, mcnemar_exact

        tables = {arm: self._table([r.score for r in own], own) for arm, own in kept.items()}
        scores = PairedScores(tables["stock"], tables["optimized"])
        deltas = scores.deltas(self.estimand)
        questions, repeats = scores.stock.shape
        bound, change = 100 * lower_bound(scores, self.estimand), 100 * float(deltas.mean())
        means = [100 * float(t.mean()) for t in tables.values()]
        size = f"points, {questions} questions x {repeats}"
        self.numbers += [
            Number(f"{self.task} stock", means[0], size, ""),
            Number(f"{self.task} optimized", means[1], size, ""),
            Number(
                f"{self.task} difference",
                change,
                f"points, 95 % lower bound {bound:.3g} ({self.estimand})",
                f"bound >= -{self.margin:g}",
            ),
        ]
        if scores.binary:
            harmful, beneficial = scores.flips()
            p = mcnemar_exact(harmful, beneficial)
            unit = f"runs right in stock only, {beneficial} the other way, McNemar p {p:.3g}"
            self.numbers.append(Number(f"{self.task} flips", harmful, unit, ""))
        self._bins(kept)
        for edge, word in ((0.0, "floor"), (100.0, "ceiling")):
            if means == [edge, edge]:
                self.unsure.append(
                    f"{self.task}: both arms score at the {word} ({edge:g}), so no difference could show"
                )
                return
        inside = bound >= -self.margin
        if inside:
            text = f"{self.task}: a drop of more than {self.margin:g} points is excluded"
        elif change < -self.margin:
            text = f"{self.task}: a drop of {-change:.3g} points, margin {self.margin:g}"
        else:
            text = f"{self.task}: {questions} questions x {repeats} cannot exclude a drop of {self.margin:g} points"
        self.primaries.append(Primary(inside, breach_p_value(deltas, self.margin / 100), text))

    def _rate(self, rate: str, kept: dict[str, list[EvalItemRecord]], is_so: Callable[[EvalItemRecord], bool]) -> None:
        from fasttrack.stats.paired import breach_p_value, score_bound

        stock, other = (self._table([float(is_so(r)) for r in kept[arm]], kept[arm]) for arm in ARMS)
        rises = other - stock
        deltas = rises.mean(axis=1) if self.estimand == "population" else rises.ravel()
        bound = -100 * score_bound(-deltas)
        shares = [100 * float(arm.mean()) for arm in (stock, other)]
        unit = f"% of runs, stock {shares[0]:.3g}, rise's 95 % upper bound {bound:.3g} points"
        self.numbers.append(Number(f"{self.task} {rate}", shares[1], unit, f"bound <= {self.rate_margin:g}"))
        text = f"{self.task}: {rate} answers rise by {100 * float(deltas.mean()):.3g} points, bound {bound:.3g}"
        inside = bound <= self.rate_margin
        self.primaries.append(Primary(inside, breach_p_value(-deltas, self.rate_margin / 100), text))

    def _bins(self, kept: dict[str, list[EvalItemRecord]]) -> None:
        """MRCR by needles and length: a description, its bins hold too few items to be judged."""
        keyed = [{key: own for key, own in group_by(runs, _bin).items() if key is not None} for runs in kept.values()]
        for key in sorted(keyed[0].keys() & keyed[1].keys()):
            means = [100 * sum(r.score for r in arm[key]) / len(arm[key]) for arm in keyed]
            unit = f"points, stock {means[0]:.4g}, {len(keyed[1][key])} runs"
            self.numbers.append(Number(f"{self.task} {key}", means[1], unit, ""))


def _bin(record: EvalItemRecord) -> str | None:
    details = record.details
    return f"{details['needles']} needles, {details['bin']} tokens" if "bin" in details else None
