"""What the planned evaluation can see: chances of each verdict, and what it would cost to be sure. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fasttrack.gates.base import Scope
from fasttrack.gates.evals_tasks import task_margin
from fasttrack.manifest.model import TaskConfig
from fasttrack.stats.power import Design, Odds, joint_odds, odds, repeats_needed
from fasttrack.tasks.data import count_rows

GATE = "evals.task_scores"
POWER = 0.9  #: wanted chance that an unchanged model passes every task
LOST = 0.02  #: the drop that must not slip through: two points
DEFAULT_RATE = 100.0  #: tokens a second where the tier assumes nothing
CHOICE_TOKENS = 4  #: scored per item of a multiple-choice task: one letter per option


@dataclass(frozen=True)
class TaskOutlook:
    """One task as planned, and with as many repeats as the joint power asks of it."""

    task: TaskConfig
    design: Design
    unchanged: Odds
    dropped: Odds  #: two points lost
    tokens: int  #: generated in both arms, as planned
    seconds: float
    repeats: int | None  #: that all tasks together need; None: no number of repeats would do
    repeats_tokens: int | None
    repeats_seconds: float | None


@dataclass(frozen=True)
class Outlook:
    tasks: tuple[TaskOutlook, ...]
    required: bool  #: whether the verdict depends on task scores at all
    unchanged: Odds  #: of all tasks together
    one_dropped: float  #: chance of passing when the task that shows it least loses two points, the others none
    all_dropped: Odds
    reached: Odds | None  #: unchanged, with the repeats that are needed; None where a task cannot get there
    reached_dropped: float | None  #: chance of passing then, when the task that shows it least loses two points


def task_design(scope: Scope, task: TaskConfig) -> Design:
    run = scope.manifest.task_run(task, scope.tier)
    available = count_rows(task)
    return Design(
        questions=min(run.items, available) if available else run.items,
        repeats=run.repeats,
        mean=task.assumed_mean,
        margin=task_margin(scope, task.name) / 100,
        estimand=task.estimand,
        concentration=task.assumed_spread,
    )


def outlook(scope: Scope, *, draws: int = 2000) -> Outlook | None:
    """Chances of the verdict over all tasks of the tier; None where no gate looks at task scores."""
    manifest = scope.manifest
    if not manifest.tasks or GATE not in (*manifest.gates.required, *manifest.gates.optional):
        return None
    designs = [task_design(scope, task) for task in manifest.tasks]
    each = POWER ** (1 / len(designs))
    tasks = []
    for task, design in zip(manifest.tasks, designs, strict=True):
        repeats = repeats_needed(design, power=each, draws=draws // 2)
        tokens, seconds = _cost(scope, task, design)
        more = (None, None) if repeats is None else _cost(scope, task, replace(design, repeats=repeats))
        seen = odds(design, 0.0, draws=draws), odds(design, LOST, draws=draws)
        tasks.append(TaskOutlook(task, design, *seen, tokens, seconds, repeats, *more))
    sure = [replace(t.design, repeats=t.repeats) for t in tasks if t.repeats is not None]
    complete = len(sure) == len(designs)
    return Outlook(
        tasks=tuple(tasks),
        required=GATE in manifest.gates.required,
        unchanged=joint_odds(designs, [0.0] * len(designs), draws=draws),
        one_dropped=_least_visible(designs, draws),
        all_dropped=joint_odds(designs, [LOST] * len(designs), draws=draws),
        reached=joint_odds(sure, [0.0] * len(sure), draws=draws) if complete else None,
        reached_dropped=_least_visible(sure, draws) if complete else None,
    )


def _least_visible(designs: Sequence[Design], draws: int) -> float:
    """Chance that all pass although one has dropped, for the one where that is likeliest."""
    kept = [odds(d, 0.0, draws=draws).passes for d in designs]
    lost = [odds(d, LOST, draws=draws).passes for d in designs]
    return max(math.prod(kept[:i] + kept[i + 1 :]) * lost[i] for i in range(len(designs)))


def _cost(scope: Scope, task: TaskConfig, design: Design) -> tuple[int, float]:
    """(tokens, seconds) of both arms."""
    run = scope.manifest.task_run(task, scope.tier)
    each = CHOICE_TOKENS if task.style == "choice" else min(run.max_tokens, task.assumed_tokens or run.max_tokens)
    tokens = 2 * design.questions * design.repeats * each
    return tokens, tokens / (scope.knobs.tokens_per_s or DEFAULT_RATE)
