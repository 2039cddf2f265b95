"""Cross-compilation as CI runs it: what is compiled once, spills, failures, the exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kimi_k3.kernels import compile as cross
from kimi_k3.kernels import cubin
from kimi_k3.kernels.compile import ARCHES, MODULES, CompileCase, Compiled, same_code
from kimi_k3.kernels.kda_core import CONTRACT, KdaCore, Settings
from kimi_k3.kernels.kda_core_launch import kernel_args
from kimi_k3.kernels.shapes import shard

GOOD = Compiled("attn_res", "a", "sm_90a", registers=32, threads=128)


def spilling() -> CompileCase:
    """The KDA core with room for 32 registers a thread."""
    s = shard("small", 8)
    settings = Settings(lanes=16, rows_per_pass=8, occupancy=8)
    kernel = KdaCore(s.heads, s.kda_rows, 1, 0, 4, settings)
    return CompileCase(kernel, kernel_args(), kernel.threads, kernel.smem, CONTRACT)


def test_spills_are_counted_as_the_disassembler_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross, "load_cases", lambda module, arch: {"spills": spilling()})
    found = cross.cross_compile("kda_core", "spills", "sm_90a", tmp_path)
    assert not found.clean
    assert found.frame > 0
    assert min(found.spill_loads, found.spill_stores) > 0
    code = cubin.sass(Path(found.cubin).read_bytes())
    if code:
        assert found.spill_loads == sum(" LDL" in line for line in code)
        assert found.spill_stores == sum(" STL" in line for line in code)


def test_cases_of_equal_code_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alike = same_code("stream_projection", "sm_90a")
    assert alike["small-tp8-shared_gate_up-m8"] == alike["small-tp8-dense_gate_up-m8"] == "small-tp8-dense_gate_up-m8"
    assert alike["kimi-k3-tp8-o_proj-m8"] == "kimi-k3-tp8-o_proj-m8"
    assert len(set(alike.values())) < len(alike)
    compiled = list[str]()
    monkeypatch.setattr(cross, "cached", lambda *args: None)
    monkeypatch.setattr(cross, "_work", lambda job: compiled.append(job[1]) or replace(GOOD, case=job[1]))
    found = cross.compile_all(("stream_projection",), ("sm_90a",), tmp_path, jobs=1, only="stream_projection/small-tp8")
    assert [r.case for r in found] == [c for c in sorted(alike) if c.startswith("small-tp8")]
    assert len(compiled) == len(set(compiled)) < len(found)


def test_cases_said_to_be_equal_compile_to_the_same_code() -> None:
    cases = cross.load_cases("stream_projection", "sm_90a")
    pair = cases["small-tp8-shared_gate_up-m8"], cases["small-tp8-dense_gate_up-m8"]
    assert pair[0].code == pair[1].code
    assert len({cross._compile(case, "sm_90a") for case in pair}) == 1


@pytest.mark.parametrize("module", MODULES)
def test_no_other_case_has_equal_code(module: str) -> None:
    """What was compiled before on this machine, if anything: equal cubins are known to be equal."""
    for arch in ARCHES:
        alike, seen = same_code(module, arch), dict[bytes, str]()
        for case in dict.fromkeys(alike.values()):
            found = cross.cached(module, case, arch, cross.default_cache())
            if found is not None:
                assert seen.setdefault(Path(found.cubin).read_bytes(), case) == case


def test_code_without_a_kernel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross, "_compile", lambda item, arch: ("", b""))
    found = cross.cross_compile("prefetch", "walk", "sm_90a", tmp_path)
    assert found.error == "ValueError: the PTX has no kernel in it"
    assert cross.cached("prefetch", "walk", "sm_90a", tmp_path) is None


@pytest.mark.parametrize(
    ("found", "code", "last"),
    [
        ([GOOD], 0, "1 cases, 1 compilations, 0 with errors or spills"),
        ([GOOD, replace(GOOD, case="b", spill_loads=2)], 1, "attn_res/b for sm_90a: spills"),
        ([replace(GOOD, error="not finished in 120 s")], 1, "attn_res/a for sm_90a: not finished in 120 s"),
        ([], 1, "0 cases, 0 compilations, 0 with errors or spills"),
    ],
)
def test_exit_code_and_culprits(
    found: list[Compiled], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cross, "compile_all", lambda *args: found)
    assert cross.main([]) == code
    assert capsys.readouterr().out.strip().splitlines()[-1].strip() == last
