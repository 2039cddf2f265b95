"""Merge the per-case results of projection.py into one record with the environment, and print a table.

collect.py time|check FILE... OUT FLOOR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def main() -> None:
    what, *files, out, floor = sys.argv[1:]
    rows = [r for f in files if Path(f).is_file() for r in load(f)]  # a case that failed has left none
    if not rows:
        print(f"no results in {' '.join(files)}")
        return
    environment = load(floor) if Path(floor).stat().st_size else {}
    document = {
        "what": "streaming projections, one rank's shard, one GPU" if what == "time" else "launches checked",
        "method": "median over 60 replays of a CUDA graph timed with events, per launch; distinct weights per launch, "
        "at least 4 GB in all (or 384 launches); launches chained by programmatic dependent launch; no profiler"
        if what == "time"
        else "errors against float64 over the derived limit (at most 1 passes); repeat: launches compared bit by bit "
        "with the first (published ones: with what the storing epilogue wrote), outputs NaN-filled before each",
        "floor": "read_floor_TBps: bulk-copy kernel that only reads 4 GB, same run; floor_us = bytes / that",
        "environment": environment,
        "results": rows,
    }
    Path(out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if what == "check":
        repeats = [r["repeat"] for r in rows if "repeat" in r]
        print(
            f"{len(rows)} checks, worst excess {max(r['excess'] for r in rows):.3f}, "
            f"{sum(r['launches'] for r in repeats)} repeated launches, {sum(r['different'] for r in repeats)} different"
        )
        return
    by_case: dict[str, dict[str, Any]] = {}
    for r in rows:
        case, m = r["name"].split(" ")[0].rsplit("/m", 1)
        by_case.setdefault(case, {})[m + ("c" if "cublas" in r["name"] else "")] = r
    ms = ["1", "2", "4", "8", "16", "32", "64"]
    print("case".ljust(28), *[f"{'m' + m:>17s}" for m in ms], " (us, % of floor, cuBLAS us)")
    for case, t in by_case.items():
        cells = [f"{t[m]['us']:6.2f} {100 * t[m]['fraction']:3.0f}% {t[m + 'c']['us']:5.1f}" for m in ms if m in t]
        print(case.removeprefix("kimi-k3-").ljust(28), *[f"{c:>17s}" for c in cells])


if __name__ == "__main__":
    main()
