"""Settings for the next search: the fastest of earlier ones with their neighbours, and geometries nobody tried.

    plan.py results/projection_search_*.json --rows 8 64 --case kimi-k3-tp8-o_proj ... --out plan.json

{case: {rows: [setting, ...]}}, the present setting first. Without a GPU: what would not compile is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from choose import measured

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.shapes import ProjectionShape
from kimi_k3.kernels.stream_projection_settings import Setting, setting_for, token_tiles

WHOLE = 227 * 1024  #: shared memory of an SM


class Found:
    """Settings in order, each compilation once."""

    def __init__(self, shape: ProjectionShape, m: int) -> None:
        self.shape, self.m, self.settings = shape, m, dict[Any, Setting]()

    def add(self, s: Setting) -> None:
        try:
            k = sp.make_kernel(sp.Epilogue(self.shape), s, self.m)
        except ValueError:
            return
        if k.smem > WHOLE or k.mt * k.tiles > 32:
            return
        s = replace(s, stages=k.stages, l2=min(s.l2, k.nst - k.stages))
        self.settings.setdefault(sp._untriggered(s), s)

    def around(self, s: Setting) -> None:
        """``s`` with other numbers of boxes fetched into L2."""
        for l2 in (0, 2, 4) if s.kind != "rows" else (0,):
            self.add(replace(s, l2=l2))


def even(found: Found) -> None:
    """x in shared memory, one, two or three blocks to an SM and (nearly) as many on every SM."""
    tokens = 8 * token_tiles(found.m)
    for rows, ksplit, xcast in itertools.product((64, 128), (1, 2, 4, 8), (1, 2)):
        blocks = -(-found.shape.n // rows) * ksplit
        for per in (1, 2, 3):
            stages = (WHOLE // max(2, per) - 2048) // (128 * (rows + tokens))
            if 0.82 < blocks / (132 * per) <= 1 and stages >= 3:
                found.around(Setting("wgmma", rows, stages, ksplit, 64, xcast=xcast, prompt=True, trigger=3))


def plan(shape: ProjectionShape, m: int, paths: list[str], fastest: int) -> list[Setting]:
    found = Found(shape, m)
    found.around(setting_for(shape, m))
    mine, seen = (shape.n, shape.k, shape.situ), set[Any]()
    times = [(us, s) for (key, tiles, s), us in measured(paths).items() if (key, tiles) == (mine, token_tiles(m))]
    for _, s in sorted(times, key=lambda t: t[0]):
        kind = (s.kind, s.rows, s.ksplit, s.kblk, s.xcast, s.stages * s.rows > 900)
        if kind not in seen and len(seen) < fastest:
            seen.add(kind)
            found.around(s)
    if m > 8:
        even(found)
    return list(found.settings.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--case", nargs="+", required=True)
    parser.add_argument("--fastest", type=int, default=5, help="kinds of settings taken from earlier searches")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    made = {
        case: {str(m): [asdict(s) for s in plan(sp.cases()[case][0], m, args.paths, args.fastest)] for m in args.rows}
        for case in args.case
    }
    args.out.write_text(json.dumps(made) + "\n", encoding="utf-8")
    for case, rows in made.items():
        print(case, {m: len(s) for m, s in rows.items()})


if __name__ == "__main__":
    main()
