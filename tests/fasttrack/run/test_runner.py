"""The runner judges what finished, and never passes a run of which a part is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_target import TARGET
from harness import TOY

from fasttrack import environment
from fasttrack.run import runner
from fasttrack.run.runner import Request, validate

QUICK = {"gates": {"required": ["numerics.error"], "optional": ["isolation.refusals"]}, "tasks": []}


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy manifest whose isolation units do nothing."""
    monkeypatch.setattr(runner, "find_target", lambda name, **_: TARGET)
    monkeypatch.setattr("fasttrack.checks.isolation.IsolationCheck.run", lambda self, unit, ctx: None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump({**TOY, **QUICK}))
    return path


def test_a_run_without_one_of_its_units_does_not_pass(manifest: Path, monkeypatch: pytest.MonkeyPatch):
    real = runner._attempt

    def lost(folder: Any, context: Any) -> int:
        return 0 if context.unit.name == "isolation/refusals" else real(folder, context)

    assert validate(Request(manifest, runs=Path("whole"))).verdict == "pass"
    monkeypatch.setattr(runner, "_attempt", lost)
    outcome = validate(Request(manifest, runs=Path("part")))
    assert (outcome.verdict, outcome.unfinished) == ("inconclusive", ("isolation/refusals",))
    assert [r.verdict for r in outcome.results if r.gate == "numerics.error"] == ["pass"]
    assert json.loads((outcome.folder / "gates.json").read_bytes())["verdict"] == "inconclusive"


def test_secrets_stay_out_of_what_is_published(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    found = environment.collect_environment(environment.SourceState(None, None, "", ()))["variables"]
    assert (found["VLLM_API_KEY"], found["VLLM_USE_V1"]) == ("(set)", "1")
