"""The runner judges what finished, and never passes a run of which a part is missing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_target import TARGET
from harness import TOY

from fasttrack import environment
from fasttrack.cli import main as cli
from fasttrack.run import runner
from fasttrack.run.folder import RunFolder
from fasttrack.run.journal import read_journal
from fasttrack.run.runner import Request, validate

QUICK = {"gates": {"required": ["numerics.error"], "optional": ["isolation.refusals"]}, "tasks": []}


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy manifest whose isolation units do nothing."""
    monkeypatch.setattr(runner, "find_target", lambda name, **_: TARGET)
    monkeypatch.setattr("fasttrack.checks.isolation.IsolationCheck.run", lambda self, unit, ctx: None)
    # A run is continued by the code that began it: an edit of this checkout meanwhile would make it another run.
    monkeypatch.setattr(runner, "source_state", lambda root: environment.SourceState(None, None, "", ()))
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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that a shell has started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("fresh", [False, True])
def test_an_interrupted_run_says_how_to_go_on(manifest: Path, monkeypatch, capsys, fresh: bool):
    """The signal comes in the middle of a unit that has written records."""

    def run(self: Any, unit: Any, ctx: Any) -> None:
        if "interrupt" in pending and unit.name == "isolation/refusals":
            ctx.write_refusal({"tp": 3}, ["no"])
            pending.clear()
            signal.raise_signal(signal.SIGINT)

    pending = {"interrupt"}
    monkeypatch.setattr("fasttrack.checks.isolation.IsolationCheck.run", run)
    arguments = ["validate", str(manifest), "-q"]
    assert cli.run([*arguments, "--fresh"] if fresh else arguments) == 130
    (folder,) = Path("runs").iterdir()
    planned = len(json.loads((folder / "run.json").read_bytes())["plan"])
    more = " without --fresh" if fresh else ""
    assert capsys.readouterr().err == (
        f"fasttrack: interrupted: {planned - 1} of {planned} units finished in {folder};"
        f" the same command{more} continues there\n"
    )
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [(e["event"], e["attempt"]) for e in events if e["unit"] == "isolation/refusals"] == [
        ("started", 1),
        ("interrupted", 1),
    ]
    assert cli.run(arguments) == 0
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]
    assert read_journal(folder / "journal.jsonl").finished["isolation/refusals"] == 2


def test_a_signal_while_a_run_folder_is_made_leaves_nothing(tmp_path: Path, monkeypatch):
    def interrupted(path: Path, data: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttrack.run.folder.write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path / "run").create(b"", {}, {}, "")
    assert list(tmp_path.iterdir()) == []


def test_secrets_stay_out_of_what_is_published(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    found = environment.collect_environment(environment.SourceState(None, None, "", ()))["variables"]
    assert (found["VLLM_API_KEY"], found["VLLM_USE_V1"]) == ("(set)", "1")
