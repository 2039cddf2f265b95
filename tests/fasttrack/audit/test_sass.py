"""The assembled code: same questions, and what only the assembler can spoil."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fasttrack.audit import cubin
from fasttrack.audit.contracts import load_table
from fasttrack.audit.run import audit_folder
from fasttrack.audit.subject import Subject
from fasttrack.audit.unit import ptx_functions, sass_functions
from fasttrack.cli.main import run
from fasttrack.errors import UsageError

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(cubin.find_nvdisasm() is None, reason="no nvdisasm")


def compile_cuda(source: str, folder: Path, arch: str = "sm_90a", contracts: str = "") -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    (folder / "k.cu").write_text(source)
    for form in ("ptx", "cubin"):
        command = [
            "nvcc",
            "-lineinfo",
            f"-arch={arch}",
            f"-{form}",
            str(folder / "k.cu"),
            "-o",
            str(folder / f"k.{form}"),
        ]
        subprocess.run(command, check=True, capture_output=True)
    if contracts:
        (folder / "contracts.yaml").write_text(contracts)
    return folder


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_ptx_and_sass_agree_on_parameters(cuda: Path, arch: str) -> None:
    """Every global access of every subject is traced, and both stages see the same parameters read and written."""
    table = load_table(HERE / "contracts.yaml")
    stem = str(cuda / f"kernels.{arch}")
    ptx = {f.name: f for f in ptx_functions(Path(f"{stem}.ptx").read_text(), "k.ptx")}
    sass = {f.name: f for f in sass_functions(Path(f"{stem}.cubin").read_bytes(), "k.cubin")}
    assert set(ptx) == set(sass)
    assert len(ptx) >= 40
    for name in ptx:
        seen = []
        for f in (ptx[name], sass[name]):
            s = Subject(f, name, arch, table.of(name))
            assert all(x.traced for x in s.sites), f"{name} {f.stage}"
            writes = ("store", "reduction", "atomic")
            seen.append({(x.access.what in writes, r.parameter) for x in s.sites for r in x.roles if r.sure})
            assert len(f.parameters) == len(table.of(name).parameters)  # type: ignore[union-attr]
        assert seen[0] == seen[1], name


def test_subjects_are_clean_in_both_stages(cuda: Path) -> None:
    report, problems = audit_folder(cuda, HERE / "contracts.yaml", jobs=2)
    assert not problems
    assert report.sass
    assert [f.message for f in report.open("error") + report.open("warning")] == []
    assert {a.stage for a in report.audited} == {"ptx", "sass"}
    assert {f.parameter for f in report.findings if f.excepted} == {"box", "flag"}


WEIGHTS = """
extern "C" __global__ void k(const float* x, const float* w, float* y) {
  float v; asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(w + threadIdx.x) : "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  y[threadIdx.x] = v * x[threadIdx.x];
}
"""
TABLE = """
kernels:
  - kernel: k
    parameters: [{name: x, role: activation}, {name: w, role: weight}, {name: y, role: output}]
"""


def test_weight_load_that_sinks_below_the_wait_is_noted(tmp_path: Path) -> None:
    """ptxas moves ld.global.nc behind the wait: harmless for weights, but the overlap is lost."""
    report, _ = audit_folder(compile_cuda(WEIGHTS, tmp_path, contracts=TABLE))
    assert [(f.rule, f.severity, f.stage, f.parameter) for f in report.findings] == [
        ("late-weight", "note", "sass", "w")
    ]


def test_poll_that_the_assembler_drops(tmp_path: Path) -> None:
    """The loop is there in PTX; ptxas keeps one load because a weak poll may be assumed to end."""
    source = """
extern "C" __global__ void k(const unsigned* box, unsigned* y) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned v;
  do asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(box + threadIdx.x)); while (v == 0x80000000u);
  y[threadIdx.x] = v;
}
"""
    table = "kernels: [{kernel: k, parameters: [{name: box, role: mailbox}, {name: y, role: output}]}]"
    report, _ = audit_folder(compile_cuda(source, tmp_path, contracts=table))
    stages = {(f.rule, f.stage) for f in report.open("error")}
    assert ("weak-poll", "ptx") in stages
    assert ("collapsed-poll", "sass") in stages


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_hoisted_load_is_found_in_a_cubin_alone(tmp_path: Path, arch: str) -> None:
    source = WEIGHTS.replace("ld.global.nc", "ld.global").replace("w + threadIdx.x", "x + threadIdx.x")
    compile_cuda(source, tmp_path, arch, TABLE)
    (tmp_path / "k.ptx").unlink()
    report, problems = audit_folder(tmp_path)
    assert not problems
    found = [(f.rule, f.stage, f.parameter) for f in report.open("error")]
    assert found == [("early-load", "sass", "x")]
    (finding,) = report.open("error")
    assert finding.file.endswith("k.cu")
    assert finding.line == 3
    assert finding.instruction.startswith("LDG")


def test_missing_wait_in_a_cubin(tmp_path: Path) -> None:
    source = WEIGHTS.replace('asm volatile("griddepcontrol.wait;" ::: "memory");', "")
    compile_cuda(source, tmp_path, contracts=TABLE)
    report, _ = audit_folder(tmp_path)
    assert {(f.rule, f.stage) for f in report.open("error")} == {("missing-wait", "ptx"), ("missing-wait", "sass")}


def test_clean_audit_with_sass_exits_zero(tmp_path: Path) -> None:
    compile_cuda(WEIGHTS.replace(".nc", ""), tmp_path, contracts=TABLE)
    assert run(["audit", str(tmp_path)]) == 0


def test_cute_findings_name_the_python_line(cute: Path) -> None:
    """Without a contract the early weight load is a finding, at its line of the kernel's Python source."""
    report, _ = audit_folder(cute / "cute_scale.sm_90a.ptx")
    more, _ = audit_folder(cute / "cute_scale.sm_90a.cubin")
    source = (HERE / "cute_subjects.py").read_text().splitlines()
    for finding in (*report.open("error"), *more.open("error")):
        assert finding.rule == "early-load"
        assert Path(finding.file).name == "cute_subjects.py"
        assert source[finding.line - 1].strip() == "g = w[i]"
    assert len(report.open("error")) == len(more.open("error")) == 1


def test_bad_cubins_give_one_line(cuda: Path, tmp_path: Path) -> None:
    good = (cuda / "kernels.sm_90a.cubin").read_bytes()
    for data, expected in (
        (b"", "empty file"),
        (b"hello" * 100, "not an ELF image"),
        (good[: len(good) // 2], "truncated or damaged"),
        (good[:64] + b"\xff" * 4096, "truncated or damaged"),
        (good[:18] + b"\x3e\x00" + good[20:], "machine 62"),
    ):
        with pytest.raises(UsageError) as error:
            cubin.layouts(data, "x.cubin")
        assert expected in str(error.value)
        assert "\n" not in str(error.value)
