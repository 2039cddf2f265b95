"""Rings, multicast and release of the tiled projection beyond the settings in use: they compile here, and run on a GPU.

Blocks do not divide among those that share x, so that some have no columns; 33 rows leave slices of x empty.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from kimi_k3.kernels import limits
from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.compile import CompileCase, _compile
from kimi_k3.kernels.cubin import resources
from kimi_k3.kernels.shapes import ProjectionShape
from kimi_k3.kernels.stream_projection_epilogue import Epilogue
from kimi_k3.kernels.stream_projection_settings import Setting

PLAIN, SITU = ProjectionShape("plain", 576, 2048), ProjectionShape("gate_up", 576, 2048, situ=True)
SETTINGS = [
    Setting("wgmma", 64, 6, kblk=64, xstages=3, xcast=2),
    Setting("wgmma", 64, 6, kblk=64, xstages=3, xcast=4, prompt=True),
    Setting("wgmma", 64, 5, kblk=64, xstages=2, xcast=2, ksplit=2),
    Setting("wgmma", 64, 4, kblk=64, xcast=4, ksplit=2, prompt=True, trigger=-1),
    Setting("wgmma", 64, 3, kblk=128, xstages=1, xcast=2, prompt=True, trigger=1000),
    Setting("wgmma", 64, 32, kblk=64, xcast=2, ksplit=4),  # the whole slice of K in the ring
    Setting("tiles", 64, 5, kblk=64, wk=2, xstages=2, xcast=4),
    Setting("tiles", 64, 4, kblk=64, xstages=1, xcast=2, ksplit=4),
    Setting("tiles", 48, 6, kblk=128, wm=1, wk=4, xcast=8),
    Setting("wgmma", 64, 5, kblk=64, prompt=True, l2=3),
    Setting("wgmma", 64, 5, kblk=64, xcast=2, ksplit=2, l2=100),  # more boxes than there are
]
GATED = [
    Setting("wgmma", 128, 4, kblk=64, xcast=2, ksplit=2),
    Setting("wgmma", 128, 5, kblk=64, xstages=3, xcast=4, prompt=True),
    Setting("tiles", 32, 6, kblk=128, wm=1, wk=4, xstages=2, xcast=4, l2=2),
]
CASES = [(PLAIN, s) for s in SETTINGS] + [(SITU, s) for s in GATED]


def label(value: object) -> str:
    if not isinstance(value, Setting):
        return str(getattr(value, "op", value))
    s = value
    return f"{s.kind}{s.rows}s{s.stages}x{s.xstages}k{s.ksplit}c{s.xcast}l{s.l2}{'p' * s.prompt}"


@pytest.mark.parametrize(("shape", "setting"), CASES, ids=label)
def test_compiles_without_spills(shape: ProjectionShape, setting: Setting) -> None:
    kernel = sp.make_kernel(Epilogue(shape), setting, 64)
    assert setting.xcast == 1 or kernel.blocks % setting.xcast
    case = CompileCase(kernel, sp.fake_args(), kernel.threads, kernel.smem, sp.TILES_CONTRACT, "ring")
    _, code = _compile(case, "sm_90a")
    assert [r.spills for r in resources(code)] == [False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize(("shape", "setting"), CASES, ids=label)
def test_right_and_the_same_every_time(shape: ProjectionShape, setting: Setting, rows: int) -> None:
    if setting.kind == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup MMA is sm_90a's")
    op = sp.StreamProjection(shape, (rows,), settings={rows: setting})
    for kind in ("coded", "random", "adversarial"):
        x, w = sp.make_inputs(shape, rows, 5, kind)
        outs = [torch.full((rows + 1, op.columns), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(200)]
        for y in outs:
            op.run(x, w, y[:rows])
        exact, _ = sp.reference(shape, x, w, dtype=torch.float64)
        limit = limits.situ_limit(x, w) if shape.situ else limits.projection_limit(x, w, exact)
        assert limits.excess(outs[0][:rows], exact, limit) <= 1, kind
        bits = [y[:rows].view(torch.int16) for y in outs]
        assert all(torch.equal(b, bits[0]) for b in bits), kind
        assert all(bool(y[rows].isnan().all()) for y in outs), "the guard row was written"
