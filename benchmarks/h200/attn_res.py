"""Timing of the attention residual on one GPU: graph replays over sites with their own buffers (cold L2).

``python -m benchmarks.h200.attn_res --out FILE [--sweep]``: pre-attention with eight saved blocks (the most) and with
one, a block opener, the final site; rows 1 .. 64. ``--sweep`` times every candidate geometry.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from kimi_k3.kernels import bench
from kimi_k3.kernels.attn_res import Settings
from kimi_k3.kernels.attn_res_cases import moved_bytes
from kimi_k3.kernels.attn_res_launch import choose
from kimi_k3.kernels.bench_inputs import ResidualSites
from kimi_k3.kernels.shard_bench import SITES


def candidates() -> list[Settings]:
    plain = [Settings(7, 1), Settings(4, 1), Settings(2, 1), Settings(1, 2), Settings(2, 2), Settings(7, 1, 4)]
    return [*plain, Settings(7, 1, 1, "entry"), Settings(7, 1, 1, "end"), Settings(2, 1, 1, "end")]


def measure(site: str, rows: int, hidden: int, floor: float, sweep: bool) -> list[bench.Timing]:
    kw = SITES[site]
    size = moved_bytes(rows, hidden, kw["stored"], "add", kw.get("opens", False), False)
    count = bench.distinct(size, total=400_000_000, most=256)
    sites = ResidualSites(kw, rows, hidden, count)
    results = []
    for s in candidates() if sweep else [choose(hidden, rows)]:
        try:
            launch = partial(sites.launch, sites.prepared(s))
            note = f" c{s.cluster} v{s.vectors} o{s.occupancy} {s.trigger}" if sweep else ""
            t = bench.time_launches(
                f"attn_res {site} H{hidden} M{rows}{note}", launch, count, bytes_per_launch=size, floor_tbps=floor,
                extra={"site": site, "rows": rows, "hidden": hidden, "settings": asdict(s)},
            )  # fmt: skip
            results.append(t)
        except Exception as e:
            if not sweep:
                raise
            print(f"  {s}: {type(e).__name__}: {str(e).splitlines()[0][:120]}")
    return sorted(results, key=lambda t: t.us) if sweep else results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--sites", nargs="+", default=list(SITES))
    args = parser.parse_args()
    floor = bench.read_floor()
    timings: list[bench.Timing] = []
    for site in args.sites:
        for rows in args.rows:
            found = measure(site, rows, 7168, floor, args.sweep)
            print(bench.table(found), flush=True)
            timings += found
            torch.cuda.empty_cache()
    bench.write(args.out, timings, floor, "attention residual, one site")
    print(json.dumps({"written": str(args.out), "timings": len(timings)}))


if __name__ == "__main__":
    main()
