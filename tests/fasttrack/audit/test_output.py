"""Text, JSON and SARIF of one report; exit codes of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from audit_fragments import module

from fasttrack.audit import cubin
from fasttrack.audit.output import as_json, as_sarif, as_text
from fasttrack.audit.rules import RULES, SEVERITIES
from fasttrack.audit.run import audit_folder
from fasttrack.cli.main import run

EARLY = "ld.param.u64 %rd1, [x];\n.loc 1 12 3\nld.global.f32 %f1, [%rd1];\ngriddepcontrol.wait;\nret;"
CLEAN = "ld.param.u64 %rd1, [x];\ngriddepcontrol.wait;\nld.global.f32 %f1, [%rd1];\nret;"
TABLE = """
kernels:
  - kernel: k
    parameters: [{name: hidden, role: activation}, {name: y, role: output}, {name: n, role: scalar}]
    exceptions: [{rule: early-load, parameter: hidden, reason: written one step ago}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "early.ptx").write_text(module(EARLY) + '.file 1 "src/kernel.py"\n')
    (tmp_path / "clean.ptx").write_text(module(CLEAN))
    return tmp_path


def test_text_names_place_parameter_and_reason(folder: Path) -> None:
    report, _ = audit_folder(folder)
    text = as_text(report)
    assert "error early-load: load of x (activation) can run before griddepcontrol.wait" in text
    assert "src/kernel.py:12  ld.global.f32 %f1, [%rd1]" in text
    assert "2 kernels, 2 of 2 global accesses traced" in text
    assert text.splitlines()[-1].startswith("SASS not audited: ")


def test_json_holds_everything(folder: Path) -> None:
    report, _ = audit_folder(folder)
    document = json.loads(as_json(report))
    (finding,) = document["findings"]
    assert finding["rule"] == "early-load"
    assert finding["severity"] == "error"
    assert (finding["file"], finding["line"]) == ("src/kernel.py", 12)
    assert finding["parameter"] == "x"
    assert finding["arch"] == "sm_90a"
    assert document["sass_audited"] is False
    assert {a["variant"] for a in document["audited"]} == {"early", "clean"}


def test_sarif_is_complete(folder: Path) -> None:
    (folder / "contracts.yaml").write_text(TABLE)
    report, _ = audit_folder(folder)
    document = json.loads(as_sarif(report))
    assert document["version"] == "2.1.0"
    (run_,) = document["runs"]
    rules = run_["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == list(RULES)
    assert all(r["shortDescription"]["text"] and r["fullDescription"]["text"] for r in rules)
    (result,) = run_["results"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "early-load"
    assert result["level"] in SEVERITIES
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "src/kernel.py"
    assert place["region"]["startLine"] == 12
    assert result["suppressions"] == [
        {"kind": "inSource", "status": "accepted", "justification": "written one step ago"}
    ]


def test_unrolled_copies_of_a_line_are_one_finding(tmp_path: Path) -> None:
    load = "ld.global.f32 %f1, [%rd1];\n"
    (tmp_path / "k.ptx").write_text(module(EARLY.replace(load, load + load.replace("]", "+4]"))) + '.file 1 "a.py"\n')
    report, _ = audit_folder(tmp_path)
    assert len(report.findings) == 1


def test_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["audit", str(folder)]) == 1
    (folder / "contracts.yaml").write_text(TABLE)
    assert run(["audit", str(folder)]) == 3  # nothing open, but there was no SASS to look at
    assert "SASS not audited" in capsys.readouterr().out
    (folder / "broken.ptx").write_text("hello")
    (folder / "empty.ptx").write_text("")
    assert run(["audit", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1].split("; ")[0] for line in lines] == [
        f"{folder}/broken.ptx: not PTX: no .version line",
        f"{folder}/empty.ptx: empty file",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing/here"], "no such file or folder"),
        (["{folder}/none"], "no .ptx or .cubin file"),
        (["no_such_target"], "unknown target"),
        (["{folder}", "--contracts", "{folder}/none.yaml"], "cannot be read"),
        (["{folder}", "--arch", "sm_90a"], "belong to targets"),
    ],
)
def test_bad_arguments(folder: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "none").mkdir()
    assert run(["audit", *(a.format(folder=folder) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_large_file_is_refused_without_reading_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("big.ptx", "big.cubin"):
        with (tmp_path / name).open("wb") as f:
            f.truncate(50 << 20)
    assert run(["audit", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("50 MiB; expected at most 16 MiB" in line for line in lines)


def test_report_to_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "report.sarif"
    assert run(["audit", str(folder), "--format", "sarif", "--output", str(out)]) == 1
    assert json.loads(out.read_text())["version"] == "2.1.0"
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_disassembler_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "clean.cubin").write_bytes(b"\x7fELF")
    monkeypatch.setattr(cubin, "find_nvdisasm", lambda: None)
    report, problems = audit_folder(folder / "clean.cubin")
    assert not problems
    assert not report.sass
    assert "nvidia-cuda-nvdisasm" in report.sass_reason
