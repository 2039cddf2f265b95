"""``fasttrack audit TARGET``: every kernel of a target, per architecture, along its declared schedules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from audit_fragments import contract, module

from fasttrack.audit import run as audit_run
from fasttrack.audit.contracts import load_table
from fasttrack.cli.main import run
from fasttrack.target import CompiledKernel, KernelContract, KernelException, KernelParameter

READ = "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; griddepcontrol.wait; ld.global.f32 %f1, [%rd1];\n"
WRITE = "griddepcontrol.launch_dependents; st.global.f32 [%rd2], %f1;\nret;"


class Kernels:
    """Stands in for a target: one kernel, one schedule."""

    def __init__(self, declared: KernelContract, order: Sequence[str] = ("k",), body: str = READ + WRITE) -> None:
        self.declared, self.order, self.body = declared, order, body

    def compile_kernels(self, arch: str) -> Iterable[CompiledKernel]:
        yield CompiledKernel("file/k-m8", arch, module(self.body), b"", "pkg/kernels/file.py", self.declared)

    def schedules(self) -> Mapping[str, Sequence[str]]:
        return {"layer": self.order}


GOOD = contract("x:activation y:output n:scalar")


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(target: object, *arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(audit_run, "find_target", lambda name: target)
        monkeypatch.setattr("fasttrack.audit.cubin.find_nvdisasm", lambda: None)
        code = run(["audit", "toy", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out or "{}")

    return call


def test_every_architecture_is_audited(audit) -> None:
    code, report = audit(Kernels(GOOD))
    assert code == 3  # clean, but without a disassembler
    assert {a["arch"] for a in report["audited"]} == {"sm_90a", "sm_100a", "sm_103a"}
    assert report["findings"] == []
    code, report = audit(Kernels(GOOD), "--arch", "sm_100a")
    assert {a["arch"] for a in report["audited"]} == {"sm_100a"}


def test_findings_name_the_kernel_file(audit) -> None:
    declared = contract("x:activation y:output")
    code, report = audit(Kernels(declared), "--arch", "sm_90a")
    assert code == 1
    (finding,) = report["findings"]
    assert (finding["rule"], finding["file"]) == ("contract-mismatch", "pkg/kernels/file.py")


def test_schedule_is_checked_against_the_compiled_code(audit) -> None:
    """x is read early, and the same kernel of the layer before stores it after launching this one."""
    early = contract("x:activation:True:declared y:output n:scalar")
    body = READ.replace("griddepcontrol.wait; ", "") + "griddepcontrol.wait;\n" + WRITE.replace("[%rd2]", "[%rd1]")
    looped = KernelContract("k", (early.parameters[0], *GOOD.parameters[1:]))
    buffers = tuple(
        type(p)(p.name, p.role, p.early, p.reason, buffer="x") if p.name in ("x", "y") else p for p in looped.parameters
    )
    code, report = audit(Kernels(KernelContract("k", buffers), ("k",), body), "--arch", "sm_90a")
    assert code == 1
    rules = {f["rule"] for f in report["findings"]}
    assert "exposed-dependent" in rules
    store = next(f for f in report["findings"] if f["rule"] == "store-after-trigger")
    assert store["instruction"].startswith("st.global.f32")


def test_schedule_with_an_unknown_kernel(audit) -> None:
    code, report = audit(Kernels(GOOD, ("k", "other")), "--arch", "sm_90a")
    assert code == 1
    assert "no contract for other" in report["findings"][0]["message"]


def test_compiled_code_can_be_kept(audit, tmp_path: Path) -> None:
    fields = (KernelParameter("w", "weight", offset=8),)
    split = KernelParameter("x", "state", True, "declared", "b", fields=fields)
    declared = KernelContract(
        "k", (split, *GOOD.parameters[1:]), exceptions=(KernelException("early-load", "x", "because"),)
    )
    _, before = audit(Kernels(declared), "--arch", "sm_90a", "--keep", str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "contracts.yaml",
        "file__k-m8.sm_90a.cubin",
        "file__k-m8.sm_90a.ptx",
    ]
    table = load_table(tmp_path / "contracts.yaml")
    assert table.contracts == (declared,)
    assert table.schedules == {"layer": ("k",)}
    report, _ = audit_run.audit_folder(tmp_path)
    assert [f.rule for f in report.findings] == [f["rule"] for f in before["findings"]] == ["unused-exception"]


def test_a_target_comes_before_a_folder_of_its_name(
    audit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Entry:
        name = "toy"

    monkeypatch.setattr("fasttrack.cli.audit.entry_points", lambda group: [Entry()])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    assert audit(Kernels(GOOD))[0] == 3
    assert run(["audit", "./toy"]) == 2
    assert "no .ptx or .cubin file" in capsys.readouterr().err


def test_target_without_kernels(audit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(audit_run, "find_target", lambda name: object())
    assert run(["audit", "toy"]) == 2
    assert "offers no kernels" in capsys.readouterr().err
    assert run(["audit", "toy", "--arch", "sm_80"]) == 2
    assert "unknown architecture 'sm_80'" in capsys.readouterr().err
