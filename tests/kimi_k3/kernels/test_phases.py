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


SETTINGS = {
    "rows": (8, {"kind": "rows", "stages": 2, "ksplit": 1, "rows": 16, "kblk": 128, "warps": 8}),
    "tiles": (64, {"kind": "tiles", "stages": 4, "ksplit": 1}),
    "wgmma": (64, {"kind": "wgmma", "stages": 4, "ksplit": 1, "prompt": True}),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_phase_is_stamped(phases: ModuleType, kind: str, tmp_path: Path) -> None:
    rows, changes = SETTINGS[kind]
    kernel, setting = phases.kernel("small-tp8-o_proj", rows, changes, tmp_path)
    assert setting.kind == kind
    out = tmp_path / "ptx"
    out.mkdir()
    cute.compile(kernel, *sp.fake_args(), options=f"--gpu-arch sm_90a --keep-ptx --dump-dir={out}")
    ptx = next(out.glob("*.ptx")).read_text()
    # a consumer's first stage may be stamped in every copy of an unrolled loop
    assert len(re.findall(r"mov\.u64 t, %globaltimer", ptx)) >= len(phases.PHASES)


def test_each_phase_has_its_place_in_both_kernels(phases: ModuleType) -> None:
    for module in (phases.rows_module, phases.tiles_module):
        text = phases.stamped(module)
        found = {phase: text.count(f"stamp(clocks + {8 * phase})") for phase in range(len(phases.PHASES))}
        twice = {4} if module is phases.tiles_module else set()  # two ways to multiply
        assert found == {phase: 2 if phase in twice else 1 for phase in found}


def test_a_place_that_is_gone_is_said(phases: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moved = tmp_path / "moved.py"
    source = Path(str(phases.rows_module.__file__)).read_text()
    moved.write_text(source.replace("self.consume(", "self.eat("))
    monkeypatch.setattr(phases.rows_module, "__file__", str(moved))
    with pytest.raises(ValueError, match="is there 0 times, not once"):
        phases.stamped(phases.rows_module)
