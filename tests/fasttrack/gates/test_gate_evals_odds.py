"""A synthetic engine whose answers are drawn with a known drop: the gate judges it as the plan predicted."""

import math
from collections import Counter

import numpy as np
import pytest
from harness import toy_scope

from fasttrack.gates import GATES
from fasttrack.plan.outlook import task_design
from fasttrack.records import EvalItemRecord, Evidence
from fasttrack.stats import joint_odds

PROOF = Evidence(kind="emulated")
RUNS = 200


def scope_of(*tasks):
    """A task is (name, items, repeats, mean, estimand)."""
    listed = [
        {
            "name": name,
            "task": "aime25",
            "generated": True,
            "items": items,
            "repeats": repeats,
            "assumed_mean": mean,
            "estimand": estimand,
        }
        for name, items, repeats, mean, estimand in tasks
    ]
    return toy_scope(tasks=listed)


def answers(task, design, drop, rng):
    """Records of both arms: abilities are drawn, then every answer. No planner's formula is used."""
    ability = rng.beta(2 * design.mean, 2 * (1 - design.mean), size=design.questions)
    whole = ability.mean() if design.estimand == "benchmark" else design.mean
    for arm, chance in (("stock", ability), ("optimized", ability * (1 - drop / whole))):
        right = rng.random((design.questions, design.repeats)) < chance[:, None]
        for question in range(design.questions):
            for repeat in range(design.repeats):
                yield EvalItemRecord.model_construct(
                    type="eval_item",
                    unit=f"evals/task/{task}/{arm}",
                    attempt=1,
                    arm=arm,
                    cell=None,
                    evidence=PROOF,
                    task=task,
                    item=str(question),
                    repeat=repeat,
                    score=float(right[question, repeat]),
                    second_score=float(right[question, repeat]),
                    metric="exact_match",
                    prompt_sha256="",
                    response_sha256="",
                    response=None,
                    finish_reason="stop",
                    parsed=True,
                    output_tokens=1,
                    details={},
                )


def close(seen, expected):
    """Within three standard errors of a share of so many runs, and never closer than two runs."""
    return abs(seen / RUNS - expected) <= 3 * math.sqrt(expected * (1 - expected) / RUNS) + 2 / RUNS


@pytest.mark.slow
@pytest.mark.parametrize("points", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "tasks",
    [
        (("gpqa", 100, 5, 0.85, "population"),),
        (("aime", 30, 24, 0.9, "benchmark"), ("easy", 60, 4, 0.95, "population")),
    ],
    ids=["one task", "two tasks"],
)
def test_verdicts_over_200_runs_are_what_the_plan_predicted(tasks, points):
    scope = scope_of(*tasks)
    designs = {task.name: task_design(scope, task) for task in scope.manifest.tasks}
    predicted = joint_odds(list(designs.values()), [points / 100] * len(designs), draws=20_000)
    rng = np.random.default_rng([points, len(tasks)])
    verdicts = Counter()
    for _ in range(RUNS):
        records = [r for name, design in designs.items() for r in answers(name, design, points / 100, rng)]
        verdicts[GATES["evals.task_scores"](scope, records).verdict] += 1
    expected = {"pass": predicted.passes, "fail": predicted.fails, "inconclusive": predicted.inconclusive}
    for verdict, share in expected.items():
        assert close(verdicts[verdict], share), (verdict, verdicts, expected)
    if points >= 2:
        assert verdicts["pass"] <= 0.1 * RUNS
