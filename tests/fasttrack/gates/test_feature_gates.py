"""What every feature gate asks: equal tokens, both witnesses, specialised steps, drafts that stand, all deployments."""

from __future__ import annotations

import pytest
from fake_target import TARGET
from feature_harness import Unit, fast, scope_of

from fasttrack.gates import GATES, Scope
from fasttrack.gates.feature_units import FeatureUnit, Findings, Tally, merged, sampling_level
from fasttrack.records import FeatureRecord, GenerationRecord, RefusalRecord, StepRecord, TraceRecord


def penalties(drafts: int = 0) -> Unit:
    unit = Unit("penalties", drafts)
    unit.step()
    unit.both("asked", [70, 71, 71], details={"setting": "presence"})
    unit.generate("stock", "control", [70, 71, 72])
    return unit


def test_equal_tokens_on_specialised_steps_that_both_witnesses_saw_pass():
    result = penalties().judge()
    assert result.verdict == "pass", result.reason
    assert "plain at TP 2" in result.reason
    assert {n.name: n.value for n in result.numbers}["of these seen by the profiler"] == 1


def test_a_feature_that_ran_stock_fails():
    unit = penalties()
    unit.step(index=1, path="stock", reason="not_pure_decode", ops={}, traced=False)
    result = unit.judge()
    assert result.verdict == "fail"
    assert "1 of 2 pure steps ran stock (not_pure_decode)" in result.reason


def test_prefill_on_the_stock_path_is_no_fault():
    unit = penalties()
    unit.step(index=1, kind="prefill", path="stock", reason="not_pure_decode", ops={}, traced=False)
    assert unit.judge().verdict == "pass"


def test_no_specialised_step_at_all_fails():
    unit = Unit("penalties")
    unit.step(path="stock", reason="not_pure_decode", ops={}, traced=False)
    unit.both("asked", [70, 71], details={"setting": "presence"})
    assert "no step ran specialised" in unit.judge().reason


def test_a_profiler_that_saw_something_else_fails_and_one_that_saw_nothing_decides_nothing():
    unit = penalties()
    unit.change(TraceRecord, ops={})
    assert unit.judge().verdict == "fail"
    unseen = penalties()
    unseen.records = [r for r in unseen.records if not isinstance(r, TraceRecord)]
    result = unseen.judge()
    assert result.verdict == "inconclusive"
    assert "the profiler watched none" in result.reason


def test_a_record_that_counts_otherwise_than_the_raw_ones_fails():
    unit = penalties()
    unit.finish()
    unit.change(FeatureRecord, specialized_steps=7)
    assert "the raw records others" in unit.judge().reason


def test_drafts_that_never_stand_show_nothing():
    honest = penalties(drafts=3)
    assert honest.judge().verdict == "pass"
    idle = penalties(drafts=3)
    idle.change(StepRecord, emitted=2)
    result = idle.judge()
    assert result.verdict == "inconclusive"
    assert "no draft stood" in result.reason


def test_a_variant_that_cannot_run_is_not_run_and_one_that_only_stock_serves_fails():
    unit = penalties()
    refusal = RefusalRecord(
        **unit.common("stock"), deployment={"stock_served": False}, refused=True, reasons=["no drafter"]
    )
    unit.records.append(refusal)
    result = unit.judge()
    assert (result.verdict, "no drafter" in result.reason) == ("not_run", True)
    unit.change(RefusalRecord, deployment={"stock_served": True})
    assert unit.judge().verdict == "fail"
    empty = Unit("penalties")
    assert GATES["features.penalties"](empty.scope, []).verdict == "not_run"


def test_a_feature_the_target_does_not_list_is_not_run():
    unit = penalties()
    unit.finish()
    scope = Scope(unit.scope.manifest, "smoke", TARGET.describe())
    assert GATES["features.penalties"](scope, unit.records).verdict == "not_run"


def test_every_selected_deployment_is_wanted():
    unit = penalties()
    unit.finish()
    manifest = unit.scope.manifest.model_copy(
        update={"scope": [unit.scope.manifest.scope[0].model_copy(update={"tp": [1, 2]})]}
    )
    scope = Scope(manifest, "smoke", unit.scope.description)
    result = GATES["features.penalties"](scope, unit.records)
    assert (result.verdict, "plain at TP 1 was not run" in result.reason) == ("not_run", True)


# -- equality with stock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"token_ids": [70, 71, 73], "text": "FGI"}, "token 2 is 73, stock's 71"),
        ({"token_ids": [70, 71]}, "tokens 2, stock's 3"),
        ({"finish_reason": "stop"}, "finish reason 'stop'"),
        ({"text": "other"}, "text 'other'"),
        ({"prompt_sha256": "else"}, "different prompts"),
    ],
)
def test_what_differs_from_stock_is_named(update, word):
    unit = penalties()
    unit.change(GenerationRecord, fast, **update)
    result = unit.judge()
    assert result.verdict == "fail"
    assert word in result.reason


def test_a_tie_within_the_margin_is_no_difference_but_one_beyond_it_is():
    unit = Unit("penalties", margins={"logprobs": 0.01})
    unit.step()
    tops = [{70: -0.1}, {71: -0.5, 73: -0.505}, {71: -0.2}]
    unit.both("asked", [70, 71, 71], details={"setting": "presence"}, top_logprobs=tops)
    unit.generate("stock", "control", [70, 71, 72])
    unit.change(GenerationRecord, fast, token_ids=[70, 73, 71])
    result = unit.judge()
    assert result.verdict == "inconclusive"  # a tie on the second of three tokens leaves too little to compare
    assert "ties left 1 of 3" in result.reason
    unit.scope = scope_of("penalties", margins={"logprobs": 0.001})
    assert unit.judge().verdict == "fail"


def test_penalties_without_effect_show_nothing():
    unit = penalties()
    unit.change(GenerationRecord, lambda r: r.run.endswith("control"), token_ids=[70, 71, 71])
    assert "penalties without effect: presence" in unit.judge().reason


def test_the_level_is_shared_by_all_tests_of_the_tier():
    unit = FeatureUnit("sampling", penalties().unit.cell)
    assert sampling_level([unit]) == pytest.approx(1e-3 / 3)
    assert sampling_level([unit, unit, FeatureUnit("stop", unit.cell)]) == pytest.approx(1e-3 / 6)


def test_numbers_of_several_units_are_merged():
    tallies = [Tally("n", 2, "x"), Tally("n", 3, "x"), Tally("p", 0.5, "", "", "min"), Tally("p", 0.25, "", "", "min")]
    assert [(n.name, n.value) for n in merged(tallies)] == [("n", 5), ("p", 0.25)]
    assert (Findings(("a",)) + Findings(("b",), ("c",))).wrong == ("a", "b")
