"""Five metrics from a ledger and clock readings made up so that every value is known."""

import pytest

from fasttrack.checks.performance import PerformanceCheck, metrics
from fasttrack.gates import GATES
from fasttrack.records import CellKey
from fasttrack.target import Completion, LedgerStep

CELL = CellKey(step="decode", tp=1, requests=2)


def step(index, kind, requests, emitted):
    return LedgerStep("r", index, kind, requests, requests, 0, 0, 1, 1, 9, "stock", None, {}, {}, [], [], 0.0, emitted)


# Two requests; the second arrives late, so decode at the full batch is steps 3 to 5.
STEPS = [
    step(0, "prefill", 1, 1),
    step(1, "decode", 1, 1),
    step(2, "mixed", 2, 2),
    step(3, "decode", 2, 2),
    step(4, "decode", 2, 2),
    step(5, "decode", 2, 2),
    step(6, "decode", 1, 1),
]
TIMES = {0: 11.0, 1: 12.0, 2: 15.0, 3: 16.0, 4: 17.0, 5: 19.0, 6: 20.0}
DONE = [
    Completion("a", [1] * 6, "length", arrival_time=10.0, token_times=[11.0, 12, 15, 16, 17, 19]),
    Completion("b", [1] * 5, "length", arrival_time=12.0, token_times=[15.0, 16, 17, 19, 20]),
]


@pytest.fixture(scope="module")
def found():
    return metrics(STEPS, TIMES, 10.0, DONE, CELL)


def one(found, metric, **fields):
    fitting = [m for m in found if m["metric"] == metric and all(m.get(k) == v for k, v in fields.items())]
    assert len(fitting) == 1
    return fitting[0]


def test_decode_throughput_covers_pure_decode_at_the_full_batch_only(found):
    aggregate = one(found, "decode_throughput", per="aggregate")
    assert aggregate["value"] == pytest.approx(6 / (19.0 - 15.0))
    assert (aggregate["tokens"], aggregate["step_kinds"]) == (6, {"decode": 3})
    assert (aggregate["details"]["first_step"], aggregate["details"]["last_step"]) == (3, 5)
    assert not aggregate["prefill_included"]
    user = one(found, "decode_throughput", per="user")
    assert (user["value"], user["tokens"]) == (pytest.approx(6 / 4 / 2), 3)


def test_prefill_ends_with_the_last_step_that_prefills(found):
    prefill = one(found, "prefill_time")
    assert prefill["value"] == pytest.approx(15.0 - 10.0)
    assert prefill["step_kinds"] == {"prefill": 1, "decode": 1, "mixed": 1}


def test_output_throughput_counts_everything(found):
    output = one(found, "output_throughput")
    assert (output["value"], output["tokens"]) == (pytest.approx(11 / 10.0), 11)
    assert output["step_kinds"] == {"prefill": 1, "decode": 5, "mixed": 1}


def test_requests_are_timed_from_their_own_arrival(found):
    assert one(found, "ttft", request="b")["value"] == pytest.approx(3.0)
    assert one(found, "request_latency", request="b")["value"] == pytest.approx(8.0)
    assert one(found, "request_latency", request="a")["tokens"] == 6


def test_no_window_without_a_step_before_it():
    """The first step's beginning is not on the harness's clock: no decode throughput from it."""
    only = metrics(STEPS[3:6], TIMES, 15.0, DONE, CELL)
    assert "decode_throughput" not in {m["metric"] for m in only}


def test_named_cells_run_the_published_prompt_and_cap_the_output(tmp_path):
    from harness import run_units, toy_scope

    from fasttrack.records import GenerationRecord

    named = [{"name": "published", "tp": 1, "requests": 2, "input_tokens": 1, "output_tokens": 1000}]
    scope = toy_scope(named_cells=named, tiers={"smoke": {"minutes": 1, "named_steps": 7}})
    records = run_units(scope, tmp_path, lambda u: u.name == "performance/named/published", check="performance")
    made = [r for r in records if isinstance(r, GenerationRecord)]
    assert {r.arm for r in made} == {"stock", "optimized"}
    assert {r.prompt_tokens for r in made} == {1}
    assert {len(r.token_ids) for r in made} == {8}  # prefill gives one, each decode step another
    assert GATES["performance.named_cells"](scope, records).verdict == "pass"


def test_a_manifest_of_kernels_alone_times_no_engine():
    from harness import toy_scope

    scope = toy_scope(gates={"required": ["performance.kernels"]})
    units = PerformanceCheck().units(scope.manifest, "smoke")
    assert [u.name for u in units] == [f"performance/kernels/tp{tp}/{i}of4" for tp in (1, 2) for i in (1, 2, 3, 4)]
    assert not any(u.engine for u in units)
