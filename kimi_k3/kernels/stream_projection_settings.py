"""Which kernel and geometry serves a projection shape at a batch: measured settings, and a rule for other shapes.

Plain data, importable without torch or CuTe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_k3.decode.plan import TWO_PHASE_ROWS
from kimi_k3.kernels.shapes import ProjectionShape

#: dynamic shared memory of a block, at most, so that the next launch's blocks fit beside the running ones
CO_RESIDENT = 104 * 1024


@dataclass(frozen=True)
class Setting:
    """``kind`` rows: x in registers; tiles, wgmma: x in shared memory, by mma.sync or warpgroup MMA.

    ``warps`` belongs to the rows kernel, ``wm`` x ``wk`` warps and ``xstages`` to the others. ``trigger``: see there.
    """

    kind: str
    rows: int
    stages: int
    ksplit: int = 1
    kblk: int = 128
    warps: int = 8
    wm: int = 4
    wk: int = 1
    trigger: int = 4
    xstages: int = 0  #: ring of x, tiles kernel; 0: as deep as W's
    xcast: int = 1  #: neighbouring blocks that share x by multicast, tiles and wgmma
    prompt: bool = False  #: wgmma: slots are released at once, at the price of waiting for every stage's products
    l2: int = 0  #: tiles kernel: boxes of W beyond the ring that are fetched into L2 before the dependency wait
    per_sm: int = 0  #: blocks that may share an SM, by unused shared memory; 0: as many as fit


def token_tiles(m: int) -> int:
    """n8 tiles of tokens that serve m rows: 1, 2, 4 or 8."""
    if not 1 <= m <= 64:
        raise ValueError(f"rows {m}: the projection kernels serve 1 to 64")
    return 1 if m <= 8 else 2 if m <= 16 else 4 if m <= 32 else 8


#: (n, k, SiTU) -> token tiles -> setting, as measured on an H200
TUNED: dict[tuple[int, int, bool], dict[int, Setting]] = {
    (288, 7168, False): {
        1: Setting("rows", 24, 8, ksplit=7, trigger=1000),
        2: Setting("wgmma", 64, 5, ksplit=8, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 5, ksplit=8, xstages=3, l2=2, trigger=-1),
        8: Setting("wgmma", 64, 7, ksplit=8, kblk=64, xstages=5, l2=4, trigger=3),
    },
    (560, 7168, False): {
        1: Setting("rows", 32, 8, ksplit=7, trigger=-1),
        2: Setting("rows", 16, 8, ksplit=7, trigger=1000),
        4: Setting("wgmma", 64, 8, ksplit=8, kblk=64, trigger=3),
        8: Setting("wgmma", 64, 7, ksplit=8, kblk=64, xstages=5, l2=4, trigger=3),
    },
    (768, 7168, True): {
        1: Setting("rows", 32, 8, ksplit=7, trigger=-1),
        2: Setting("wgmma", 128, 5, ksplit=8, kblk=64, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 128, 6, ksplit=8, kblk=64, xstages=4, prompt=True, l2=2, trigger=3),
        8: Setting("wgmma", 128, 5, ksplit=8, kblk=64, xstages=3, trigger=3),
    },
    (1152, 1536, False): {
        1: Setting("rows", 40, 1, ksplit=8, kblk=192, warps=6, trigger=1000),
        2: Setting("wgmma", 64, 3, ksplit=4, prompt=True, trigger=1000),
        4: Setting("wgmma", 64, 3, ksplit=4, trigger=1000),
        8: Setting("wgmma", 64, 3, ksplit=4, trigger=1000),
    },
    (1536, 7168, True): {
        1: Setting("rows", 16, 4, ksplit=4, kblk=256, trigger=3),
        2: Setting("tiles", 32, 8, ksplit=2, wm=1, wk=4, trigger=3),
        4: Setting("tiles", 32, 6, ksplit=2, wm=1, wk=4, xcast=4, l2=2, trigger=3),
        8: Setting("wgmma", 128, 4, ksplit=8, kblk=64, prompt=True, l2=2, trigger=3),
    },
    (2304, 1536, False): {
        1: Setting("wgmma", 128, 3, ksplit=4, prompt=True, trigger=1000),
        2: Setting("wgmma", 64, 3, ksplit=4, trigger=-1),
        4: Setting("wgmma", 64, 3, ksplit=4, trigger=1000),
        8: Setting("wgmma", 64, 3, ksplit=4, trigger=1000),
    },
    (2880, 7168, False): {
        1: Setting("rows", 24, 12, ksplit=2, trigger=3),
        2: Setting("wgmma", 64, 7, ksplit=4, kblk=64, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 6, ksplit=4, kblk=64, prompt=True, l2=2, trigger=3),
        8: Setting("wgmma", 128, 10, ksplit=4, kblk=64, xstages=7, l2=2, trigger=3),
    },
    (3216, 7168, False): {
        1: Setting("rows", 32, 12, ksplit=2, trigger=8),
        2: Setting("wgmma", 64, 5, ksplit=4, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 10, ksplit=4, kblk=64, xstages=8, prompt=True, l2=2, trigger=3),
        8: Setting("wgmma", 128, 9, ksplit=4, kblk=64, xstages=8, l2=4, trigger=3),
    },
    (3648, 7168, False): {
        1: Setting("rows", 32, 12, ksplit=2, trigger=2),
        2: Setting("wgmma", 64, 5, ksplit=4, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 9, ksplit=2, kblk=64, prompt=True, trigger=3),
        8: Setting("wgmma", 128, 9, ksplit=4, kblk=64, xstages=8, l2=2, trigger=3),
    },
    (4224, 7168, True): {
        1: Setting("rows", 32, 12, ksplit=2, trigger=2),
        2: Setting("tiles", 64, 10, ksplit=2, kblk=64, wm=1, wk=2, l2=2, trigger=3),
        4: Setting("tiles", 64, 4, ksplit=2, wm=1, wk=4, l2=2, trigger=-1),
        8: Setting("wgmma", 128, 9, ksplit=2, kblk=64, xstages=8, l2=4, trigger=3),
    },
    (6288, 7168, False): {
        1: Setting("rows", 24, 8, ksplit=2, warps=4, trigger=3),
        2: Setting("rows", 32, 6, ksplit=2, warps=4, trigger=3),
        4: Setting("wgmma", 64, 6, ksplit=2, kblk=64, prompt=True, trigger=-1),
        8: Setting("wgmma", 64, 6, ksplit=2, kblk=64, xcast=4, prompt=True, l2=2, trigger=-1),
    },
    (7168, 384, False): {
        1: Setting("rows", 32, 2, kblk=192, warps=6, trigger=1000),
        2: Setting("wgmma", 64, 3, trigger=-1),
        4: Setting("wgmma", 64, 3, trigger=1000),
        8: Setting("wgmma", 64, 3, trigger=1000),
    },
    (7168, 768, False): {
        1: Setting("rows", 32, 3, kblk=256, trigger=-1),
        2: Setting("wgmma", 64, 6, ksplit=2, kblk=64, trigger=-1),
        4: Setting("wgmma", 64, 6, ksplit=2, kblk=64, prompt=True, trigger=-1),
        8: Setting("wgmma", 64, 5, ksplit=2, kblk=64, xstages=4, prompt=True, l2=1, trigger=3),
    },
    (7168, 1536, False): {
        1: Setting("rows", 24, 4, kblk=256, trigger=-1),
        2: Setting("wgmma", 128, 6, ksplit=2, kblk=64, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 9, kblk=64, prompt=True, trigger=3),
        8: Setting("wgmma", 64, 6, ksplit=2, kblk=64, prompt=True, l2=2, trigger=3),
    },
    (7168, 2112, False): {
        1: Setting("tiles", 64, 11, kblk=64, wm=1, wk=2, trigger=3),
        2: Setting("wgmma", 64, 11, kblk=64, prompt=True, trigger=3),
        4: Setting("wgmma", 64, 9, kblk=64, prompt=True, trigger=3),
        8: Setting("wgmma", 64, 7, kblk=64, prompt=True, trigger=3),
    },
    (7168, 4224, False): {
        1: Setting("tiles", 32, 10, wm=1, wk=4, l2=2, trigger=-1),
        2: Setting("wgmma", 64, 11, ksplit=2, kblk=64, prompt=True, l2=2, trigger=3),
        4: Setting("wgmma", 64, 10, ksplit=2, kblk=64, xstages=8, prompt=True, trigger=3),
        8: Setting("wgmma", 128, 10, ksplit=2, kblk=64, xstages=7, l2=2, trigger=3),
    },
    (8448, 7168, True): {
        1: Setting("rows", 32, 10, trigger=8),
        2: Setting("tiles", 32, 8, wm=1, wk=4, xcast=2, trigger=3),
        4: Setting("wgmma", 128, 6, ksplit=2, kblk=64, wm=8, xstages=4, prompt=True, l2=2, trigger=-1),
        8: Setting("wgmma", 128, 9, ksplit=2, kblk=64, xstages=8, l2=2, trigger=3),
    },
    (10240, 7168, False): {
        1: Setting("rows", 80, 4, ksplit=2, warps=4, trigger=2),
        2: Setting("rows", 80, 4, ksplit=2, warps=4, trigger=2),
        4: Setting("wgmma", 64, 3, ksplit=2, xcast=4, prompt=True, l2=2, trigger=-1),
        8: Setting("wgmma", 64, 4, ksplit=2, kblk=64, xcast=4, prompt=True, l2=2, trigger=-1),
    },
    (20480, 7168, False): {
        1: Setting("rows", 80, 4, warps=4, trigger=8),
        2: Setting("rows", 80, 4, warps=4, trigger=8),
        4: Setting("tiles", 80, 3, wm=1, wk=4, trigger=3),
        8: Setting("wgmma", 64, 4, kblk=64, xcast=4, trigger=-1),
    },
}


def setting_for(shape: ProjectionShape, m: int, warpgroup_mma: bool = True) -> Setting:
    """The setting for ``m`` rows. Raises ValueError for a shape that no kernel serves.

    Without ``warpgroup_mma`` (every architecture but sm_90a) the same geometry runs on mma.sync.
    """
    if shape.k % 64 or shape.k < 128:
        raise ValueError(f"{shape.op}: K {shape.k} must be a multiple of 64 and at least 128")
    if shape.n % (16 if shape.situ else 8) or shape.fp32_rows % 8:
        raise ValueError(f"{shape.op}: N {shape.n} must be a multiple of 8 (SiTU: 16)")
    tiles = token_tiles(m)
    tuned = TUNED.get((shape.n, shape.k, shape.situ), {})
    if tiles in tuned:
        s = tuned[tiles]
        return replace(s, kind="tiles") if s.kind == "wgmma" and not warpgroup_mma else s
    return _few(shape) if tiles == 1 else _many(shape, tiles)


def _few(shape: ProjectionShape, target: int = 264) -> Setting:
    step = 16 if shape.situ else 8
    kblk = 128 if shape.k % 128 == 0 else 64
    boxes = shape.k // kblk
    splits = [c for c in (1, 2, 4, 7, 8) if boxes % c == 0]
    ksplit = next((c for c in splits if -(-shape.n // step) * c >= 96), splits[-1])
    rows = step
    while -(-shape.n // rows) * ksplit > target and rows < 64:
        rows += step
    nst = boxes // ksplit
    wps = kblk // 32
    groups = next(g for g in (8 // wps, 2, 1) if nst % g == 0)
    fit = max(groups, (90 * 1024) // (rows * kblk * 2) // groups * groups)
    stages = min(nst, fit)
    return Setting("rows", rows, stages, ksplit, kblk, warps=groups * wps, trigger=-1 if stages == nst else 4)


def _many(shape: ProjectionShape, tiles: int) -> Setting:
    kblk = 64
    boxes = shape.k // kblk
    columns = shape.n // 2 if shape.situ else shape.n
    halves = 2 if shape.situ else 1
    best: tuple[float, Setting] | None = None
    for rows in (128, 64):
        half = rows // halves
        for ksplit in (1, 2, 4, 8):
            if boxes % ksplit or half % (8 * ksplit):
                continue
            blocks = -(-columns // half) * ksplit
            # waste of an uneven last wave, then x traffic (in units of the weights)
            waves = -(-blocks // 264)
            idle = max(1.0, 110 / blocks) * (waves * 264 / blocks if waves > 1 else 1.0)
            cost = idle + 8 * tiles / (2 * rows)
            stage = (rows + 8 * tiles) * kblk * 2
            stages = min(boxes // ksplit, CO_RESIDENT // stage)
            if best is None or cost < best[0]:
                best = (
                    cost,
                    Setting("tiles", rows, stages, ksplit, kblk, trigger=-1 if stages * ksplit == boxes else 2),
                )
    assert best is not None
    return best[1]


def publication(op: str, n: int, m: int, ranks: int) -> tuple[int, int]:
    """(targets, owner width) with which the executor launches ``op`` of ``n`` columns at ``m`` rows."""
    if op not in ("o_proj", "moe_front", "shared_down", "dense_down"):
        return 0, 0
    to_everyone = op == "moe_front" or (op == "o_proj" and m < TWO_PHASE_ROWS)
    return ranks, 0 if to_everyone else n // ranks
