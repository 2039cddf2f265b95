"""Teacher-forced comparison against closed forms, and a faulty arm seen by the gate."""

import math

import pytest
import torch
from harness import Sabotaged, run_units, toy_scope

from fasttrack.checks.fidelity import compare, unchanged
from fasttrack.checks.schedule import come_and_go, together
from fasttrack.gates import GATES
from fasttrack.manifest.model import Context
from fasttrack.records import FidelityRecord, StepRecord
from fasttrack.target import EngineInfo, LedgerStep


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_divergence_error_and_flips_against_hand_calculation():
    exact, arm = table([0.5, 0.3, 0.2], [0.1, 0.8, 0.1]), table([0.3, 0.5, 0.2], [0.1, 0.8, 0.1])
    found = compare(arm, exact, [0, 1], near_tie=0.1)
    divergence = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5)
    assert found["kl_sum"] == pytest.approx(divergence)
    assert found["kl_max"] == pytest.approx(divergence)
    assert found["abs_error_sum"] == pytest.approx(math.log(0.5 / 0.3))
    assert (found["top1_flips"], found["near_ties"], found["positions"]) == (1, 0, 2)
    assert compare(arm, exact, [0, 1], near_tie=math.log(0.5 / 0.3) + 1e-9)["near_ties"] == 1


def test_masked_tokens_are_not_errors_and_nan_is():
    exact = table([1.0, 0.0], [0.5, 0.5])
    assert compare(exact, exact, [0, 0], near_tie=0)["nonfinite"] == 0
    assert compare(exact, exact, [0, 0], near_tie=0)["kl_sum"] == 0
    arm = exact.clone()
    arm[1] = float("nan")
    assert compare(arm, exact, [0, 0], near_tie=0)["nonfinite"] == 2


def test_tables_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="forced tokens"):
        compare(table([1.0]), table([1.0]), [0, 0], near_tie=0)


def fidelity_only(unit):
    return unit.name.startswith("evals/fidelity")


def test_arms_share_sequences_and_the_optimised_one_runs_specialised(toy_scope, toy_records):
    records = [r for r in toy_records["evals"] if isinstance(r, FidelityRecord)]
    by_arm = {arm: [(r.unit, r.sequence) for r in records if r.arm == arm] for arm in ("stock", "optimized")}
    assert by_arm["stock"] == by_arm["optimized"]
    # Two deployments: two batches of one with a successor each, one of four with two, a crowd.
    assert len(by_arm["stock"]) == 2 * (2 * 2 + 4 + 2 + 16)
    assert {r.positions for r in records} == {5, 2}  # what came out of prefill is not judged
    steps = [r for r in toy_records["evals"] if isinstance(r, StepRecord) and r.arm == "optimized"]
    assert {s.path for s in steps if s.kind == "decode"} == {"specialized"}
    assert GATES["evals.fidelity"](toy_scope, toy_records["evals"]).verdict == "pass"


def test_every_claimed_batch_far_contexts_and_requests_that_come_and_go(toy_scope, toy_records):
    numbers = {n.name: n for n in GATES["evals.fidelity"](toy_scope, toy_records["evals"]).numbers}
    assert numbers["claimed batches covered decode/short"].unit == "of 6 cells (requests 1, 4, 16)"
    assert numbers["shortest of the deployments' longest contexts decode/short"].value >= 57  # of 64
    assert numbers["sequences that took over from others decode/short"].value == 2 * (2 + 2)
    steps = [
        r
        for r in toy_records["evals"]
        if isinstance(r, StepRecord) and r.arm == "optimized" and r.run.endswith("/4/optimized")
    ]
    slots = [s.slots for s in steps if s.kind == "decode"]
    assert [1, 2, 3, 4] in slots, "before"
    assert [3, 4, 1, 2] in slots, "after two have ended, and two others have their slots"


def test_rows_are_one_sequence_each_until_others_come_in():
    def step(index, kind, rows):
        facts = {"requests": rows, "padded_rows": rows, "draft_length": 0, "tp": 1, "dcp": 1, "context_max": 9}
        more = {"path": "stock", "reason": "x", "ops": {}, "providers": {}, "slots": [], "rank_hashes": []}
        return LedgerStep("r", index, kind, rows=rows, **facts, **more)

    kinds = [("prefill", 9), ("decode", 2), ("decode", 2), ("decode", 1), ("mixed", 9), ("decode", 2), ("decode", 1)]
    steps = [step(i, *k) for i, k in enumerate(kinds)]
    assert unchanged(steps, 2) == [{1, 2}, {5}]
    assert unchanged(steps[:4], 2) == [{1, 2}]
    assert unchanged(steps[:1], 2) == []


def test_requests_come_and_go_inside_the_bucket():
    info = EngineInfo("embedded", ("cpu",), "", 100, 512, (0,), {"page_size": 16}, "emulated")
    bucket = Context(min=1, max=256)
    requests = come_and_go(8, 12, bucket, info, 1, far=2, late=4, pause=2)
    assert [r.max_tokens for r in requests] == [6] * 4 + [12] * 4 + [6] * 4
    assert [r.arrival_step for r in requests] == [0] * 8 + [8] * 4
    assert [len(r.prompt) > 100 for r in requests] == [False] * 10 + [True] * 2
    assert len(requests[10].prompt) % 16 == 15, "its first decode row is the last of a page"
    assert len(requests[11].prompt) + 6 == 255
    single = come_and_go(1, 12, bucket, info, 1, far=1, late=1)
    assert [(r.max_tokens, r.arrival_step) for r in single] == [(6, 0), (6, 6)]
    assert come_and_go(3, 4, bucket, info, 9) == together(3, 4, bucket, info, 9)


@pytest.mark.parametrize(("fault", "verdict"), [("drop_partial", "fail"), ("refuse_all", "inconclusive")])
def test_faults_do_not_pass(fault, verdict, tmp_path):
    scope = toy_scope()
    records = run_units(scope, tmp_path, fidelity_only, check="evals", target=Sabotaged(fault))
    assert GATES["evals.fidelity"](scope, records).verdict == verdict
