"""The fastest correct setting of every (shape, token tiles) in the given tuning results, as a Python table.

choose.py tune1.json tune2.json ... > table.txt        with --apply: written into the settings module

A present setting that the files do not time stays; one that they do gives way to one half a per cent faster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels import stream_projection_settings as settings_module
from kimi_k3.kernels.stream_projection_settings import TUNED, Setting, token_tiles

FIELDS = (
    "kind",
    "rows",
    "stages",
    "ksplit",
    "kblk",
    "warps",
    "wm",
    "wk",
    "xstages",
    "xcast",
    "prompt",
    "l2",
    "per_sm",
)


def measured(paths: list[str]) -> dict[tuple[tuple[int, int, bool], int, Setting], float]:
    """(shape, token tiles, setting) -> us of the latest file that has it; wrong or failed settings are left out."""
    found: dict[tuple[tuple[int, int, bool], int, Setting], float] = {}
    for path in paths:
        for rows in json.loads(Path(path).read_text(encoding="utf-8"))["results"].values():
            for r in rows:
                if r["excess"] > 1 or "error" in r or r.get("reuse"):  # a variant of the rows kernel that is gone
                    continue
                shape = sp.cases()[r["case"]][0]
                for key, us in r["us"].items():
                    m, trigger = map(int, key.split("/"))
                    s = Setting(**{f: r[f] for f in FIELDS if f in r}, trigger=trigger)
                    found[((shape.n, shape.k, shape.situ), token_tiles(m), s)] = us
    return found


def table(found: dict[tuple[tuple[int, int, bool], int, Setting], float]) -> str:
    best = {shape: {tiles: (0.0, s) for tiles, s in entry.items()} for shape, entry in TUNED.items()}
    for shape, entry in best.items():
        for tiles, (_, present) in entry.items():
            if (us := found.get((shape, tiles, present))) is not None:
                entry[tiles] = (0.995 * us, present)
    for (shape, tiles, s), us in found.items():
        entry = best.setdefault(shape, {})
        if tiles not in entry or us < entry[tiles][0]:
            entry[tiles] = (us, s)
    default = Setting("rows", 0, 0)
    lines = []
    for shape, entry in sorted(best.items()):
        lines.append(f"    {shape}: {{")
        for tiles, (_, s) in sorted(entry.items()):
            names = [f for f in (*FIELDS[3:], "trigger") if getattr(s, f) != getattr(default, f)]
            extra = "".join(f", {f}={getattr(s, f)}" for f in names)
            lines.append(f'        {tiles}: Setting("{s.kind}", {s.rows}, {s.stages}{extra}),')
        lines.append("    },")
    return "\n".join(lines) + "\n"


def main() -> None:
    paths = [a for a in sys.argv[1:] if a != "--apply"]
    text = table(measured(paths))
    if "--apply" not in sys.argv:
        print(text, end="")
        return
    target = Path(settings_module.__file__)
    source = target.read_text(encoding="utf-8")
    head = "TUNED: dict[tuple[int, int, bool], dict[int, Setting]] = {\n"
    start = source.index(head) + len(head)
    stop = source.index("\n}\n", start) + 1
    target.write_text(source[:start] + text + source[stop:], encoding="utf-8")


if __name__ == "__main__":
    main()
