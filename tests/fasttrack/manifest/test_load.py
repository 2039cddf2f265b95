"""A manifest is read completely or refused with one line that says file, line, field and what would be right."""

from pathlib import Path

import pytest
import yaml

from fasttrack.errors import ManifestError
from fasttrack.manifest import load_manifest
from fasttrack.target import find_target

CONFIGS = Path(__file__).parents[3] / "configs"
GOOD = {
    "schema_version": 1,
    "name": "toy",
    "target": "kimi_k3",
    "engine": {"kind": "embedded"},
    "scope": [{"name": "row", "tp": [8], "requests": [1, 64]}],
    "gates": {"required": ["numerics.error"]},
    "tiers": {"smoke": {"minutes": 1}},
}


def write(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return path


def changed(**changes: object) -> dict:
    return {**GOOD, **changes}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_manifests_lie_within_their_targets_limits(path: Path):
    manifest, raw = load_manifest(path, find_target("kimi_k3").describe())
    assert raw == path.read_bytes()
    assert manifest.name == path.stem
    assert all(key.rows <= 64 for key in manifest.all_cells())


def test_published_rows_are_named_cells_and_two_experiments_stay_apart():
    manifest, _ = load_manifest(CONFIGS / "kimi-k3-gb300-tp16.yaml")
    cells = {cell.name: cell for cell in manifest.named_cells}
    article, pull_request = cells["published-tp16-b1-dl7-al6"], cells["published-tp16-b1-dl7-al6-pr"]
    assert (article.published[0].value, article.published[0].baseline) == (842, 488)
    assert (pull_request.published[0].value, pull_request.published[0].baseline) == (838, 489)
    assert article.published[0].source != pull_request.published[0].source
    assert (article.input_tokens, article.output_tokens, article.acceptance) == (1, 1000, "synthetic(6)")


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (changed(speed=1), 19, ["speed", "unknown key"]),
        (changed(schema_version=2), 1, ["schema_version", "newer"]),
        (changed(scope=[{"name": "r", "tp": [8], "requests": [65]}]), 10, ["requests", "65", "64"]),
        (changed(scope=[{"name": "r", "tp": [3], "requests": [1]}]), 8, ["tp", "TP 3", "8"]),
        (changed(scope=[{"name": "r", "tp": [8], "requests": ["x"]}]), 11, ["scope.0.requests.0", "'x'"]),
        (changed(scope=[{"name": "r", "tp": [8], "requests": [9], "step": "verify", "draft_length": [7]}]), 10, ["72"]),
        (changed(scope=[{"name": "r", "tp": [8], "requests": [1], "dcp": [2]}]), 12, ["dcp", "1 or tp"]),
        (changed(scope=[{"name": "r", "tp": [8], "requests": [1], "context": ["long"]}]), 13, ["'long'", "short"]),
        ({k: v for k, v in GOOD.items() if k != "engine"}, 1, ["engine", "missing"]),
        (changed(hardware={"accelerator": "none", "count": 3}), 19, ["hardware", "count must be 0"]),
        (changed(probes=[{"name": "p", "step": "decode", "tp": 8, "requests": 65, "reason": "moon"}]), 24, ["'moon'"]),
        (changed(features=["levitation"]), 20, ["levitation"]),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, data: dict, line: int, words: list[str]):
    path = write(tmp_path, data)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, find_target("kimi_k3").describe())
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", "malformed YAML"),
        ("name: x\nname: y\n", "given twice"),
        ("- 1\n", "is not a mapping"),
        ("", "is not a mapping"),
        ("a: &a [1]\nb: [*a, *a]\n", "m.yaml:2: uses a YAML alias"),
        ("[" * 3000, "m.yaml"),
    ],
)
def test_broken_yaml_is_one_line(tmp_path: Path, text: str, words: str):
    with pytest.raises(ManifestError) as caught:
        load_manifest(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for path, words in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "folder"),
        (tmp_path / "latin.yaml", "UTF-8"),
    ):
        with pytest.raises(ManifestError, match=words):
            load_manifest(path)


def test_cells_expand_once_and_tiers_select(tmp_path: Path):
    rows = [
        {"name": "a", "tp": [8, 16], "requests": [1, 2], "dcp": [1, "tp"]},
        {"name": "b", "tp": [8], "requests": [2, 4]},
    ]
    tiers = {"smoke": {"minutes": 1, "cells": {"tp": [8], "dcp": [1]}}, "full": {"minutes": 9}}
    manifest, _ = load_manifest(write(tmp_path, changed(scope=rows, tiers=tiers)))
    assert [str(c.key) for c in manifest.cells("smoke")] == [
        "decode/tp8/r1/dl0/dcp1/short",
        "decode/tp8/r2/dl0/dcp1/short",
        "decode/tp8/r4/dl0/dcp1/short",
    ]
    assert len(manifest.cells("full")) == 9
    assert {key.dcp for key in manifest.all_cells()} == {1, 8, 16}
