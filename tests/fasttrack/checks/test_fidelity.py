"""Teacher-forced comparison against closed forms, and a faulty arm seen by the gate."""

import math

import pytest
import torch
from harness import Sabotaged, run_units, toy_scope

from fasttrack.checks.fidelity import compare
from fasttrack.gates import GATES
from fasttrack.records import FidelityRecord, StepRecord


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
    assert len(by_arm["stock"]) == toy_scope.knobs.fidelity_sequences + 2 * 16  # two deployments, a crowd each
    assert {r.positions for r in records} == {11, 3}  # what came out of prefill is not judged
    steps = [r for r in toy_records["evals"] if isinstance(r, StepRecord) and r.arm == "optimized"]
    assert {s.path for s in steps if s.kind == "decode"} == {"specialized"}
    assert GATES["evals.fidelity"](toy_scope, toy_records["evals"]).verdict == "pass"


@pytest.mark.parametrize(("fault", "verdict"), [("drop_partial", "fail"), ("refuse_all", "inconclusive")])
def test_faults_do_not_pass(fault, verdict, tmp_path):
    scope = toy_scope()
    records = run_units(scope, tmp_path, fidelity_only, check="evals", target=Sabotaged(fault))
    assert GATES["evals.fidelity"](scope, records).verdict == verdict
