"""The main job as a user runs it, with a target that has no Kimi in it: validate, bundle, verify; kills; bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_target import write_entry_point
from harness import TOY

HERE = Path(__file__).parent
GATES = [
    "numerics.error",
    "numerics.poison",
    "isolation.scope_coverage",
    "isolation.probes",
    "isolation.witnesses",
    "isolation.rank_agreement",
    "isolation.off_is_off",
    "isolation.a_a",
    "isolation.refusals",
    "evals.fidelity",
    "performance.accounting",
]


class Shell:
    """Runs ``fasttrack`` in an empty folder with the toy target registered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        info = write_entry_point(folder / "site")
        self.environment = {**os.environ, "PYTHONPATH": f"{info}:{HERE}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def manifest(self, **changes: Any) -> Path:
        path = self.folder / "toy.yaml"
        quick = {**TOY["tiers"]["smoke"], "decode_steps": 2, "performance_tokens": 3}
        data = {**TOY, "gates": {"required": GATES}, "tasks": [], "tiers": {"smoke": quick}, **changes}
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from fasttrack.cli.main import main; main()", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True
        )


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_validate_bundle_verify(shell: Shell):
    shell.manifest()
    done = shell.run("validate", "toy.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: pass" in done.stdout
    for gate in GATES:
        assert gate in done.stdout
    sealed = shell.run("bundle", "--pr", "7")
    assert sealed.returncode == 0, sealed.stderr
    (bundle,) = (shell.folder / "bundles").iterdir()
    verified = shell.run("verify", str(bundle), "--require", "pass")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "origin not proven" in verified.stdout
    (tied,) = [line for line in verified.stdout.splitlines() if line.startswith("tied ")]
    assert "isolation/a_a " in tied
    assert "performance " in tied
    with (bundle / "records" / "isolation.jsonl").open("a") as file:
        file.write("\n")
    broken = shell.run("verify", str(bundle))
    assert broken.returncode == 1
    assert "isolation.jsonl" in broken.stdout + broken.stderr


def test_a_hundred_line_target_goes_all_the_way(shell: Shell):
    """No ranks, no slots, one op: the protocol asks for no more than :mod:`hundred_lines` has."""
    names = shell.folder / "site" / "fasttrack_toy-1.dist-info" / "entry_points.txt"
    names.write_text("[fasttrack.targets]\nhundred = hundred_lines:TARGET\n")
    shell.manifest(
        target="hundred",
        scope=[{"name": "plain", "tp": [1], "requests": [1, 8]}],
        probes=[
            {"name": "m9", "step": "decode", "tp": 1, "requests": 9, "reason": "not_taken"},
            {"name": "prefill", "step": "prefill", "tp": 1, "requests": 2},
            {"name": "tp2", "step": "decode", "tp": 2, "requests": 1, "expect": "refused"},
        ],
    )
    done = shell.run("validate", "toy.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert shell.run("bundle", "--pr", "7").returncode == 0
    (bundle,) = (shell.folder / "bundles").iterdir()
    assert shell.run("verify", str(bundle), "--require", "pass").returncode == 0
    shown = shell.run("show", str(bundle))
    assert shown.returncode == 0
    assert "isolation.witnesses" in shown.stdout


def test_a_failing_gate_is_exit_1_and_its_bundle_still_verifies(shell: Shell):
    shell.manifest(probes=[{"name": "inside", "step": "decode", "tp": 2, "requests": 4}])
    done = shell.run("validate", "toy.yaml")
    assert done.returncode == 1
    assert "isolation.probes" in done.stdout
    assert shell.run("bundle", "--pr", "7").returncode == 0
    (bundle,) = (shell.folder / "bundles").iterdir()
    assert shell.run("verify", str(bundle)).returncode == 0
    assert shell.run("verify", str(bundle), "--require", "pass").returncode == 1


def test_a_required_gate_that_did_not_run_is_exit_3(shell: Shell):
    shell.manifest()
    assert shell.run("validate", "toy.yaml", "--check", "numerics").returncode == 3


def test_kill_and_continue(shell: Shell):
    """Finished units are not repeated, the killed attempt stays in the journal, the verdict is the same."""
    shell.manifest()
    with subprocess.Popen(
        shell.command("validate", "toy.yaml"), cwd=shell.folder, env=shell.environment, stderr=subprocess.DEVNULL
    ) as process:
        journal = _wait_for_units(shell.folder / "runs", 4)
        process.send_signal(signal.SIGKILL)
    before = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    finished = {e["unit"] for e in before if e["event"] == "finished"}
    done = shell.run("validate", "toy.yaml", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["resumed"]
    events = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    for unit in finished:
        assert [e["attempt"] for e in events if e["unit"] == unit and e["event"] == "started"] == [1]
    lost = {(e["unit"], e["attempt"]) for e in before if e["event"] == "started"} - {
        (e["unit"], e["attempt"]) for e in before if e["event"] != "started"
    }
    assert len(lost) <= 1
    undisturbed = json.loads(shell.run("validate", "toy.yaml", "--fresh", "--json").stdout)
    assert not undisturbed["resumed"]
    assert _verdicts(outcome) == _verdicts(undisturbed)
    assert len(list((shell.folder / "runs").iterdir())) == 2
    assert shell.run("bundle", "--pr", "7", "--run", outcome["run"]).returncode == 0


def _wait_for_units(runs: Path, count: int) -> Path:
    for _ in range(600):
        for journal in runs.glob("*/journal.jsonl"):
            if journal.read_text().count('"event": "finished"') >= count:
                return journal
        time.sleep(0.1)
    raise AssertionError("the run never got going")


def _verdicts(outcome: dict[str, Any]) -> list[tuple[str, str]]:
    return [(gate["gate"], gate["verdict"]) for gate in outcome["gates"]]


@pytest.mark.parametrize(
    ("manifest", "arguments", "words"),
    [
        (None, ["none.yaml"], "none.yaml: no such file"),
        ("a: [", ["toy.yaml"], "malformed YAML"),
        ({"speed": 1}, ["toy.yaml"], "speed: unknown key"),
        ({"scope": [{"name": "r", "tp": [2], "requests": [17]}]}, ["toy.yaml"], "17 rows"),
        ({"scope": [{"name": "r", "tp": [3], "requests": [1]}]}, ["toy.yaml"], "TP 3"),
        ({"schema_version": 2}, ["toy.yaml"], "newer"),
        ({"target": "moon"}, ["toy.yaml"], "'moon'"),
        ({"gates": {"required": ["moon.phase"]}}, ["toy.yaml"], "'moon.phase'"),
        ({}, ["toy.yaml", "--tier", "full"], "'full'"),
        ({"tiers": {"smoke": {"minutes": 1, "cells": {"tp": [64]}}}}, ["toy.yaml"], "selects no cell"),
        ({}, ["toy.yaml", "--run", "x" * 300], "cannot be written"),
        ({}, ["toy.yaml", "--check", "moon"], "'moon'"),
        ({}, ["toy.yaml", "--runs", "toy.yaml"], "regular file"),
        ({}, ["toy.yaml", "--run", "toy.yaml"], "regular file"),
        ({"tasks": [{"name": "t", "task": "aime25", "data": "empty.jsonl"}]}, ["toy.yaml"], "empty.jsonl"),
        ({"tasks": [{"name": "t", "task": "aime25", "data": "none.jsonl"}]}, ["toy.yaml"], "none.jsonl"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_leaves_nothing(shell: Shell, manifest: Any, arguments: list[str], words: str):
    (shell.folder / "empty.jsonl").write_text("")
    if isinstance(manifest, str):
        (shell.folder / "toy.yaml").write_text(manifest)
    elif manifest is not None:
        tasks = {"gates": {"required": [*GATES, "evals.task_scores"]}} if "tasks" in manifest else {}
        shell.manifest(**{**tasks, **manifest})
    before = sorted(p.name for p in shell.folder.iterdir())
    done = shell.run("validate", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(p.name for p in shell.folder.iterdir()) == before


def test_two_runs_at_a_time_do_not_share_a_folder(shell: Shell):
    shell.manifest(gates={"required": ["isolation.refusals", "numerics.error"]})
    command = shell.command("validate", "toy.yaml", "-q")
    both = [subprocess.Popen(command, cwd=shell.folder, env=shell.environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    runs = list((shell.folder / "runs").iterdir())
    assert len(runs) == 2
    for folder in runs:
        assert shell.run("bundle", "--pr", "7", "--run", str(folder)).returncode == 0


def test_missing_hardware_is_said_before_anything_runs(shell: Shell):
    shell.manifest(hardware={"accelerator": "NVIDIA GB300", "count": 8})
    done = shell.run("validate", "toy.yaml")
    assert done.returncode == 3
    assert "8 x NVIDIA GB300" in done.stderr
    assert not (shell.folder / "runs").exists()


def test_a_crash_inside_a_check_is_exit_4_with_the_traceback_kept(shell: Shell):
    shell.manifest()
    site = shell.folder / "site" / "sitecustomize.py"
    site.write_text(
        "import fasttrack.checks.numerics as n\n"
        "def crash(self, unit, ctx): raise ZeroDivisionError('planted')\n"
        "n.NumericsCheck.run = crash\n"
    )
    done = shell.run("validate", "toy.yaml")
    assert done.returncode == 4, done.stderr
    (log,) = (shell.folder / "runs").glob("*/logs/*.log")
    assert "planted" in log.read_text()
    journal = next((shell.folder / "runs").glob("*/journal.jsonl")).read_text()
    assert '"failed"' in journal
    site.unlink()
    assert shell.run("validate", "toy.yaml").returncode == 0, "a repaired crash is continued"
