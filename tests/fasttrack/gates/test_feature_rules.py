"""The rule of each single feature: an honest unit passes, and each thing that may be wrong is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from feature_harness import Unit, fast

from fasttrack.gates.feature_text import mismatch, schema_mismatch
from fasttrack.records import EngineRecord, FeatureRecord, GenerationRecord, SampledRecord, StepRecord


def logprobs() -> Unit:
    unit = Unit("logprobs")
    unit.step()
    for name, tokens in (("asked", [70, 71]), ("forced", [90, 91])):
        tops = [{70: -0.2, 72: -2.0}, {71: -0.3, 72: -2.5}]
        chosen = [top.get(t, -6.0) for top, t in zip(tops, tokens, strict=True)]
        tops = [{**top, t: c} for top, t, c in zip(tops, tokens, chosen, strict=True)]
        unit.both(name, tokens, sampling={"logprobs": 2}, logprobs=chosen, top_logprobs=tops)
    unit.finish(sum_error=1e-12)
    return unit


def test_consistent_logprobs_pass():
    assert logprobs().judge().verdict == "pass"


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"logprobs": [-0.2000001, -0.3]}, "alone and -0.2 among"),
        ({"logprobs": [-0.7, -0.3], "top_logprobs": [{70: -0.7, 72: -2.0}, {71: -0.3, 72: -2.5}]}, "nats from stock's"),
        ({"top_logprobs": [{70: -0.2, 72: -1.9}, {71: -0.3, 72: -2.5}]}, "alternative 72 has -1.9"),
        ({"top_logprobs": [{70: -0.2, 74: -1.0}, {71: -0.3, 72: -2.5}]}, "is missing in one arm"),
        ({"top_logprobs": [{70: -0.2}, {71: -0.3, 72: -2.5}]}, "1 alternatives, 2 asked"),
        ({"top_logprobs": [{72: -2.0, 70: -0.2}, {71: -0.3, 72: -2.5}]}, "most likely first"),
    ],
)
def test_logprobs_that_do_not_fit_are_named(update, word):
    unit = logprobs()
    unit.change(GenerationRecord, lambda r: fast(r) and r.run.endswith("asked"), **update)
    result = unit.judge()
    assert result.verdict == "fail"
    assert word in result.reason


def test_probabilities_must_sum_to_one_and_be_there():
    unit = logprobs()
    unit.change(FeatureRecord, numbers={"sum_error": 1e-3})
    assert "sum to 1 +- 0.001" in unit.judge().reason
    unit.change(FeatureRecord, numbers={})
    assert unit.judge().verdict == "inconclusive"


def prefix(**hit: Any) -> Unit:
    unit = Unit("prefix_reuse")
    unit.step()
    unit.both("cold", [70, 71], logprobs=[-0.5, -0.25])
    unit.generate("optimized", "hit", [70, 71], **{"logprobs": [-0.5, -0.25], "cached_tokens": 4, **hit})
    return unit


def test_a_hit_that_equals_a_miss_passes():
    assert prefix().judge().verdict == "pass"


@pytest.mark.parametrize(
    ("hit", "word"),
    [
        ({"logprobs": [-0.5, -0.25000000000000006]}, "otherwise than a miss"),
        ({"cached_tokens": 0}, "was not reused"),
        ({"cached_tokens": 8}, "8 cached of 8"),
    ],
)
def test_a_hit_that_is_none_fails(hit, word):
    result = prefix(**hit).judge()
    assert result.verdict == "fail"
    assert word in result.reason


def test_a_hit_in_an_empty_cache_fails():
    unit = prefix()
    unit.change(GenerationRecord, lambda r: fast(r) and r.run.endswith("cold"), cached_tokens=4)
    assert "in an empty cache" in unit.judge().reason


def context(drafts: int, **reached: int) -> Any:
    unit = Unit("full_context", drafts)
    description = unit.scope.description
    limits = replace(description.limits, draft_lengths=(0, 3, 7))
    unit.scope = replace(unit.scope, description=replace(description, limits=limits))
    unit.records.append(
        EngineRecord(
            **unit.common("optimized"),
            engine="embedded",
            switch={},
            devices=[],
            checkpoint="",
            config={"max_context": 64},
        )
    )
    for index, (kind, position) in enumerate(reached.items()):
        unit.step(kind=kind, index=index, context_max=position)
    unit.both("asked", [70, 71])
    return unit.judge()


def test_the_last_position_is_reached():
    assert context(0, decode=63).verdict == "pass"
    assert "decode steps reach position 62 of 64" in context(0, decode=62).reason
    assert context(7, decode=63, verify=61).verdict == "pass"
    assert "verify steps reach position 60" in context(7, decode=63, verify=60).reason
    assert "decode steps reach position 0" in context(7, verify=64).reason


def resumed(changes: int) -> Unit:
    unit = Unit("stock_resumed")
    for index in range(2 * changes + 1):
        special = index % 2 == 0
        fields = {} if special else {"kind": "mixed", "path": "stock", "reason": "not_pure_decode", "ops": {}}
        unit.step(index=index, traced=special, **fields)
    unit.both("asked", [70, 71])
    return unit


def test_paths_must_alternate():
    assert resumed(3).judge().verdict == "pass"
    assert resumed(2).judge().verdict == "inconclusive"


def streaming() -> Unit:
    unit = Unit("streaming")
    unit.step(index=0)
    unit.step(index=1)
    for request, start in (("r0", 1.0), ("r1", 1.1)):
        unit.both("asked", [70, 71], request, arrival_time=0.5, token_times=[start, start + 1])
    return unit


def test_tokens_in_order_pass():
    assert streaming().judge().verdict == "pass"


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"token_times": [2.0, 1.0]}, "earlier than the one before"),
        ({"token_times": [1.0]}, "1 times for 2 tokens"),
        ({"arrival_time": 1.5}, "before the request arrived"),
        ({"token_times": [1.0, 1.05]}, "step 0: 2 tokens of one request"),
    ],
)
def test_tokens_out_of_order_are_named(update, word):
    unit = streaming()
    unit.change(GenerationRecord, fast, **update)
    result = unit.judge()
    assert result.verdict == "fail"
    assert word in result.reason


def test_steps_that_were_not_reported_fail():
    unit = streaming()
    unit.finish(on_step_missing=2)
    assert "2 steps not reported when they ended" in unit.judge().reason
    lost = streaming()
    lost.change(StepRecord, emitted=3)
    assert "4 tokens came, 5 in the ledger" in lost.judge().reason


def stops() -> Unit:
    unit = Unit("stop")
    unit.step()
    unit.generate("stock", "free", [72, 101, 108, 108, 111], "f")  # "Hello"
    for i, (kind, sampling, n, text) in enumerate(
        [
            ("across", {"stop": ["el"]}, 3, "H"),
            ("inside", {"stop": ["o"]}, 5, "Hell"),
            ("token", {"stop_token_ids": [108]}, 3, "He"),
            ("never", {"stop": ["x"]}, 5, "Hello"),
        ]
    ):
        unit.both(
            "asked",
            [72, 101, 108, 108, 111][:n],
            f"s{i}",
            text=text,
            sampling=sampling,
            finish_reason="length" if kind == "never" else "stop",
            details={"kind": kind, "free": "f", "expected_tokens": n},
        )
    return unit


def test_stops_where_they_must_pass():
    assert stops().judge().verdict == "pass"


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"token_ids": [72, 101, 108, 108], "text": "H"}, "4 tokens, 3 up to the stop"),
        ({"text": "Hel"}, "has the text 'Hel', not 'H'"),
        ({"finish_reason": "length"}, "ended by length"),
    ],
)
def test_stops_elsewhere_are_named_even_where_stock_does_the_same(update, word):
    unit = stops()
    for arm in ("stock", "optimized"):
        unit.change(GenerationRecord, lambda r, arm=arm: r.arm == arm and r.request == "s0", **update)
    result = unit.judge()
    assert result.verdict == "fail"
    assert word in result.reason


def test_a_kind_of_stop_that_was_not_met_shows_nothing():
    unit = stops()
    unit.records = [r for r in unit.records if getattr(r, "request", "") != "s0"]
    assert "no stop of the kind: across" in unit.judge().reason


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1]}, "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}


def structured(text: str = '{"a": "x"}', **fields: Any) -> Unit:
    unit = Unit("structured_output")
    unit.step()
    unit.both("asked", [1], "r0", text=text, sampling={"structured": {"json_schema": SCHEMA}}, finish_reason="stop")
    matching = {"sampling": {"structured": {"regex": "[ab]+"}, "temperature": 1.0}, "finish_reason": "stop"}
    unit.generate("stock", "asked", [1], "r1", text="ab", **matching)
    unit.generate("optimized", "asked", [2], "r1", **{"text": "ba", **matching, **fields})
    unit.generate("stock", "control", [3], "r0", text="?")
    return unit


def test_outputs_that_match_pass_and_sampled_ones_need_not_be_stocks():
    assert structured().judge().verdict == "pass"


@pytest.mark.parametrize("text", ['{"a": "y"}', '{"a": "x"', '{"a": "x", "b": 1}', "{}", '{"a": "x", "n": [1, 2, 3]}'])
def test_an_output_that_does_not_match_fails(text):
    assert structured(text).judge().verdict == "fail"


def test_a_sampled_output_that_does_not_match_fails_and_a_cut_one_counts_as_unfinished():
    assert structured(text="ac").judge().verdict == "fail"
    assert "1 of 2 outputs ended" in structured(finish_reason="length").judge().reason


def test_a_constraint_that_free_output_meets_as_well_shows_nothing():
    unit = structured()
    unit.change(GenerationRecord, lambda r: r.run.endswith("control"), text="aaa")
    assert unit.judge().verdict == "inconclusive"


def test_schema_violations_are_located():
    assert schema_mismatch({"a": 1, "n": [1, "z"]}, SCHEMA) == "$.n[1] is 'z', not integer"
    assert schema_mismatch(True, {"type": "integer"}) == "$ is True, not integer"
    assert schema_mismatch("b1", {"type": "string", "pattern": "^[a-z]$"}) == "$ is 'b1', not ^[a-z]$"
    assert mismatch("ab", {"regex": "a"}) == "'ab' does not match the expression"
    with pytest.raises(ValueError, match="oneOf"):
        schema_mismatch(1, {"oneOf": []})


# -- sampling --------------------------------------------------------------------------------------------------


def sampled(optimised: dict[str, list[float]] | None = None, outside: int = 0, n: int = 500) -> Unit:
    unit = Unit("sampling", margins={"sampling": 0.2})
    unit.step()
    even = [(i + 0.5) / n for i in range(n)]
    for arm in ("stock", "optimized"):
        for setting in ("temperature", "top_k", "top_p"):
            quantiles = (optimised or {}).get(setting, even) if arm == "optimized" else even
            unit.records.append(
                SampledRecord(
                    **unit.common(arm),
                    run="r",
                    request="r0",
                    setting=setting,
                    sampling={},
                    quantiles=quantiles,
                    outside=outside if (arm, setting) == ("optimized", "top_k") else 0,
                )
            )
    return unit


def test_equal_distributions_pass_with_their_power():
    result = sampled().judge()
    assert result.verdict == "pass"
    numbers = {n.name: n for n in result.numbers}
    assert numbers["top_p: power"].value >= 0.9
    assert "total variation of 0.2" in numbers["top_p: power"].unit


def test_another_distribution_or_a_token_outside_the_support_fails():
    low = [(i + 0.5) / 500 * 0.8 for i in range(500)]
    result = sampled({"temperature": low}).judge()
    assert (result.verdict, "temperature: another distribution" in result.reason) == ("fail", True)
    assert "top_k: 1 tokens that stock never samples" in sampled(outside=1).judge().reason


def test_too_few_tokens_decide_nothing():
    assert sampled(n=300).judge().verdict == "inconclusive"
