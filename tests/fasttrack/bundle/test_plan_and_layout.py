"""What a bundle must have by its manifest, and may have by its format: units, files, the kept difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_tools import edit_json, fix_hashes, problems
from toy_run import MANIFEST, write_run

from fasttrack.bundle import seal
from fasttrack.bundle.content import parse_manifest
from fasttrack.bundle.planned import planned_units


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return seal(write_run(tmp_path / "run"), tmp_path, pr=7)


def test_a_plan_that_does_not_follow_from_the_manifest_is_named(bundle: Path):
    """An attacker who leaves out a unit of plan, journal and records, or adds one, and fixes every digest."""
    gone = "isolation/a_a/decode/tp2/r2/dl0/dcp1/short"

    def change(run):
        run["plan"] = [unit for unit in run["plan"] if unit["name"] != gone]
        run["plan"].append({**run["plan"][0], "name": "numerics/mine"})

    edit_json(bundle, "run.json", change)
    journal = bundle / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if gone not in line]
    journal.write_text("".join(lines), newline="\n")
    found = problems(fix_hashes(bundle))
    assert f"run.json: plan does not follow from the manifest: unit {gone} is missing" in found
    assert "run.json: plan does not follow from the manifest: unit numerics/mine is extra" in found


@pytest.mark.parametrize("checks", [None, [], "numerics", ["numerics", "mine"], [["numerics"]], [{}]])
def test_checks_that_are_none_are_named(bundle: Path, checks: object):
    edit_json(bundle, "run.json", lambda run: run.update(checks=checks))
    assert any(line.startswith("run.json: checks is not a list of some of numerics, ") for line in problems(bundle))


def test_a_task_whose_data_only_the_runner_has_is_planned_all_the_same(tmp_path: Path):
    tasks = "tasks:\n  - {name: aime25, task: aime25, data: nowhere.jsonl}\n"
    names = planned_units(
        parse_manifest((MANIFEST.replace("required: [", "required: [evals.task_scores, ") + tasks).encode()),
        "smoke",
        ["evals"],
    )
    assert names == ["evals/task/aime25/stock", "evals/task/aime25/optimized"]


def test_a_file_that_no_run_writes_is_named_even_if_the_hash_list_has_it(bundle: Path):
    for name in ("notes.txt", "records/mine.jsonl", "logs/mine.log", "weights/w.bin", "records/numerics.json"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text("{}\n")
    found = [line for line in problems(fix_hashes(bundle)) if "is no file of a bundle" in line]
    wanted = {"notes.txt", "records/mine.jsonl", "logs/mine.log", "weights/w.bin", "records/numerics.json"}
    assert {line.partition(":")[0] for line in found} == wanted


def test_the_kept_difference_is_the_one_of_the_environment(bundle: Path):
    (bundle / "dirty.diff").write_text("--- a/x\n+++ b/y\n")
    assert problems(fix_hashes(bundle))[:1] == ["dirty.diff: sha256 is not source.diff_sha256 of environment.json"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_clean_checkout_has_no_difference(bundle: Path, kept: bool):
    edit_json(bundle, "environment.json", lambda e: e["source"].update(dirty=False))
    if not kept:
        (bundle / "dirty.diff").unlink()
    wanted = (
        "dirty.diff: is there, but environment.json says that nothing was uncommitted"
        if kept
        else "environment.json: source says that nothing was uncommitted and gives the digest of a difference"
    )
    assert wanted in problems(fix_hashes(bundle))


def test_a_difference_by_digest_only_is_fine(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "dirty.diff").unlink()
    assert problems(seal(run, tmp_path / "b", pr=7)) == []
