"""The embedded manifest claims the published scope, and its standard tier runs it with every feature required."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrack.gates.feature_units import feature_units, features_of
from fasttrack.manifest import Manifest, load_manifest
from fasttrack.plan.planner import make_plan
from kimi_k3 import names
from kimi_k3.target import TARGET

CONFIGS = Path(__file__).parents[2] / "configs"


def manifest(name: str) -> Manifest:
    return load_manifest(CONFIGS / f"kimi-k3-{name}.yaml", TARGET.describe())[0]


@pytest.fixture(scope="module")
def embedded() -> Manifest:
    return manifest("embedded")


def test_standard_covers_plain_every_draft_length_and_both_parallelisms(embedded: Manifest) -> None:
    cells = [cell.key for cell in embedded.cells("standard") if cell.named is None]
    for tp in (8, 16):
        drafts = {c.draft_length for c in cells if c.tp == tp and c.dcp == 1}
        assert drafts == set(names.DRAFT_LENGTHS)
        assert {c.dcp for c in cells if c.tp == tp} == {1, tp}
        assert {c.draft_length > 0 for c in cells if (c.tp, c.dcp) == (tp, tp)} == {True, False}
        assert max(c.rows for c in cells if c.tp == tp and c.draft_length) == names.MAX_ROWS


def test_every_feature_is_required_plain_and_with_drafts_at_both_sizes(embedded: Manifest) -> None:
    required = {g.removeprefix("features.") for g in embedded.gates.required if g.startswith("features.")}
    assert required == set(names.FEATURES) == set(features_of(embedded))
    for feature in names.FEATURES:
        cells = [u.cell for u in feature_units(embedded, "standard") if u.feature == feature]
        assert {c.tp for c in cells} == {8, 16}
        assert {c.draft_length > 0 for c in cells} == {True, False}
        assert any(c.dcp > 1 for c in cells)
        assert [u for u in feature_units(embedded, "smoke") if u.feature == feature]


def test_the_published_cells_are_those_of_the_gb300_manifests(embedded: Manifest) -> None:
    elsewhere = [c for name in ("gb300-tp8", "gb300-tp16") for c in manifest(name).named_cells]
    assert {c.name: c for c in embedded.named_cells} == {c.name: c for c in elsewhere}
    dspark = [c for c in embedded.named_cells if c.draft_length]
    assert len(dspark) == 2  # the article's run and the pull request's
    for cell in dspark:
        assert (cell.tp, cell.requests, cell.draft_length, cell.acceptance) == (16, 1, 7, "synthetic(6)")
        assert (cell.input_tokens, cell.output_tokens, cell.prefill) == (1, 1000, "excluded")
        assert cell.tokens(embedded.tier("standard").named_steps) == 1000


def test_both_tiers_plan_units_of_every_required_gate(embedded: Manifest) -> None:
    for tier in ("smoke", "standard"):
        plan = make_plan(embedded, TARGET.describe(), tier)
        assert not plan.unused_gates
        planned = {unit.check for unit in plan.units}
        assert planned == {gate.partition(".")[0] for gate in embedded.gates.required}
        assert any(unit.name == "performance/named/published-tp16-b1-dl7-al6" for unit in plan.units)
