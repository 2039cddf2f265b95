"""Fidelity and task-score gates on made-up records: what passes, what fails, and what is not decided."""

import random

import pytest
from harness import toy_scope

from fasttrack.gates import GATES
from fasttrack.records import CellKey, EvalItemRecord, Evidence, FidelityRecord, StepRecord

CELL = CellKey(step="decode", tp=2, requests=4)
PROOF = Evidence(kind="emulated")
UNIT = f"evals/fidelity/{CELL}"


def step(path="specialized"):
    return StepRecord(
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
        path=path,
        reason=None if path == "specialized" else "not_pure_decode",
        ops={},
    )


def sequences(ratio, n=16, spread=0.1, flips=0, nonfinite=0):
    """Stock and optimised records whose errors have this ratio; KL goes with the square of the error."""
    rng, records = random.Random(1), [step()]
    for i in range(n):
        base = 1e-6 * rng.lognormvariate(0, 0.5)
        for arm, kl in (("stock", base), ("optimized", base * ratio**2 * rng.lognormvariate(0, spread))):
            own = {"top1_flips": flips, "nonfinite": nonfinite} if arm == "optimized" and i == 0 else {}
            values = {"top1_flips": 0, "near_ties": 0, "nonfinite": 0, **own}
            records.append(
                FidelityRecord(
                    unit=UNIT,
                    arm=arm,
                    cell=CELL,
                    evidence=PROOF,
                    sequence=str(i),
                    positions=32,
                    kl_sum=kl,
                    kl_max=kl,
                    abs_error_sum=1.0,
                    abs_error_max=0.1,
                    **values,
                )
            )
    return records


@pytest.mark.parametrize(
    ("records", "expected", "word"),
    [
        (sequences(1.0), "pass", "at most 1.1"),
        (sequences(0.2), "pass", "at most 1.1"),
        (sequences(1.3), "fail", "times stock's error"),
        (sequences(1.09, n=4, spread=0.4), "inconclusive", "bound"),
        (sequences(1.0, n=1), "inconclusive", "bound"),
        (sequences(1.0, flips=1), "fail", "top-1 flips"),
        (sequences(1.0, nonfinite=2), "fail", "non-finite"),
    ],
)
def test_fidelity(records, expected, word):
    result = GATES["evals.fidelity"](toy_scope(), records)
    assert result.verdict == expected, result.reason
    assert word in result.reason


def test_a_more_accurate_arm_with_exact_stock_passes_and_a_worse_one_fails():
    equal = [r.model_copy(update={"kl_sum": 0.0}) if isinstance(r, FidelityRecord) else r for r in sequences(1.0)]
    assert GATES["evals.fidelity"](toy_scope(), equal).verdict == "pass"
    worse = [
        r.model_copy(update={"kl_sum": 1e-9}) if r.arm == "optimized" and hasattr(r, "kl_sum") else r for r in equal
    ]
    assert GATES["evals.fidelity"](toy_scope(), worse).verdict == "fail"


def test_fidelity_of_stock_steps_says_nothing_about_the_optimised_path():
    for steps in ([], [step("stock")]):
        result = GATES["evals.fidelity"](toy_scope(), [*steps, *sequences(1.0)[1:]])
        assert result.verdict == "inconclusive"
        assert "step" in result.reason


def items(stock, optimized, task="aime", repeats=1, **extra):
    return [
        EvalItemRecord(
            unit=f"evals/task/{task}/{arm}",
            arm=arm,
            evidence=PROOF,
            task=task,
            item=str(i),
            repeat=repeat,
            score=score,
            metric="exact_match",
            prompt_sha256="",
            response_sha256="",
            finish_reason="stop",
            parsed=True,
            output_tokens=1,
            **extra,
        )
        for arm, scores in (("stock", stock), ("optimized", optimized))
        for repeat in range(repeats)
        for i, score in enumerate(scores)
    ]


ONE_TASK = {"tasks": [{"name": "aime", "task": "aime25", "generated": True}]}


@pytest.mark.parametrize(
    ("stock", "optimized", "expected", "word"),
    [
        ([0.0] * 500, [0.0] * 500, "inconclusive", "floor"),
        ([1.0] * 500, [1.0] * 500, "inconclusive", "ceiling"),
        ([1.0, 0.0] * 250, [1.0, 0.0] * 250, "pass", "excluded"),
        ([1.0, 0.0] * 5, [1.0, 0.0] * 5, "inconclusive", "cannot exclude"),
        ([1.0, 0.0] * 250, [0.0, 0.0] * 250, "fail", "loses more"),
        ([0.0, 0.0] * 250, [1.0, 0.0] * 250, "pass", "excluded"),
    ],
)
def test_task_scores(stock, optimized, expected, word):
    result = GATES["evals.task_scores"](toy_scope(**ONE_TASK), items(stock, optimized))
    assert result.verdict == expected, result.reason
    assert word in result.reason


def test_questions_that_one_arm_did_not_answer_leave_the_task_undecided():
    records = items([1.0, 0.0] * 250, [1.0, 0.0] * 250)[:-1]
    assert GATES["evals.task_scores"](toy_scope(**ONE_TASK), records).verdict == "inconclusive"


def test_skipped_items_are_counted_and_not_scored():
    records = items([1.0, 0.0] * 250, [1.0, 0.0] * 250)
    skipped = [r.model_copy(update={"item": "long", "finish_reason": "skipped"}) for r in (records[0], records[-1])]
    result = GATES["evals.task_scores"](toy_scope(**ONE_TASK), [*records, *skipped])
    assert result.verdict == "pass"
    assert ("aime skipped", 2) in [(n.name, n.value) for n in result.numbers]


def test_scores_of_an_arm_that_never_ran_specialised_are_not_its_scores():
    records = items([1.0, 0.0] * 250, [1.0, 0.0] * 250, details={"specialized_steps": 0, "stock_steps": 9})
    result = GATES["evals.task_scores"](toy_scope(**ONE_TASK), records)
    assert result.verdict == "inconclusive"
    assert "specialised" in result.reason


def test_a_task_of_the_manifest_that_was_not_run_is_no_pass():
    both = {"tasks": [*ONE_TASK["tasks"], {"name": "mrcr", "task": "mrcr", "generated": True}]}
    result = GATES["evals.task_scores"](toy_scope(**both), items([1.0, 0.0] * 250, [1.0, 0.0] * 250))
    assert result.verdict == "inconclusive"
    assert "mrcr was not run" in result.reason.lower()
