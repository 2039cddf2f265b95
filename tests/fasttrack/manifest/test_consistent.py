"""Numbers that are none, names that are there twice and names of nothing: refused with file, line, field, hint."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fasttrack.errors import ManifestError, UsageError
from fasttrack.manifest import load_manifest, place
from fasttrack.target import find_target

ROW = {"name": "row", "tp": [8], "requests": [1, 64]}
GOOD: dict[str, Any] = {
    "schema_version": 1,
    "name": "toy",
    "target": "kimi_k3",
    "engine": {"kind": "embedded"},
    "scope": [ROW],
    "gates": {"required": ["numerics.error"]},
    "tiers": {"smoke": {"minutes": 1}},
}
PROBE = {"name": "p", "step": "prefill", "tp": 8, "requests": 2}
CELL = {"name": "c", "tp": 8, "requests": 1, "input_tokens": 1, "output_tokens": 8}
TASK = {"name": "t", "task": "aime25", "generated": True}


def deepcopy_each(data: Any) -> Any:
    """Without shared parts, which YAML would write as aliases."""
    return json.loads(json.dumps(data))


def message(tmp_path: Path, changes: dict[str, Any]) -> tuple[str, list[str]]:
    """What the reader says about the changed manifest, and the line of the file it says it about."""
    path = tmp_path / "m.yaml"
    text = yaml.safe_dump(deepcopy_each({**GOOD, **changes}), sort_keys=False)
    path.write_text(text)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, find_target("kimi_k3").describe())
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{path}:"), said
    line = int(said.removeprefix(f"{path}:").partition(":")[0])
    return said.removeprefix(f"{path}:{line}: "), text.splitlines()[line - 1].split()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scope": [{**ROW, "requests": [True]}]}, "scope.0.requests.0"),
        ({"scope": [{**ROW, "tp": "8"}]}, "scope.0.tp"),
        ({"scope": [{**ROW, "tp": ["8"]}]}, "scope.0.tp.0"),
        ({"scope": [{**ROW, "tp": [8.0]}]}, "scope.0.tp.0"),
        ({"probes": [{**PROBE, "tp": "8"}]}, "probes.0.tp"),
        ({"named_cells": [{**CELL, "requests": True}]}, "named_cells.0.requests"),
        ({"tasks": [{**TASK, "generated": 1}]}, "tasks.0.generated"),
        ({"margins": {"fidelity": "0.1"}}, "margins.fidelity"),
        ({"margins": {"speedup": True}}, "margins.speedup"),
        ({"tiers": {"smoke": {"minutes": "1"}}}, "tiers.smoke.minutes"),
        ({"tiers": {"smoke": {"minutes": 1, "decode_steps": True}}}, "tiers.smoke.decode_steps"),
        ({"tiers": {"smoke": {"minutes": 1, "cells": {"requests": ["1"]}}}}, "tiers.smoke.cells.requests.0"),
        ({"trained_checkpoint": "yes"}, "trained_checkpoint"),
        ({"schema_version": True}, "schema_version"),
        ({"schema_version": "1"}, "schema_version"),
    ],
)
def test_no_value_is_turned_into_another_type(tmp_path: Path, changes: dict[str, Any], field: str):
    said, _ = message(tmp_path, changes)
    assert said.startswith(f"{field}: "), said


def test_a_whole_number_is_also_a_number(tmp_path: Path):
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "margins": {"fidelity": 1, "speedup": 1.5}}))
    assert load_manifest(path)[0].margins.fidelity == 1.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"gates": {"required": ["numerics.error", "numerics.error"]}},
            "gates.required.1: gate 'numerics.error' is listed twice; expected each gate once",
        ),
        (
            {"gates": {"required": ["numerics.error"], "optional": ["evals.fidelity", "evals.fidelity"]}},
            "gates.optional.1: gate 'evals.fidelity' is listed twice; expected each gate once",
        ),
        (
            {"gates": {"required": ["numerics.error"], "optional": ["evals.fidelity", "numerics.error"]}},
            "gates.optional.1: gate 'numerics.error' is both required and optional; expected one of the two",
        ),
        ({"scope": [ROW, ROW]}, "scope.1.name: scope row or named cell 'row' is there twice; expected each name once"),
        ({"named_cells": [CELL, CELL]}, "named_cells.1.name: scope row or named cell 'c' is there twice"),
        ({"named_cells": [{**CELL, "name": "row"}]}, "named_cells.0.name: scope row or named cell 'row' is there"),
        ({"probes": [PROBE, PROBE]}, "probes.1.name: probe 'p' is there twice"),
        ({"tasks": [TASK, TASK]}, "tasks.1.name: task 't' is there twice"),
        ({"features": ["stop", "stop"]}, "features.1: feature 'stop' is there twice"),
    ],
)
def test_what_is_there_twice_is_refused_where_it_is_repeated(tmp_path: Path, changes: dict[str, Any], expected: str):
    said, words = message(tmp_path, changes)
    assert said.startswith(expected), said
    assert expected.split("'")[1] in words


@pytest.mark.parametrize(
    ("changes", "field", "unknown", "right"),
    [
        ({"gates": {"required": ["evals.fidelty"]}}, "gates.required.0", "evals.fidelty", "evals.fidelity"),
        (
            {"gates": {"required": ["numerics.error"], "optional": ["isolation.probs"]}},
            "gates.optional.0",
            "isolation.probs",
            "isolation.probes",
        ),
        ({"margins": {"fidelty": 0.1}}, "margins.fidelty", "fidelty", "fidelity"),
        ({"tasks": [TASK], "margins": {"task_points": {"tt": 2}}}, "margins.task_points.tt", "tt", "t"),
        ({"tiers": {"smoke": {"minuts": 1}}}, "tiers.smoke.minuts", "minuts", "minutes"),
        ({"scope": [{**ROW, "request": [1]}]}, "scope.0.request", "request", "requests"),
        ({"features": ["stopp"]}, "features.0", "stopp", "stop"),
        ({"default_tier": "standard"}, "default_tier", "standard", "smoke"),
        ({"scope": [{**ROW, "context": ["shrot"]}]}, "scope.0.context.0", "shrot", "short"),
        ({"probes": [{**PROBE, "context": "shrot"}]}, "probes.0.context", "shrot", "short"),
        ({"probes": [{**PROBE, "reason": "prefil"}]}, "probes.0.reason", "prefil", "prefill"),
        (
            {"tiers": {"smoke": {"minutes": 1, "cells": {"rows": ["rwo"]}}}},
            "tiers.smoke.cells.rows.0",
            "rwo",
            "row",
        ),
        (
            {"named_cells": [CELL], "tiers": {"smoke": {"minutes": 1, "cells": {"named": ["cc"]}}}},
            "tiers.smoke.cells.named.0",
            "cc",
            "c",
        ),
        ({"tasks": [{**TASK, "task": "aime52"}]}, "tasks.0.task", "aime52", "'aime25'"),
    ],
)
def test_an_unknown_name_is_met_with_the_nearest_known(
    tmp_path: Path, changes: dict[str, Any], field: str, unknown: str, right: str
):
    said, words = message(tmp_path, changes)
    assert said.startswith(f"{field}: "), said
    assert f"{unknown}" in said
    after = said.partition("expected ")[2] or said
    assert right in after.split(", of: ")[0], said
    assert any(unknown in word for word in words), "the line is another one"


def test_an_unknown_target_is_named_with_its_place(tmp_path: Path):
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "target": "kimi_k2"}, sort_keys=False))
    load_manifest(path)
    with pytest.raises(UsageError) as caught:
        find_target("kimi_k2", where=place(path, "target"))
    assert str(caught.value).startswith(f"{path}:3: target: unknown target 'kimi_k2'; expected ")
    assert "kimi_k3" in str(caught.value)


@pytest.mark.parametrize(
    ("acceptance", "right"), [("synthetic(4.5)", False), ("synthetic(0)", False), ("synthetic(4)", True)]
)
def test_an_acceptance_length_beyond_the_drafts_is_refused(tmp_path: Path, acceptance: str, right: bool):
    cell = {**CELL, "draft_length": 3, "acceptance": acceptance}
    if right:
        path = tmp_path / "m.yaml"
        path.write_text(yaml.safe_dump(deepcopy_each({**GOOD, "named_cells": [cell]})))
        load_manifest(path)
    else:
        said, _ = message(tmp_path, {"named_cells": [cell]})
        assert "named_cells.0.acceptance: acceptance length" in said
        assert "expected 1 to 4 tokens a step" in said


@pytest.mark.parametrize("acceptance", ["synthetic(1.2.3)", "synthetic(.)", "synthetic()"])
def test_an_acceptance_that_is_no_number_is_refused(tmp_path: Path, acceptance: str):
    said, _ = message(tmp_path, {"named_cells": [{**CELL, "acceptance": acceptance}]})
    assert "named_cells.0.acceptance" in said


@pytest.mark.parametrize(
    "knobs",
    [
        {"cells": {"rows": ["row"]}, "features": {"rows": ["other"]}},
        {"features": {"rows": ["other"], "requests": [64]}},
    ],
)
def test_features_on_a_deployment_that_the_tier_leaves_out_are_refused(tmp_path: Path, knobs: dict[str, Any]):
    scope = [ROW, {"name": "other", "tp": [16], "requests": [1]}]
    said, words = message(tmp_path, {"scope": scope, "tiers": {"smoke": {"minutes": 1, **knobs}}})
    assert said.startswith("tiers.smoke.features.rows.0: tier 'smoke' runs no cell of 'other'"), said
    assert words == ["-", "other"]
