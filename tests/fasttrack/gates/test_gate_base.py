"""Which gates count, and how they add up to one verdict."""

import pytest
from harness import toy_scope

from fasttrack.errors import UsageError
from fasttrack.gates import GATES, GateResult, evaluate, overall
from fasttrack.gates.base import some
from fasttrack.records import CellKey, Evidence, StepRecord


def results(**verdicts):
    return [GateResult(gate=name.replace("__", "."), verdict=v, reason="") for name, v in verdicts.items()]


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        (("pass", "pass"), "pass"),
        (("pass", "fail"), "fail"),
        (("fail", "not_run"), "fail"),
        (("pass", "not_run"), "inconclusive"),
        (("pass", "inconclusive"), "inconclusive"),
    ],
)
def test_overall(required, expected):
    names = ["numerics.error", "numerics.poison"]
    scope = toy_scope(gates={"required": names, "optional": ["isolation.a_a"]})
    found = results(numerics__error=required[0], numerics__poison=required[1], isolation__a_a="fail")
    assert overall(scope, found) == expected, "an optional failure must not count"


def test_a_required_gate_without_result_is_missing_evidence():
    assert overall(toy_scope(gates={"required": ["numerics.error"]}), []) == "inconclusive"


def test_every_gate_says_not_run_without_records():
    scope = toy_scope(gates={"required": list(GATES)})
    found = evaluate(scope, [])
    assert [r.gate for r in found] == list(GATES)
    assert {r.verdict for r in found} == {"not_run"}


def test_unknown_gate_is_named():
    with pytest.raises(UsageError, match=r"unknown gate 'numerics\.speed'"):
        evaluate(toy_scope(gates={"required": ["numerics.speed"]}), [])


def test_some_is_short_and_stable():
    assert some(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert some({"b", "a"}) == "a, b"


@pytest.mark.parametrize(
    "change",
    [{"kind": "mixed"}, {"tp": 1}, {"requests": 3}, {"rows": 8}, {"context_max": 65}, {"dcp": 2}, {"draft_length": 1}],
)
def test_a_step_belongs_to_a_cell_only_at_exactly_its_shape(change):
    cell = CellKey(step="decode", tp=2, requests=4)
    values = {
        "unit": "u",
        "evidence": Evidence(kind="emulated"),
        "run": "r",
        "index": 0,
        "kind": "decode",
        "requests": 4,
        "rows": 4,
        "padded_rows": 0,
        "draft_length": 0,
        "tp": 2,
        "dcp": 1,
        "context_max": 64,
        "path": "specialized",
        "reason": None,
        "ops": {},
    }
    assert toy_scope().is_step_of(StepRecord(**values), cell)
    assert not toy_scope().is_step_of(StepRecord(**{**values, **change}), cell)
