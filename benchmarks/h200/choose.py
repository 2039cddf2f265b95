"""The fastest correct setting of every (shape, token tiles) in the given tuning results, as a Python table.

    choose.py tune1.json tune2.json ... > table.txt
"""

from __future__ import annotations

import json
import sys

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.stream_projection_settings import Setting, token_tiles

FIELDS = ("kind", "rows", "stages", "ksplit", "kblk", "warps", "wm", "wk", "xstages")


def main() -> None:
    best: dict[tuple[int, int, bool], dict[int, tuple[float, Setting]]] = {}
    for path in sys.argv[1:]:
        for rows in json.load(open(path)).values():
            for r in rows:
                if r["excess"] > 1 or "error" in r:
                    continue
                shape = sp.cases()[r["case"]][0]
                for key, us in r["us"].items():
                    m, trigger = map(int, key.split("/"))
                    s = Setting(**{f: r[f] for f in FIELDS if f in r}, trigger=trigger)
                    entry = best.setdefault((shape.n, shape.k, shape.situ), {})
                    tiles = token_tiles(m)
                    if tiles not in entry or us < entry[tiles][0]:
                        entry[tiles] = (us, s)
    default = Setting("rows", 0, 0)
    for shape_key, entry in sorted(best.items()):
        print(f"    {shape_key}: {{")
        for tiles, (_, s) in sorted(entry.items()):
            extra = "".join(
                f", {f}={getattr(s, f)}" for f in (*FIELDS[3:], "trigger") if getattr(s, f) != getattr(default, f)
            )
            print(f'        {tiles}: Setting("{s.kind}", {s.rows}, {s.stages}{extra}),')
        print("    },")


if __name__ == "__main__":
    main()
