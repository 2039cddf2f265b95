"""Which rungs run, free-running text, acceptance from the ledger, and engines that cannot do something."""

import pytest
from fake_target import TARGET
from fake_target.engine import ToyEngine
from harness import TOY, Sabotaged, run_units, toy_scope

from fasttrack.checks import CHECKS, batches
from fasttrack.checks.acceptance import count
from fasttrack.checks.fidelity import count_routing
from fasttrack.checks.free_running import describe, repetitive
from fasttrack.errors import EvidenceError
from fasttrack.gates import GATES
from fasttrack.records import CellKey, FreeRunRecord, NotMeasuredRecord
from fasttrack.target import Completion, LedgerStep, RoutingStep


def rungs(**changes):
    scope = toy_scope(**changes)
    return [unit.name.split("/")[1] for unit in CHECKS["evals"].units(scope.manifest, scope.tier)]


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("evals.fidelity", ["fidelity"] * 2),
        ("evals.routing", ["fidelity"] * 2),
        ("evals.free_running", ["free_running"] * 2),
        ("evals.acceptance", []),
        ("evals.task_scores", ["task"] * 6),
    ],
)
def test_only_what_a_gate_asks_for_runs(gate, expected):
    assert rungs(gates={"required": [gate]}) == expected
    assert rungs(gates={"required": ["numerics.error"], "optional": [gate]}) == expected


def test_exact_options_add_a_unit_per_deployment():
    engine = {"kind": "embedded", "exact_options": {"precision": "high"}}
    found = rungs(gates={"required": ["evals.fidelity"]}, engine=engine)
    assert found == ["fidelity", "fidelity-exact"] * 2


@pytest.mark.parametrize(
    ("sizes", "sequences", "expected"),
    [
        ([1, 2, 4, 8], 26, [1, 2, 4, 8, 8]),
        ([1, 2, 4, 8], 15, [1, 2, 4, 8]),
        ([1, 2, 4, 8, 64], 15, [1, 2, 4, 8, 64]),
        ([4], 8, [4, 4]),
        ([64], 8, [64]),
        ([1], 4, [1, 1]),
        ([1], 1, [1]),
    ],
)
def test_forced_batches_are_claimed_sizes_of_at_most_eight_and_one_crowd(sizes, sequences, expected):
    plan = batches.forced_of_one(sizes, sequences, 32)
    assert [b["requests"] for b in plan] == expected
    assert {b["tokens"] for b in plan if b["requests"] <= 8} <= {32}
    assert {b["tokens"] for b in plan if b["requests"] == 64 and len(plan) > 1} <= {3}


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8, 16, 32, 64], [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64], [16], [1, 8, 64]])
@pytest.mark.parametrize("sequences", [1, 15, 100])
def test_every_claimed_size_has_a_batch_and_somewhere_requests_come_and_go(sizes, sequences):
    plan = batches.forced_of_one(sizes, sequences, 12)
    assert {b["requests"] for b in plan} == set(sizes)
    assert any(b["late"] and b["far"] for b in plan)
    assert all(b["late"] for b in plan if b["requests"] == 1)
    assert all(b["far"] <= b["late"] <= b["requests"] for b in plan)
    for b in plan:
        assert not b["pause"] or b["requests"] - b["late"] in sizes, "steps of a size that nobody claimed"


def cell(tp):
    return CellKey(step="decode", tp=tp, requests=1)


def test_work_is_shared_by_deployments_and_bounded():
    shared = batches.forced({cell(1): [1, 2, 4, 8], cell(2): [1, 2, 4, 8]}, 30, 16)
    assert [b["requests"] for b in shared[cell(2)]] == [1, 2, 4, 8]
    assert len(batches.forced({cell(1): [1]}, 1000, 16)[cell(1)]) == batches.MOST_BATCHES // 2
    assert len(batches.forced({cell(1): [2]}, 1000, 16)[cell(1)]) == batches.MOST_BATCHES
    assert batches.free({cell(1): [1, 8], cell(2): [1]}, 30) == {cell(1): [1, 8, 8, 8, 8], cell(2): [1, 1, 1]}
    assert batches.free({cell(1): [4, 64]}, 30) == {cell(1): [4, 64]}
    assert len(batches.free({cell(1): [1]}, 1000)[cell(1)]) == 1 + batches.MOST_BATCHES


def test_routing_is_counted_per_sequence_and_layer():
    def steps(*rows):
        return [RoutingStep("r", 1, layer, experts) for layer, experts in rows]

    oracle = steps((1, [[1, 2], [3, 4]]), (2, [[1, 2], [3, 4]]))
    arm = steps((1, [[1, 2], [3, 5]]), (2, [[7, 9], [3, 4]]))
    assert count_routing(oracle, arm) == [
        {"choices": 2, "sets_differ": 1, "experts_differ": 2, "experts": 2, "layers": {2: 1}},
        {"choices": 2, "sets_differ": 1, "experts_differ": 1, "experts": 2, "layers": {1: 1}},
    ]
    with pytest.raises(EvidenceError, match="other rows"):
        count_routing(oracle, steps((1, [[1, 2]])))
    with pytest.raises(EvidenceError, match="other rows"):
        count_routing(oracle, [RoutingStep("r", 2, 1, [[1, 2], [3, 4]])])


def verify(accepted, drafts=3, kind="verify"):
    return LedgerStep("r", 0, kind, 2, 8, 8, drafts, 1, 1, 9, "specialized", None, {}, {}, [], [], accepted=accepted)


def test_a_draft_stands_when_all_before_it_do():
    steps = [
        verify([3, 0]),
        verify([1, 2]),
        verify([2], drafts=2),
        verify([3], kind="mixed"),
        verify([], kind="decode"),
    ]
    assert count(steps) == [(5, 4), (5, 3), (4, 1)]
    assert count([]) == []


def test_completions_against_a_reference():
    def done(tokens, reason="length", logprobs=None):
        return describe(Completion("x", tokens, reason, logprobs=logprobs), [1, 2, 3, 4])

    assert done([1, 2, 3, 4])["diverged"] is False
    assert (done([1, 2, 9, 4])["agreed"], done([1, 2, 9, 4])["diverged"]) == (2, True)
    assert (done([1, 2], "stop")["agreed"], done([1, 2], "stop")["diverged"]) == (2, True)
    assert done([1, 2], "stop")["truncated"] is False
    assert done([1], logprobs=[float("nan")])["nonfinite"] == 1


@pytest.mark.parametrize(
    ("tokens", "is_so"),
    [
        ([5] * 4, True),
        ([9, 5, 5, 5], False),
        ([1, 2] * 4, True),
        ([1, 2] * 3 + [1], False),
        (list(range(8)) * 4, True),
        (list(range(9)) * 4, False),
        ([5] * 40 + [6], False),
        ([], False),
    ],
)
def test_repetition(tokens, is_so):
    assert repetitive(tokens) is is_so


def free_only(unit):
    return unit.name.startswith("evals/free_running")


def test_free_running_covers_every_claimed_size_and_passes_on_an_honest_path(toy_scope, toy_records):
    records = [r for r in toy_records["evals"] if isinstance(r, FreeRunRecord)]
    assert {r.cell.requests for r in records} == {1, 4, 16}
    assert {r.reference for r in records} == {"oracle"}
    by_arm = {arm: [(r.unit, r.batch, r.request) for r in records if r.arm == arm] for arm in ("stock", "optimized")}
    assert by_arm["stock"] == by_arm["optimized"]
    assert len(by_arm["stock"]) >= toy_scope.knobs.free_running_requests
    result = GATES["evals.free_running"](toy_scope, toy_records["evals"])
    assert result.verdict == "pass", result.reason


def test_free_running_sees_a_fault(tmp_path):
    scope = toy_scope()
    records = run_units(scope, tmp_path, free_only, check="evals", target=Sabotaged("drop_partial"))
    assert GATES["evals.free_running"](scope, records).verdict == "fail"


class NoOracle:
    """The toy target as an engine without a higher precision and without full logits would have it."""

    def __getattr__(self, name):
        return getattr(TARGET, name)

    def engine(self, spec):
        if spec.arm == "oracle":
            raise EvidenceError("no higher precision here")
        return ToyEngine(spec)


def test_without_an_oracle_stock_in_other_company_is_the_reference(tmp_path):
    scope = toy_scope()
    records = run_units(scope, tmp_path, free_only, check="evals", target=NoOracle())
    texts = [r for r in records if isinstance(r, FreeRunRecord)]
    assert {r.reference for r in texts} == {"stock recomposed"}
    assert not any(r.diverged for r in texts if r.arm == "stock")  # the toy's rows do not see their neighbours
    assert GATES["evals.free_running"](scope, records).verdict in ("pass", "inconclusive")


def test_what_an_engine_cannot_do_is_a_record_and_no_crash(tmp_path):
    scope = toy_scope()
    records = run_units(
        scope, tmp_path, lambda unit: unit.name.startswith("evals/fidelity"), check="evals", target=NoOracle()
    )
    assert {(r.what, r.reason) for r in records if isinstance(r, NotMeasuredRecord)} == {
        ("fidelity", "no higher precision here")
    }
    result = GATES["evals.fidelity"](scope, records)
    assert result.verdict == "not_run"
    assert "no higher precision here" in result.reason


def test_acceptance_units_need_cells_with_drafts():
    row = {"name": "v", "step": "verify", "tp": [2], "requests": [1, 2], "draft_length": [3]}
    scope = [*TOY["scope"], row]
    units = rungs(gates={"required": ["evals.acceptance"]}, scope=scope)
    assert units == ["acceptance"]
