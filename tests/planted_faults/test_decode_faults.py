"""Faults of state, merging and sampling on TINY-A: the gate that answers for each must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit_run import run_units

from fasttrack.gates import GATES, GateResult, Scope
from fasttrack.manifest.model import Manifest
from fasttrack.target import Engine, EngineSpec
from kimi_k3.target import TARGET

PLAIN: dict[str, Any] = {"name": "plain", "tp": [8], "requests": [2]}
DSPARK: dict[str, Any] = {**PLAIN, "name": "dspark", "step": "verify", "draft_length": [3]}
DCP: dict[str, Any] = {**PLAIN, "name": "dcp", "dcp": ["tp"]}
DCP16: dict[str, Any] = {**DCP, "name": "dcp16", "tp": [16]}  # more ranks than the prompts have tokens

#: Fault -> the gate that must fail, and the cells it shows in.
EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "slot-after-rejection": ("evals.fidelity", DSPARK),
    "conv-window": ("evals.fidelity", PLAIN),
    "lse-base": ("evals.fidelity", DCP),
    "empty-shard": ("evals.fidelity", DCP16),
    "last-shard-dropped": ("evals.fidelity", DCP),
    "stale-prefix": ("evals.fidelity", PLAIN),
    "stale-mailbox": ("evals.fidelity", PLAIN),
    "rank-dropped": ("evals.fidelity", PLAIN),
    "norm-before-reduction": ("evals.fidelity", PLAIN),
    "decay-scaled": ("evals.fidelity", PLAIN),
    "expert-swapped": ("evals.fidelity", PLAIN),
    "penalty-ignored": ("features.penalties", DSPARK),
    "refuse-every-step": ("isolation.scope_coverage", PLAIN),
    "false-ledger": ("isolation.witnesses", PLAIN),
}


#: Units that say nothing about any of these gates.
OTHERS = ("isolation/a_a", "isolation/off", "isolation/refusals", "evals/free", "evals/routing")


def manifest(gate: str, row: dict[str, Any]) -> Manifest:
    options = {"checkpoint": "tiny-a", "drafter": "rehearsal"}
    return Manifest.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "target": "kimi_k3",
            "engine": {
                "kind": "embedded",
                "options": options,
                "exact_options": {"precision": "fp32"},
                "feature_options": {"precision": "fp64"},
            },
            "contexts": {"short": {"min": 1, "max": 64}},
            "scope": [row],
            "gates": {"required": [gate]},
            "tiers": {
                "smoke": {
                    "minutes": 1,
                    "fidelity_sequences": 8,
                    "fidelity_tokens": 24,
                    "decode_steps": 3,
                    "profiled_steps": 2,
                }
            },
        }
    )


class Sabotaged:
    """Kimi K3's target whose optimised arm carries a fault, or none."""

    def __init__(self, fault: str | None) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(TARGET, name)

    def engine(self, spec: EngineSpec) -> Engine:
        if spec.arm == "optimized" and self.fault is not None:
            spec = EngineSpec(**{**vars(spec), "arm": f"sabotaged:{self.fault}"})
        return TARGET.engine(spec)


def verdict(fault: str | None, gate: str, row: dict[str, Any], folder: Path) -> GateResult:
    """What ``gate`` says about a run of its check."""
    scope = Scope(manifest(gate, row), "smoke", TARGET.describe())
    records = run_units(
        scope,
        folder,
        lambda unit: not unit.name.startswith(OTHERS),
        check=gate.partition(".")[0],
        target=Sabotaged(fault),
    )
    return GATES[gate](scope, records)


@pytest.mark.parametrize(
    "gate", ["evals.fidelity", "features.penalties", "isolation.scope_coverage", "isolation.witnesses"]
)
def test_an_honest_path_is_not_called_wrong(gate: str, tmp_path: Path) -> None:
    for number, row in enumerate(
        row for wanted, row in {str(v): v for v in EXPECTED.values()}.values() if wanted == gate
    ):
        result = verdict(None, gate, row, tmp_path / str(number))
        assert result.verdict != "fail", result.reason


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_gate_that_answers_for_a_fault_fails(fault: str, tmp_path: Path) -> None:
    gate, row = EXPECTED[fault]
    result = verdict(fault, gate, row, tmp_path)
    assert result.verdict == "fail", result.reason
