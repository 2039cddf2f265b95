"""The command line as a process: quick help, exit codes, one line per error."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fasttrack.cli import main as cli
from fasttrack.cli.main import VERBS


def fasttrack(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from fasttrack.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_is_quick_and_lists_every_verb():
    started = time.monotonic()
    done = fasttrack("--help")
    seconds = time.monotonic() - started
    assert done.returncode == 0
    assert all(f"  {verb} " in done.stdout for verb in VERBS)
    assert seconds < 0.5 or min(_seconds() for _ in range(3)) < 0.5


def _seconds() -> float:
    started = time.monotonic()
    fasttrack("--help")
    return time.monotonic() - started


def test_help_needs_no_torch_and_no_other_verb():
    code = "import sys; from fasttrack.cli.main import run; run(['--help']); print(sorted(m for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    for module in ("'torch'", "'pydantic'", "'scipy'", "'fasttrack.cli.validate'"):
        assert module not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "nope"),
        (["validate"], "manifest"),
        (["validate", "none.yaml"], "none.yaml: no such file"),
        (["validate", "none.yaml", "--head", "xyz"], "--head"),
        (["plan", "configs"], "configs"),
        (["schema", "nope"], "nope"),
        (["validate", "none.yaml", "--nonce", "caf\udce9"], "argument 4 ('caf\\udce9') is not UTF-8; expected text"),
        (["validate", "none.yaml", "--nonce", ""], "--nonce: is empty; expected a word"),
        (["verify", "x" * 300], "xxx...: name too long; expected a shorter one"),
        (["bundle", "--pr", "7", "--runs", "x" * 300], "xxx...: name too long; expected a shorter one"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], words: str):
    done = fasttrack(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["validate", "none.yaml"], ["verify", "x"], ["--help"]], ids=lambda a: a[0])
def test_a_deleted_current_folder_is_one_line_and_exit_2(tmp_path: Path, monkeypatch, capsys, arguments: list[str]):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err == "fasttrack: the current folder was deleted; expected `cd` into one that exists\n"


@pytest.mark.parametrize("output", ["missing/report.json", "."])
def test_a_report_that_cannot_be_written_is_said_before_the_audit(tmp_path: Path, capsys, output: str):
    assert cli.run(["audit", str(tmp_path), "--output", str(tmp_path / output)]) == 2
    assert capsys.readouterr().err.startswith("fasttrack: --output ")


def test_a_crash_is_exit_4_with_a_traceback_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def crash() -> None:
        raise ZeroDivisionError("planted")

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "crash", crash, raising=False)
    monkeypatch.setitem(cli.VERBS, "crash", (__name__, "crash", "Crash."))
    assert cli.run(["crash"]) == 4
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    assert "ZeroDivisionError: planted" in message
    with open(message.rsplit(" ", 1)[1]) as log:
        assert "planted" in log.read()


def test_an_interrupt_is_exit_130(monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[__name__], "interrupt", interrupt, raising=False)
    monkeypatch.setitem(cli.VERBS, "interrupt", (__name__, "interrupt", "Interrupt."))
    assert cli.run(["interrupt"]) == 130


def test_every_schema_is_json():
    import json

    names = fasttrack("schema", "list").stdout.split()
    assert "manifest" in names
    assert "record.step" in names
    for name in names:
        assert json.loads(fasttrack("schema", name).stdout)["properties"]
