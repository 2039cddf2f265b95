"""Small wrong formulas of the optimised path on TINY-A: forced logits or routing must call each by its verdict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kda_and_routing_faults import FAULTS, plant
from planted_target import PlantedTarget
from unit_run import run_units

from fasttrack.gates import GATES, GateResult, Scope
from fasttrack.manifest.model import Manifest
from fasttrack.records import FidelityRecord, RoutingRecord
from kimi_k3.target import TARGET

MANIFEST: dict[str, Any] = {
    "schema_version": 1,
    "name": "tiny",
    "target": "kimi_k3",
    "engine": {"kind": "embedded", "options": {"checkpoint": "tiny-a"}, "exact_options": {"precision": "fp32"}},
    "scope": [{"name": "plain", "tp": [8], "requests": [1, 2, 4]}],
    "gates": {"required": ["evals.fidelity", "evals.routing"]},
    "tiers": {"smoke": {"minutes": 1, "fidelity_sequences": 24, "fidelity_tokens": 10}},
}


def ladder(fault: str | None, folder: Path) -> tuple[list[Any], dict[str, GateResult]]:
    """Records and verdicts of the first two rungs."""
    scope = Scope(Manifest.model_validate(MANIFEST), "smoke", TARGET.describe())
    records = run_units(scope, folder, check="evals", target=PlantedTarget(TARGET, fault and partial(plant, fault)))
    gates = ("evals.fidelity", "evals.routing")
    return records, {gate: GATES[gate](scope, records) for gate in gates}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, GateResult]]:
    return ladder(None, tmp_path_factory.mktemp("honest"))


def exact_ratio(result: GateResult) -> float:
    return float(next(n.value for n in result.numbers if n.name == "error ratio decode/short/exact"))


def test_an_honest_path_is_not_called_wrong(honest: tuple[list[Any], dict[str, GateResult]]) -> None:
    records, results = honest
    assert "fail" not in {r.verdict for r in results.values()}, [r.reason for r in results.values()]
    assert 0.5 < exact_ratio(results["evals.fidelity"]) < 1.5
    for kind in (FidelityRecord, RoutingRecord):
        assert {(r.arm, r.exact) for r in records if isinstance(r, kind)} == {
            (arm, exact) for arm in ("stock", "optimized") for exact in (False, True)
        }
    exact = [r for r in records if isinstance(r, RoutingRecord) and r.exact]
    assert sum(r.sets_differ for r in exact) == 0
    assert sum(r.choices for r in exact) > 500


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_formula_is_caught(fault: str, tmp_path: Path) -> None:
    _, results = ladder(fault, tmp_path)
    fidelity = results["evals.fidelity"]
    assert fidelity.verdict == "fail", fidelity.reason
    assert exact_ratio(fidelity) > 10
    assert "exact" in fidelity.reason


def test_a_swapped_expert_shows_in_the_routing(tmp_path: Path) -> None:
    records, results = ladder("one expert swapped with another", tmp_path)
    assert results["evals.routing"].verdict == "fail"
    layers = {layer for r in records if isinstance(r, RoutingRecord) and r.exact for layer in r.layers}
    assert min(layers) == 3  # the third mixture layer: nothing upstream was touched
