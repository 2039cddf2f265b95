"""Table of the chosen settings' times, from the settings searches: us and per cent of the time that reading takes.

summary.py [FLOOR_TBPS] FILE...
"""

from __future__ import annotations

import sys

from choose import measured

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.stream_projection_settings import setting_for, token_tiles


def main() -> None:
    floor = float(sys.argv[1])
    found = measured(sys.argv[2:])
    print("| shard, op | N x K | MB | " + " | ".join(f"{m} rows" for m in (8, 16, 32, 64)) + " |")
    print("|---|---|---|---|---|---|---|")
    seen = set()
    for name, (shape, _) in sp.cases().items():
        key = (shape.n, shape.k, shape.situ)
        if not name.startswith("kimi") or key in seen:
            continue
        seen.add(key)
        cells = []
        for m in (8, 16, 32, 64):
            us = found.get((key, token_tiles(m), setting_for(shape, m)))
            cells.append("-" if us is None else f"{us:.2f} ({100 * shape.bytes(m) / floor / 1e6 / us:.0f} %)")
        mega = shape.weight_bytes / 1e6
        print(f"| {name.removeprefix('kimi-k3-')} | {shape.n} x {shape.k} | {mega:.1f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
