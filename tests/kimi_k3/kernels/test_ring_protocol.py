"""The tiled projection's ring under random schedules: every setting in use, random geometries, and steps left out."""

from __future__ import annotations

import random

import pytest
from ring_protocol import Cluster, Fault, Ring

pytest.importorskip("cutlass")

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.arch import ARCHES
from kimi_k3.kernels.shapes import PREPARED_ROWS, ProjectionShape
from kimi_k3.kernels.stream_projection_epilogue import Epilogue
from kimi_k3.kernels.stream_projection_settings import Setting, setting_for
from kimi_k3.kernels.stream_projection_tiles import TilesKernel

SHAPE = ProjectionShape("test", 576, 2048)


def in_use() -> list[Ring]:
    """The geometries of all settings, long ones cut to three turns of their ring."""
    found = set()
    for shape, _ in sp.cases().values():
        for arch in ARCHES.values():
            for m in PREPARED_ROWS:
                kernel = sp.make_kernel(Epilogue(shape), setting_for(shape, m, arch.warpgroup_mma), m)
                if isinstance(kernel, TilesKernel):
                    kernel.nst = min(kernel.nst, 3 * kernel.stages + kernel.nst % kernel.stages)
                    found.add(Ring.of(kernel))
    return sorted(found, key=repr)


def faults(ring: Ring, seeds: range, *without: str) -> list[str]:
    found = []
    for seed in seeds:
        try:
            Cluster(ring, seed, frozenset(without)).run()
        except Fault as fault:
            found.append(str(fault))
    return found


def test_every_setting_in_use() -> None:
    rings = in_use()
    assert len(rings) > 30
    assert any(r.xcast > 1 and r.ksplit > 1 for r in rings)
    for ring in rings:
        assert faults(ring, range(3)) == [], ring


def random_rings(count: int) -> list[Ring]:
    rng, found = random.Random(7), list[Ring]()
    while len(found) < count:
        nst = rng.randint(1, 11)
        stages = rng.randint(1, min(nst, 6))
        xcast, ksplit = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (2, 4)))
        wgmma, prompt = rng.choice(((False, False), (True, False), (True, True)))
        ring = Ring(nst, stages, rng.randint(1, stages), xcast, ksplit, rng.choice((1, 2)), wgmma, prompt)
        if not ring.late or ring.xstages >= min(2, nst):
            found.append(ring)
    return found


def test_random_geometries() -> None:
    for seed, ring in enumerate(random_rings(600)):
        assert faults(ring, range(seed, seed + 1)) == [], ring


RING = Ring(nst=9, stages=4, xstages=3, xcast=2, ksplit=2, wgmma=True)


@pytest.mark.parametrize(
    ("ring", "step", "message"),
    [
        (RING, "tail", "reaches a block that has ended"),
        (Ring(9, 4, 3, xcast=4), "tail", "a release reaches a block that has ended"),
        (RING, "last release", "deadlock"),
        (Ring(9, 4, 4, xcast=2), "cluster wait", "reaches a block that has not started"),
        (RING, "empty wait", "which was not read yet"),
        (Ring(9, 4, 4), "read before release", "which was not read yet"),
    ],
    ids=lambda value: str(value).split("(")[0],
)
def test_every_step_is_needed(ring: Ring, step: str, message: str) -> None:
    assert faults(ring, range(20)) == []
    assert any(message in fault for fault in faults(ring, range(200), step))


def test_the_ring_that_the_kernel_refuses_would_hang() -> None:
    """Late release with one slot of x: it is released when the next stage has been issued, which waits for it."""
    with pytest.raises(ValueError, match="two slots of x"):
        sp.make_kernel(Epilogue(SHAPE), Setting("wgmma", 64, 4, kblk=64, xstages=1), 64)
    assert set(faults(Ring(8, 4, 1, wgmma=True), range(20))) == {"deadlock"}
