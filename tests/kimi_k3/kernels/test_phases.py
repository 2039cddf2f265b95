"""The benchmark that stamps the phases of a launch still finds its places in the kernels' sources, and compiles."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute

from kimi_k3.kernels import stream_projection as sp

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "h200" / "phases.py"


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("phases", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("RowsKernel", "TilesKernel"):  # the script replaces them
        monkeypatch.setattr(sp, name, getattr(sp, name))
    return module


@pytest.mark.parametrize(("rows", "kind"), [(8, "rows"), (64, "wgmma")])
def test_every_phase_is_stamped(phases: ModuleType, rows: int, kind: str, tmp_path: Path) -> None:
    kernel, setting = phases.kernel("small-tp8-o_proj", rows, {"kind": kind} if kind == "rows" else {}, tmp_path)
    out = tmp_path / "ptx"
    out.mkdir()
    cute.compile(kernel, *sp.fake_args(), options=f"--gpu-arch sm_90a --keep-ptx --dump-dir={out}")
    ptx = next(out.glob("*.ptx")).read_text()
    assert len(re.findall(r"mov\.u64 t, %globaltimer", ptx)) >= len(phases.PHASES), setting


def test_a_place_that_is_gone_is_said(phases: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moved = tmp_path / "moved.py"
    source = Path(str(phases.rows_module.__file__)).read_text()
    moved.write_text(source.replace("self.consume(", "self.eat("))
    monkeypatch.setattr(phases.rows_module, "__file__", str(moved))
    with pytest.raises(ValueError, match="is there 0 times, not once"):
        phases.stamped(phases.rows_module)
