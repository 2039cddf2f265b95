"""Numerics gates on the toy target's own records, and with one of them changed."""

import pytest

from fasttrack.gates import GATES


def test_honest_records_pass(toy_scope, toy_records):
    for name in ("numerics.error", "numerics.poison"):
        assert GATES[name](toy_scope, toy_records["numerics"]).verdict == "pass"


@pytest.mark.parametrize(
    ("gate", "update", "word"),
    [
        ("numerics.error", {"worst": 1.01, "failing": 1}, "1.01 x bound"),
        ("numerics.error", {"worst": float("nan"), "failing": 0}, "nan x bound"),
        ("numerics.error", {"worst": 0.5, "failing": 1}, "beyond its bound"),
        ("numerics.poison", {"nan_outputs": 1}, "not written"),
        ("numerics.poison", {"changed_untouched": 1}, "written outside"),
        ("numerics.poison", {"rerun_identical": False}, "reads what it should not"),
    ],
)
def test_one_bad_record_fails_and_is_named(gate, update, word, toy_scope, toy_records):
    records = list(toy_records["numerics"])
    records[3] = records[3].model_copy(update=update)
    result = GATES[gate](toy_scope, records)
    assert result.verdict == "fail"
    assert word in result.reason
    assert records[3].op in result.reason


@pytest.mark.parametrize("drop", [lambda r: r.op == "toy::head", lambda r: r.op == "toy::head" and r.family == "coded"])
def test_an_op_or_family_that_was_not_compared_is_no_pass(drop, toy_scope, toy_records):
    result = GATES["numerics.error"](toy_scope, [r for r in toy_records["numerics"] if not drop(r)])
    assert result.verdict == "inconclusive"
    assert "toy::head" in result.reason
