"""The three verbs that read runs and bundles: exit codes, what they print, and one line for bad input."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_run import HEAD, default_records, event, numerics, write_json, write_run

from fasttrack.cli.main import run as fasttrack


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one finished run below ``runs/``."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/toy-20260102T030405Z"))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = fasttrack(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def sealed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    code, out, err = call(capsys, "bundle", "--pr", "7", "--json", *more)
    assert code == 0, err
    return str(json.loads(out)["bundle"])


def test_bundle_prints_root_and_binding(home: Path, capsys):
    code, out, _ = call(capsys, "bundle", "--pr", "61867", "--repo", "vllm-project/vllm")
    assert code == 0
    assert "unbound" in out
    (bundle,) = Path("bundles").iterdir()
    root = next(line.split()[1] for line in out.splitlines() if line.startswith("root"))
    assert f"fasttrack verify {bundle} --digest {root}" in out
    code, out, _ = call(capsys, "verify", str(bundle), "--digest", root)
    assert code == 0
    assert "origin   matches the given digest" in out
    assert "code     fasttrack " in out
    assert "note " not in out
    assert "unbound" in out


def test_verify_says_that_other_code_than_the_head_commit_ran(home: Path, capsys):
    _, out, _ = call(capsys, "verify", sealed(capsys, "--head", HEAD))
    assert f"note     the code that ran is not a clean checkout of head commit {HEAD}" in out


def test_bundle_takes_the_run_that_ended_last(home: Path, capsys):
    write_run(Path("runs/toy-20260101T000000Z"))  # an older name, but it ended later
    info = json.loads(Path("runs/toy-20260101T000000Z/run.json").read_bytes())
    write_json(Path("runs/toy-20260101T000000Z/run.json"), {**info, "finished": "2026-02-01T00:00:00.000Z"})
    write_run(Path("runs/toy-20270101T000000Z"), edit_journal=lambda e: e[:-1], gates=False)
    code, out, _ = call(capsys, "bundle", "--pr", "7")
    assert code == 0
    assert "run      runs/toy-20260101T000000Z" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pr", "7", "--head", "abc"], "40 (SHA-1) or 64"),
        (["--pr", "0"], "a number from 1"),
        (["--pr", "x"], "integer"),
        ([], "--pr"),
        (["--pr", "7", "--repo", "nonsense"], "owner/name"),
        (["--pr", "7", "--run", "nowhere"], "no such folder"),
        (["--pr", "7", "--runs", "nowhere"], "no such folder"),
        (["--pr", "7", "--runs", "empty"], "holds no finished run"),
        (["--pr", "7", "--out", "x" * 300], "name too long; expected a shorter one"),
    ],
)
def test_bundle_refuses_in_one_line(home: Path, capsys, arguments: list[str], named: str):
    Path("empty").mkdir()
    code, out, err = call(capsys, "bundle", *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1
    assert not Path("bundles").exists()


def test_an_unfinished_run_is_refused_in_one_line(home: Path, capsys):
    write_run(Path("half"), edit_journal=lambda events: events[:-1], gates=False)
    code, _, err = call(capsys, "bundle", "--pr", "7", "--run", "half")
    assert (code, err.count("\n")) == (2, 1)
    assert (
        "the run is not over: 1 of 13 units neither finished nor failed, first performance/decode/tp2/r1/dl0/dcp1/short"
        in err
    )


def test_verify_without_a_digest_says_what_is_not_proven(home: Path, capsys):
    code, out, _ = call(capsys, "verify", sealed(capsys, "--head", HEAD))
    assert code == 0
    assert "origin   internally consistent, origin not proven" in out
    assert "verdict  pass (follows from the records)" in out
    assert any(line.startswith("root     ") and len(line.split()[1]) == 64 for line in out.splitlines())


def test_verify_names_every_problem_and_exits_1(home: Path, capsys):
    bundle = Path(sealed(capsys))
    (bundle / "report.md").unlink()
    (bundle / "extra.txt").write_text("")
    data = bytearray((bundle / "run.json").read_bytes())
    data[-3] ^= 1
    (bundle / "run.json").write_bytes(data)
    code, out, _ = call(capsys, "verify", str(bundle))
    assert code == 1
    for line in (
        "report.md: is missing",
        "extra.txt: is extra, not in hashes.json",
        "run.json: was changed (sha256 differs)",
    ):
        assert f"problem  {line}" in out.splitlines()
    assert "follows from the records" not in out
    assert "origin   not intact" in out
    code, out, _ = call(capsys, "verify", str(bundle), "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["intact"]
    assert "report.md: is missing" in found["problems"]


def test_require_pass(home: Path, capsys):
    records = default_records()
    records["numerics/normal"][0] = numerics("toy::update", "normal", worst=40.0, failing=9)
    write_run(Path("failed"), records)
    bundle = sealed(capsys, "--run", "failed")
    code, out, _ = call(capsys, "verify", bundle)
    assert code == 0
    assert "verdict  fail" in out
    code, out, _ = call(capsys, "verify", bundle, "--require", "pass")
    assert code == 1
    assert "required pass, and the verdict is fail" in out
    assert call(capsys, "verify", sealed(capsys, "--run", "runs/toy-20260102T030405Z"), "--require", "pass")[0] == 0
    assert call(capsys, "verify", bundle, "--require", "fail")[0] == 2


def test_verify_bad_input(home: Path, capsys):
    bundle = sealed(capsys)
    for arguments in (["nowhere"], [bundle, "--digest", "abc"]):
        code, _, err = call(capsys, "verify", *arguments)
        assert (code, err.count("\n")) == (2, 1)


def test_verify_json(home: Path, capsys):
    code, out, _ = call(capsys, "verify", sealed(capsys, "--head", HEAD), "--json")
    found = json.loads(out)
    assert (code, found["intact"], found["verdict"], found["binding"]) == (0, True, "pass", "bound")
    assert found["gates"][0]["gate"] == "numerics.error"


def test_a_hostile_bundle_does_not_reach_the_terminal(home: Path, capsys):
    bundle = Path(sealed(capsys))
    (bundle / "\x1b]0;owned\x07.txt").write_text("")
    (bundle / "run.json").write_text('{"schema_version": 1, "\x1b[2J\\u001b[31m": 1}')
    code, out, err = call(capsys, "verify", str(bundle))
    assert code == 1
    assert "\x1b" not in out + err


@pytest.mark.parametrize("kind", ["run", "bundle"])
def test_show(home: Path, capsys, kind: str):
    path = "runs/toy-20260102T030405Z" if kind == "run" else sealed(capsys)
    code, out, _ = call(capsys, "show", path)
    assert code == 0
    assert "13 units: 13 finished, 0 failed, 0 remaining; 23 records, 0 attempts did not finish" in out
    assert "worst error / bound" in out
    assert "verdict  pass" in out
    code, out, _ = call(capsys, "show", path, "--json")
    assert json.loads(out)["kind"] == kind


def test_show_gate_and_unit(home: Path, capsys):
    path = "runs/toy-20260102T030405Z"
    code, out, _ = call(capsys, "show", path, "--gate", "isolation.scope_coverage", "--limit", "2")
    assert code == 0
    assert "isolation.scope_coverage: pass." in out
    assert "step records: 7, first 2" in out
    assert "numerics.error" not in out
    code, out, _ = call(capsys, "show", path, "--gate", "numerics", "--json")
    assert len(json.loads(out)["gates"]) == 2
    assert len(json.loads(out)["records"]) == 10
    code, out, _ = call(capsys, "show", path, "--unit", "isolation/cell/decode/tp2/r2/dl0/dcp1/short")
    assert "isolation/cell/decode/tp2/r2/dl0/dcp1/short, attempt 1: finished" in out
    assert "engine records: 2" in out
    assert "step records: 3" in out
    for option, value in (("--gate", "nonsense"), ("--unit", "nonsense")):
        code, _, err = call(capsys, "show", path, option, value)
        assert (code, err.count("\n")) == (2, 1)


def test_show_of_a_run_that_is_not_over(home: Path, capsys):
    def history(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*events[:-1], event("failed", "performance/decode/tp2/r1/dl0/dcp1/short", error="\x1b[31mboom")]

    write_run(Path("failed"), edit_journal=history, gates=False)
    write_run(Path("half"), edit_journal=lambda events: events[:-2], gates=False)
    code, out, _ = call(capsys, "show", "failed")
    assert code == 0
    assert "13 units: 12 finished, 1 failed, 0 remaining; " in out
    assert "1 attempts did not finish" in out
    assert "boom" in out
    assert "\x1b" not in out
    code, out, _ = call(capsys, "show", "half")
    assert "13 units: 12 finished, 0 failed, 1 remaining; " in out
    units = json.loads(call(capsys, "show", "failed", "--json")[1])["units"]
    assert units == {"planned": 13, "finished": 12, "failed": ["performance/decode/tp2/r1/dl0/dcp1/short"], "open": []}
    assert "none yet: the run is not over" in out
    code, out, _ = call(capsys, "show", "half", "--unit", "performance/decode/tp2/r1/dl0/dcp1/short")
    assert "planned, not started" in out


def test_show_of_something_else(home: Path, capsys):
    for path in ("nowhere", "runs"):
        code, _, err = call(capsys, "show", path)
        assert (code, err.count("\n")) == (2, 1)


def test_a_verdict_that_does_not_follow_names_the_code_that_judged(home: Path, capsys):
    bundle = Path(sealed(capsys))
    gates = json.loads((bundle / "gates.json").read_bytes())
    gates["gates"][0]["verdict"] = "fail"
    write_json(bundle / "gates.json", gates)
    code, out, _ = call(capsys, "verify", str(bundle))
    assert code == 1
    assert "verdict 'fail' does not follow: records give 'pass'" in out
    assert f"note     says it was judged by fasttrack 0.1.0, commit {HEAD}" in out


@pytest.mark.skipif(os.name == "nt", reason="POSIX shell")
@pytest.mark.parametrize("closed", ["pipe", "descriptor"])
def test_a_closed_standard_output_leaves_the_exit_code_alone(home: Path, capsys, closed: str):
    path = sealed(capsys)
    program = [sys.executable, "-c", "from fasttrack.cli.main import main; main()"]

    def code(*arguments: str) -> tuple[int, str]:
        reader, writer = os.pipe()
        os.close(reader)
        shell = ["sh", "-c", 'exec "$@" >&-', "sh"] if closed == "descriptor" else []
        done = subprocess.run([*shell, *program, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        return done.returncode, done.stderr

    assert code("verify", path) == (0, "")
    assert code("show", path) == (0, "")
    (Path(path) / "report.md").write_text("mine")
    assert code("verify", path) == (1, "")


def test_verify_says_what_was_judged_and_what_did_not_finish(home: Path, capsys):
    path = sealed(capsys)
    manifest = hashlib.sha256((Path(path) / "manifest.yaml").read_bytes()).hexdigest()
    out = call(capsys, "verify", path)[1].splitlines()
    assert f"manifest toy, sha256 {manifest}" in out
    assert "tier     smoke, 13 of 13 planned units finished" in out
    assert "required 4 of 4 required gates passed" in out
    assert f"seeds    from commit {HEAD}, the manifest and no nonce" in out
    assert "tied     prompts drawn again from these seeds and found in the records: none" in out
    assert "not tied numerics: inputs are drawn by torch" in out
    assert not [line for line in out if line.startswith("missing")]

    def history(events):
        return [*events[:-1], event("failed", events[-1]["unit"])]

    write_run(Path("crashed"), edit_journal=history, gates=False)
    path, unit = sealed(capsys, "--run", "crashed"), "performance/decode/tp2/r1/dl0/dcp1/short"
    code, text, _ = call(capsys, "verify", path, "--require", "pass")
    out = text.splitlines()
    assert code == 1
    assert "tier     smoke, 12 of 13 planned units finished" in out
    assert "required 4 of 4 required gates passed" in out
    assert f"missing  unit {unit} did not finish: the run cannot pass" in out
    assert "verdict  inconclusive (follows from the records)" in out
    values = json.loads(call(capsys, "verify", path, "--json")[1])
    assert (values["unfinished"], values["planned"], len(values["required"])) == ([unit], 13, 4)
    assert values["manifest_sha256"] == manifest
    assert values["seeds"]["head"] == HEAD
    assert values["tied_to_seeds"] == {}
    assert values["not_tied_to_seeds"]["numerics"] == "inputs are drawn by torch"
