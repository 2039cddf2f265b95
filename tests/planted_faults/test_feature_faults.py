"""Faults of features on TINY-A: the gate of the feature fails, plain or with drafts; without a fault it passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from feature_faults import FAULTS, Plant
from planted_target import PlantedTarget
from unit_run import run_units

from fasttrack.gates import GATES, GateResult, Scope
from fasttrack.gates.features import RULES
from fasttrack.manifest.model import Manifest
from kimi_k3.target import TARGET

SUBTLE = "rejected drafts not corrected for"


def verdict(feature: str, drafts: int, fault: Plant | None, folder: Path, variation: float = 0.3) -> GateResult:
    """``variation``: what the sampling tests must see; a smaller one takes more tokens."""
    row: dict[str, Any] = {"name": "row", "tp": [2], "requests": [8]}
    if drafts:
        row |= {"step": "verify", "draft_length": [drafts]}
    manifest = {
        "schema_version": 1,
        "name": "tiny",
        "target": "kimi_k3",
        "engine": {
            "kind": "embedded",
            "options": {"checkpoint": "tiny-a", "max_context": 320},
            "feature_options": {"precision": "fp64", "drafter": "rehearsal", "prefix_caching": True},
        },
        "contexts": {"short": {"min": 1, "max": 64}},
        "scope": [row],
        "gates": {"required": [f"features.{feature}"]},
        "margins": {"sampling": variation},
        "tiers": {"smoke": {"minutes": 1}},
    }
    scope = Scope(Manifest.model_validate(manifest), "smoke", TARGET.describe())
    records = run_units(scope, folder, check="features", target=PlantedTarget(TARGET, fault))
    return GATES[f"features.{feature}"](scope, records)


@pytest.mark.parametrize("drafts", [0, 3], ids=["plain", "dspark"])
@pytest.mark.parametrize("feature", RULES)
def test_an_honest_path_passes(feature: str, drafts: int, tmp_path: Path) -> None:
    result = verdict(feature, drafts, None, tmp_path)
    assert result.verdict == "pass", result.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_feature(name: str, tmp_path: Path) -> None:
    feature, drafts, fault = FAULTS[name]
    result = verdict(feature, drafts, fault, tmp_path, 0.2 if name == SUBTLE else 0.3)
    assert result.verdict == "fail", (result.verdict, result.reason)
