"""The isolation check on the toy target: faults reach the gate that answers for them."""

import pytest
from harness import Sabotaged, run_units, toy_scope

from fasttrack.checks import CHECKS
from fasttrack.checks.isolation import outside
from fasttrack.checks.schedule import prompt_length, together
from fasttrack.engines.cache import EngineCache
from fasttrack.errors import UsageError
from fasttrack.gates import GATES
from fasttrack.manifest.model import Context
from fasttrack.records import RefusalRecord, StepRecord, TraceRecord
from fasttrack.target import DeploymentRefused, EngineInfo, Limits

INFO = EngineInfo("embedded", ("cpu",), "", 100, 64, (0,), {}, "emulated")
NO_PROBES = {"probes": []}


def cells_only(unit):
    return unit.name.startswith("isolation/cell")


def failing(records, scope):
    """Gates that fail; those that lack records are not failures."""
    results = [GATES[name](scope, records) for name in GATES if name.startswith("isolation.")]
    return {r.gate: r.reason for r in results if r.verdict == "fail"}


def test_refusing_every_step_fails_scope_coverage(tmp_path):
    scope = toy_scope(**NO_PROBES)
    records = run_units(scope, tmp_path, cells_only, check="isolation", target=Sabotaged("refuse_all"))
    assert set(failing(records, scope)) == {"isolation.scope_coverage"}


def test_a_ledger_that_lies_fails_the_witnesses(tmp_path):
    scope = toy_scope(**NO_PROBES)
    records = run_units(scope, tmp_path, cells_only, check="isolation", target=Sabotaged("false_ledger"))
    assert set(failing(records, scope)) == {"isolation.witnesses"}
    assert "saw no target op" in failing(records, scope)["isolation.witnesses"]


def test_a_cell_that_the_target_refuses_is_a_failed_claim_and_no_crash(tmp_path):
    class Refusing(Sabotaged):
        def engine(self, spec):
            if spec.arm == "optimized":
                raise DeploymentRefused(["no multicast"])
            return super().engine(spec)

    scope = toy_scope(**NO_PROBES)
    records = run_units(scope, tmp_path, cells_only, check="isolation", target=Refusing(""))
    assert "no multicast" in failing(records, scope)["isolation.scope_coverage"]
    for check, gate in (("performance", "performance.accounting"), ("evals", "evals.fidelity")):
        records = run_units(scope, tmp_path, lambda u: "task" not in u.name, check=check, target=Refusing(""))
        assert any(isinstance(r, RefusalRecord) for r in records)
        assert GATES[gate](scope, records).verdict != "pass"


def test_each_cell_gets_the_steps_the_tier_asks_for(toy_scope, toy_records):
    knobs = toy_scope.knobs
    for cell in toy_scope.cells():
        own = [r for r in toy_records["isolation"] if r.unit == f"isolation/cell/{cell}"]
        steps = [r for r in own if isinstance(r, StepRecord) and toy_scope.is_step_of(r, cell)]
        assert len(steps) == knobs.decode_steps
        assert len([r for r in own if isinstance(r, TraceRecord)]) == knobs.profiled_steps


def test_units_are_unique_planned_without_torch_and_name_their_cells(toy_scope):
    units = CHECKS["isolation"].units(toy_scope.manifest, "smoke")
    assert len({u.name for u in units}) == len(units)
    assert sum(u.name.startswith("isolation/cell/") for u in units) == len(toy_scope.cells())
    assert sum(u.name.startswith("isolation/a_a/") for u in units) == 2  # one per deployment


def test_requests_that_arrive_together_fit_the_bucket_and_differ():
    requests = together(5, 4, Context(min=10, max=20), INFO, seed=3)
    assert {len(r.prompt) for r in requests} <= set(range(10, 17))
    assert len({r.prompt for r in requests}) == 5
    assert all(0 not in r.prompt for r in requests), "an end token in a prompt"
    assert requests == together(5, 4, Context(min=10, max=20), INFO, seed=3)
    assert requests != together(5, 4, Context(min=10, max=20), INFO, seed=4)
    late = together(5, 4, Context(min=1, max=20), INFO, seed=3, late=2, arrival_step=6)
    assert [r.arrival_step for r in late] == [0, 0, 0, 6, 6]


@pytest.mark.parametrize(("low", "high"), [(61, 64), (1, 3), (100, 200)])
def test_a_bucket_without_room_is_a_usage_error(low, high):
    with pytest.raises(UsageError, match="no room for 4 more"):
        prompt_length(Context(min=low, max=high), 4, INFO)


def test_deployments_outside_the_limits_violate_what_they_say():
    limits = Limits(tensor_parallel=(1, 2, 8, 16), max_rows=64, draft_lengths=(0, 3), context_parallel=("1", "tp"))
    for deployment in outside(limits):
        tp_bad = deployment["tp"] not in limits.tensor_parallel
        dcp_bad = deployment["dcp"] not in (1, deployment["tp"])
        assert deployment["violations"] == tp_bad + dcp_bad > 0
        assert deployment["draft_length"] in limits.draft_lengths


def test_engines_are_shared_reset_and_closed(tmp_path):
    built, closed = [], []

    class Counting(Sabotaged):
        def engine(self, spec):
            engine = super().engine(spec)
            built.append((spec.arm, spec.tp, spec.switch_value, spec.max_requests))
            close = engine.close
            engine.close = lambda: (closed.append(spec.tp), close())
            return engine

    engines = EngineCache(Counting(""), toy_scope(), tmp_path, seed=0, capacity=2)
    deployment = {"dcp": 1, "draft_length": 0, "acceptance": "none"}
    first = engines.get("stock", tp=1, **deployment)
    assert engines.get("stock", tp=1, **deployment) is first
    engines.get("optimized", tp=1, **deployment)
    engines.get("stock", tp=2, **deployment)
    assert built[0] == ("stock", 1, "auto", 17), "as many requests as the largest probe has, in every arm"
    assert built[1] == ("optimized", 1, "fast", 17)
    assert closed == [1]
    engines.close()
    assert len(closed) == len(built) == 3
