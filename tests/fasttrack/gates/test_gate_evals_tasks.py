"""Paired task scores on made-up records: margins, estimands, and everything that keeps a task from being judged."""

import random

import pytest
from harness import toy_scope

from fasttrack.gates import GATES
from fasttrack.gates.evals_tasks import _Task
from fasttrack.records import EvalItemRecord, EvalTaskRecord, Evidence
from fasttrack.stats.power import TESTS_PER_TASK

PROOF = Evidence(kind="emulated")


def item(arm, index, repeat, score, task="aime", **extra):
    values = {
        "finish_reason": "stop",
        "parsed": True,
        "prompt_sha256": f"p{index}",
        "response_sha256": "",
        "metric": "exact_match",
        "output_tokens": 1,
        **extra,
    }
    unit = f"evals/task/{task}/{arm}"
    return EvalItemRecord(
        unit=unit, arm=arm, evidence=PROOF, task=task, item=str(index), repeat=repeat, score=score, **values
    )


def items(stock, optimized, task="aime", repeats=1, **extra):
    return [
        item(arm, i, repeat, score, task, **extra)
        for arm, scores in (("stock", stock), ("optimized", optimized))
        for repeat in range(repeats)
        for i, score in enumerate(scores)
    ]


ONE_TASK = {"tasks": [{"name": "aime", "task": "aime25", "generated": True}]}
BENCHMARK = {"tasks": [{"name": "aime", "task": "aime25", "generated": True, "estimand": "benchmark"}]}
EVEN = [1.0, 0.0] * 250


def judge(records, **scope):
    return GATES["evals.task_scores"](toy_scope(**(scope or ONE_TASK)), records)


@pytest.mark.parametrize(
    ("stock", "optimized", "expected", "word"),
    [
        ([0.0] * 500, [0.0] * 500, "inconclusive", "floor"),
        ([1.0] * 500, [1.0] * 500, "inconclusive", "ceiling"),
        (EVEN, EVEN, "pass", "excluded"),
        (EVEN[:10], EVEN[:10], "inconclusive", "cannot exclude"),
        (EVEN, [0.0, 0.0] * 250, "fail", "a drop of 50 points"),
        ([0.0, 0.0] * 250, EVEN, "pass", "excluded"),
        ([0.5] * 500, [0.5] * 500, "pass", "excluded"),
    ],
)
def test_scores(stock, optimized, expected, word):
    result = judge(items(stock, optimized))
    assert result.verdict == expected, result.reason
    assert word in result.reason


def test_thirty_questions_pass_as_a_benchmark_and_not_as_a_sample():
    rng = random.Random(0)
    tables = {arm: [[float(rng.random() < 0.9) for _ in range(30)] for _ in range(100)] for arm in ("s", "o")}
    records = [
        item(arm, i, repeat, score)
        for arm, own in (("stock", tables["s"]), ("optimized", tables["o"]))
        for repeat, scores in enumerate(own)
        for i, score in enumerate(scores)
    ]
    assert judge(records, **BENCHMARK).verdict == "pass"
    result = judge(records)
    assert result.verdict == "inconclusive"
    assert "30 questions x 100 cannot exclude" in result.reason


def test_repeats_are_averaged_within_their_question():
    """500 repeats of 4 questions are no 2,000 questions."""
    assert judge(items([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], repeats=500)).verdict == "inconclusive"


def test_two_breaches_are_corrected_for_and_named():
    tasks = [{"name": n, "task": "aime25", "generated": True} for n in ("one", "two")]
    lost = [1.0] * 60 + [0.0] * 440
    worse = [*items(EVEN, EVEN, "one"), *items(EVEN, [a * (1 - b) for a, b in zip(EVEN, lost, strict=True)], "two")]
    result = judge(worse, tasks=tasks)
    assert result.verdict == "fail"
    assert "two: a drop of 6 points" in result.reason
    assert "one" not in result.reason.replace("no one", "")


def test_as_many_breaches_are_looked_for_as_the_plan_corrects_for():
    judged = _Task(toy_scope(**ONE_TASK), "aime", None, items(EVEN, EVEN), [])
    assert len(judged.primaries) == TESTS_PER_TASK


def test_runs_of_one_arm_only_leave_the_task_undecided():
    assert judge(items(EVEN, EVEN)[:-1]).verdict == "inconclusive"
    extra = item("optimized", 999, 0, 1.0)
    assert "one arm only" in judge([*items(EVEN, EVEN), extra]).reason


def test_questions_with_more_runs_than_others_are_no_table():
    more = [item(arm, 0, 1, 1.0) for arm in ("stock", "optimized")]
    assert "unequal numbers of runs" in judge([*items(EVEN, EVEN), *more]).reason


def test_skipped_items_are_counted_and_not_scored():
    skipped = [item(arm, "long", 0, 0.0, finish_reason="skipped", parsed=False) for arm in ("stock", "optimized")]
    result = judge([*items(EVEN, EVEN), *skipped])
    assert result.verdict == "pass"
    assert ("aime skipped", 1) in [(n.name, n.value) for n in result.numbers]
    assert next(n for n in result.numbers if n.name == "aime stock").unit == "points, 500 questions x 1"
    assert "every item is above" in judge(skipped).reason
    assert (
        "skipped in one arm only" in judge([*items(EVEN, EVEN), skipped[0], item("optimized", "long", 0, 0.0)]).reason
    )


def test_scorers_that_disagree_and_prompts_that_differ_leave_the_task_undecided():
    records = items(EVEN, EVEN)
    assert judge([*records[:-1], records[-1].model_copy(update={"second_score": 0.0})]).verdict == "pass"
    result = judge([*records[:-1], records[-1].model_copy(update={"second_score": 1.0})])
    assert "two scorers disagree on 1 answers (499)" in result.reason
    assert "1 prompts differ" in judge([*records[:-1], records[-1].model_copy(update={"prompt_sha256": "x"})]).reason


def test_arms_that_were_not_asked_alike_are_not_compared():
    def run(arm, tokens):
        return EvalTaskRecord(
            unit=f"evals/task/aime/{arm}",
            arm=arm,
            evidence=PROOF,
            task="aime",
            source="generated",
            rows_sha256="r",
            task_file_sha256="t",
            chat_template_sha256=None,
            items=500,
            repeats=1,
            max_tokens=tokens,
            temperature=0.0,
        )

    assert judge([*items(EVEN, EVEN), run("stock", 8), run("optimized", 8)]).verdict == "pass"
    result = judge([*items(EVEN, EVEN), run("stock", 8), run("optimized", 9)])
    assert result.verdict == "inconclusive"
    assert "max_tokens: 8 / 9" in result.reason


def test_scores_of_an_arm_that_never_ran_specialised_are_not_its_scores():
    result = judge(items(EVEN, EVEN, details={"specialized_steps": 0, "stock_steps": 9}))
    assert result.verdict == "inconclusive"
    assert "specialised" in result.reason


@pytest.mark.parametrize(
    ("field", "value", "word"), [("finish_reason", "length", "cut-off"), ("parsed", False, "unparsed")]
)
def test_more_cut_off_or_unparsed_answers_fail_even_where_scores_hold(field, value, word):
    records = items(EVEN, EVEN)
    changed = [
        r.model_copy(update={field: value}) if r.arm == "optimized" and r.score == 0 and int(r.item) < 200 else r
        for r in records
    ]
    result = judge(changed)
    assert result.verdict == "fail", result.reason
    assert f"{word} answers rise by 20 points" in result.reason
    both = [r.model_copy(update={field: value}) for r in records]
    assert judge(both).verdict == "pass"


def test_a_task_of_the_manifest_that_was_not_run_is_no_pass():
    both = {"tasks": [*ONE_TASK["tasks"], {"name": "mrcr", "task": "mrcr", "generated": True}]}
    result = judge(items(EVEN, EVEN), **both)
    assert result.verdict == "inconclusive"
    assert "mrcr was not run" in result.reason.lower()


def test_bins_and_flips_are_described():
    details = {"needles": 2, "bin": "4097-8192"}
    result = judge(items(EVEN, [*EVEN[:499], 1.0], details=details))
    names = {n.name: n for n in result.numbers}
    assert names["aime 2 needles, 4097-8192 tokens"].value == pytest.approx(50.2)
    assert names["aime flips"].value == 0
    assert "1 the other way" in names["aime flips"].unit
