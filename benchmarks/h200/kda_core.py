"""Timing of the KDA decode core on one GPU: graph replays over layers with their own states and weights (cold L2).

``python -m benchmarks.h200.kda_core --out FILE [--sweep] [--rows 1 2 ...] [--heads 12 6]``. Bytes are what a step must
move (``kda_core_cases.moved_bytes``); the floors are a kernel that only reads and a device-to-device copy, same run.
``--sweep`` times every candidate setting instead of the prepared one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kimi_k3.kernels import bench
from kimi_k3.kernels.bench_inputs import KdaLayers
from kimi_k3.kernels.cute_util import EVICT_FIRST
from kimi_k3.kernels.kda_core import HEAD, KdaCore, Settings
from kimi_k3.kernels.kda_core_cases import moved_bytes
from kimi_k3.kernels.kda_core_launch import choose
from kimi_k3.kernels.shapes import pad16

GOALS = {"fraction_from_16_requests": 0.70, "us_at_1_request": 5.0}


def candidates(heads: int, tokens: int, requests: int) -> list[Settings]:
    """Every geometry that could pay for this many (head, request) pairs."""
    pairs = heads * requests
    found = []
    if pairs >= 48:
        found += [Settings(lanes=n, occupancy=o) for n in (8, 16) for o in (2, 3)]
        found += [Settings(lanes=n, occupancy=o, bulk_store=True) for n in (8, 16) for o in (2, 3)]
        found += [Settings(lanes=16, bulk_store=True, store_hint=EVICT_FIRST)]
    if pairs > 132 and tokens == 1:
        found += [Settings(lanes=n, resident=r) for n in (8, 16) for r in (1, 2)]
        found += [Settings(resident=2, store_hint=EVICT_FIRST), Settings(resident=2, load_hint=0)]
        found += [Settings(resident=2, trigger="end")]
    if pairs <= 192:
        found += [Settings(cluster=2, lanes=n) for n in (8, 16)]
    if pairs <= 96:
        found += [Settings(cluster=4, lanes=n, rows_per_pass=4) for n in (8, 16)]
    if pairs <= 24:
        found += [Settings(cluster=8, lanes=16, rows_per_pass=2), Settings(cluster=8, warps=4, rows_per_pass=4)]
    return found


class _Nothing:
    def skip(self, *args: Any) -> None:
        """A step that is left out."""


def ablations() -> dict[str, type[KdaCore]]:
    """The kernel with steps left out: where the time goes. Results are wrong, traffic and waits are not."""
    parts = {
        "recurrence": ("advance",),
        "stores": ("store_rows",),
        "gates": ("gate_weights", "gates"),
        "convolution": ("conv_weights", "conv_taps", "convolve", "shift"),
    }
    parts["all but state traffic"] = (*parts["recurrence"], *parts["gates"], *parts["convolution"], "norm")
    return {
        f"without {name}": type("Ablated", (KdaCore,), dict.fromkeys(steps, _Nothing.skip))
        for name, steps in parts.items()
    }


def describe(s: Settings) -> str:
    hints = f"{'b' * s.bulk_store} {'l' * (s.load_hint > 0)}{'s' * (s.store_hint > 0)}"
    return f"c{s.cluster}w{s.warps}L{s.lanes}p{s.rows_per_pass}o{s.occupancy}r{s.resident}{hints} {s.trigger}"


def measure(
    heads: int, requests: int, tokens: int, columns: int, floor: float, sweep: bool, ablate: bool
) -> list[bench.Timing]:
    size = moved_bytes(requests, tokens, heads, pad16(4 * heads * HEAD + HEAD + heads))
    layers = KdaLayers(heads, requests, tokens, columns, bench.distinct(size, most=256))
    results = []
    best = choose(heads, tokens, requests)
    todo: dict[str, tuple[Settings, type[KdaCore]]] = {"": (best, KdaCore)}
    if sweep:
        todo = {" " + describe(s): (s, KdaCore) for s in candidates(heads, tokens, requests)}
    if ablate:
        todo.update({" " + name: (best, kernel) for name, kernel in ablations().items()})
    for note, (s, kernel) in todo.items():
        try:
            launch = partial(layers.launch, layers.prepared(s, kernel))
            name = f"kda_core h{heads} B{requests} q{tokens}{'n' if columns else ''}{note}"
            extra: dict[str, Any] = {"heads": heads, "requests": requests, "tokens": tokens, "settings": asdict(s)}
            t = bench.time_launches(name, launch, layers.count, bytes_per_launch=size, floor_tbps=floor, extra=extra)
            results.append(t)
        except Exception as e:  # a setting that does not fit is a result of the sweep, not its end
            if not sweep:
                raise
            print(f"  {s}: {type(e).__name__}: {str(e).splitlines()[0][:120]}")
    return sorted(results, key=lambda t: t.us) if sweep else results


def copy_floor() -> float:
    """TB/s of an elementwise kernel that reads one buffer and writes another, bytes read plus bytes written."""
    a = torch.randn(500_000_000, device="cuda")
    b = torch.empty_like(a)

    def launch(_: int) -> None:
        torch.neg(a, out=b)

    us, _, _ = bench.time_graph(bench.graph_of(launch, 1), 1, 20)
    return 8 * a.numel() / us / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plain", type=int, default=1, help="0: leave plain decode out")
    parser.add_argument("--ablate", action="store_true", help="also time the kernel with steps left out")
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 6])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--verify", type=int, nargs="*", default=[], help="tokens per request, of a table of 8 slots")
    args = parser.parse_args()
    floor, copy = bench.read_floor(), copy_floor()
    print(f"read {floor:.3f} TB/s, copy {copy:.3f} TB/s", flush=True)
    timings: list[bench.Timing] = []
    for heads in args.heads:
        for tokens, columns in [(1, 0)] * args.plain + [(t, 8) for t in args.verify]:
            for rows in args.rows:
                if rows % tokens:
                    continue
                found = measure(heads, rows // tokens, tokens, columns, floor, args.sweep, args.ablate)
                print(bench.table(found), flush=True)
                timings += found
                torch.cuda.empty_cache()
            bench.write(args.out, timings, floor, "KDA decode core, one layer", copy_TBps=round(copy, 4), goals=GOALS)
    print(json.dumps({"written": str(args.out), "timings": len(timings)}))


if __name__ == "__main__":
    main()
