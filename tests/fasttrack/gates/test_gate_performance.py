"""Accounting on real records with one count changed; speed-ups refused by the factor's name."""

import pytest

from fasttrack.gates import GATES
from fasttrack.records import EngineRecord, Evidence, GenerationRecord, PerformanceRecord, StepRecord


def altered(records, kind, update, where=lambda r: True):
    changed, done = [], False
    for record in records:
        if not done and isinstance(record, kind) and where(record):
            record, done = record.model_copy(update=update(record)), True
        changed.append(record)
    assert done
    return changed


def throughput(record):
    return record.metric == "decode_throughput"


def test_honest_counts_pass_and_cover_every_cell(toy_scope, toy_records):
    records = toy_records["performance"]
    result = GATES["performance.accounting"](toy_scope, records)
    assert result.verdict == "pass", result.reason
    metrics = {r.metric for r in records if isinstance(r, PerformanceRecord)}
    assert metrics == {"decode_throughput", "prefill_time", "ttft", "output_throughput", "request_latency"}


@pytest.mark.parametrize(
    ("kind", "update", "where", "word"),
    [
        (PerformanceRecord, lambda r: {"tokens": r.tokens + 1}, throughput, "tokens counted"),
        (PerformanceRecord, lambda r: {"step_kinds": {"decode": 1}}, throughput, "window has steps"),
        (
            PerformanceRecord,
            lambda r: {
                "details": {**r.details, "first_step": 0},
                "tokens": r.tokens + r.cell.requests,
                "step_kinds": {"prefill": 1, **r.step_kinds},
            },
            lambda r: throughput(r) and r.per == "aggregate",
            "without prefill holds prefill",
        ),
        (StepRecord, lambda r: {"emitted": r.emitted + 1}, lambda r: r.kind == "decode", "came back"),
        (GenerationRecord, lambda r: {"token_ids": r.token_ids[:-1]}, lambda r: True, "came back"),
    ],
)
def test_a_count_that_differs_fails(kind, update, where, word, toy_scope, toy_records):
    result = GATES["performance.accounting"](toy_scope, altered(toy_records["performance"], kind, update, where))
    assert result.verdict == "fail"
    assert word in result.reason


def test_a_cell_without_metrics_is_no_pass(toy_scope, toy_records):
    records = [r for r in toy_records["performance"] if not (r.cell and r.cell.requests == 16)]
    assert GATES["performance.accounting"](toy_scope, records).verdict == "inconclusive"


def test_emulated_evidence_says_nothing_about_speed(toy_scope, toy_records):
    result = GATES["performance.speedup"](toy_scope, toy_records["performance"])
    assert result.verdict == "not_run"
    assert "says nothing about speed" in result.reason


@pytest.fixture
def measured(toy_records):
    """The toy records as if a GPU had measured them, optimised twice as fast, in two pairs of runs."""
    proof = Evidence(kind="measured", device="GPU")
    records = []
    for record in toy_records["performance"]:
        update = {"evidence": proof}
        if isinstance(record, PerformanceRecord):
            update["value"] = 200.0 if record.arm == "optimized" else 100.0
            for repeat in (0, 1):
                records.append(record.model_copy(update={**update, "details": {**record.details, "repeat": repeat}}))
        else:
            records.append(record.model_copy(update=update))
    return records


def test_fair_pairs_give_a_ratio(toy_scope, measured):
    result = GATES["performance.speedup"](toy_scope, measured)
    assert result.verdict == "pass", result.reason
    assert {n.value for n in result.numbers} == {2.0}


def optimized(record):
    return record.arm == "optimized"


def fast_decode(record):
    return optimized(record) and throughput(record) and record.per == "aggregate"


@pytest.mark.parametrize(
    ("kind", "update", "where", "word"),
    [
        (EngineRecord, lambda r: {"config": {**r.config, "max_requests": 1}}, optimized, "max_requests"),
        (EngineRecord, lambda r: {"devices": ["other"]}, optimized, "devices"),
        (EngineRecord, lambda r: {"checkpoint": "other"}, optimized, "checkpoint"),
        (PerformanceRecord, lambda r: {"tokens": r.tokens - 1}, fast_decode, "tokens"),
        (PerformanceRecord, lambda r: {"step_kinds": {"decode": 1}}, fast_decode, "steps"),
        (PerformanceRecord, lambda r: {"acceptance": "synthetic(6)"}, fast_decode, "acceptance"),
        (PerformanceRecord, lambda r: {"evidence": Evidence(kind="measured", device="B")}, fast_decode, "evidence"),
    ],
)
def test_an_unfair_pair_is_refused_by_name(kind, update, where, word, toy_scope, measured):
    result = GATES["performance.speedup"](toy_scope, altered(measured, kind, update, where))
    assert result.verdict == "inconclusive"
    assert word in result.reason


def test_the_switch_alone_may_differ(toy_scope, measured):
    switches = {r.config["toy_backend"] for r in measured if isinstance(r, EngineRecord)}
    assert switches == {"auto", "fast"}


def test_a_slower_cell_fails(toy_scope, measured):
    slow = [
        r.model_copy(update={"value": 90.0})
        if isinstance(r, PerformanceRecord) and fast_decode(r) and r.cell.tp == 1
        else r
        for r in measured
    ]
    result = GATES["performance.speedup"](toy_scope, slow)
    assert result.verdict == "fail"
    assert "tp1" in result.reason
