"""Streaming projection on a GPU: correctness, settings, timings. One group of shapes per process.

    projection.py check --case kimi-k3-tp8-kda_in_proj --rows 1 8 64 [--launches 5000]
    projection.py tune --case ... --rows 8 [--out FILE]
    projection.py time --case ... --rows 1 2 4 8 16 32 64 [--out FILE]

Compilation happens before the GPU lock (a file) is taken, so that several processes can prepare in parallel.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kimi_k3.kernels import bench, limits
from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.bench_inputs import XS, ProjectionLayers
from kimi_k3.kernels.shapes import ProjectionShape
from kimi_k3.kernels.stream_projection_settings import Setting, setting_for, token_tiles

LOCK = Path("/tmp/gpu.lock")


@contextmanager
def gpu() -> Iterator[None]:
    with LOCK.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class Buffers:
    """Outputs of one (shape, m), poisoned with NaN on request."""

    def __init__(self, shape: ProjectionShape, m: int, live: int) -> None:
        columns = (shape.n // 2 if shape.situ else shape.n) - shape.fp32_rows
        self.y = torch.empty(m + 1, columns, dtype=torch.bfloat16, device="cuda")
        self.y32 = torch.empty(m + 1, live, dtype=torch.float32, device="cuda") if shape.fp32_rows else None
        self.m = m

    def poison(self) -> None:
        self.y.fill_(float("nan"))
        if self.y32 is not None:
            self.y32.fill_(float("nan"))

    def args(self) -> dict[str, Any]:
        return {"y": self.y[: self.m], "y32": None if self.y32 is None else self.y32[: self.m]}

    def untouched(self) -> bool:
        rows = [self.y[self.m]] + ([] if self.y32 is None else [self.y32[self.m]])
        return all(bool(torch.isnan(r).all()) for r in rows)

    def copy(self) -> list[torch.Tensor]:
        return [t[: self.m].clone() for t in (self.y, self.y32) if t is not None]


def verify(shape: ProjectionShape, live: int, x: torch.Tensor, w: torch.Tensor, out: list[torch.Tensor]) -> float:
    """Largest error over its limit (at most 1 passes)."""
    exact, exact32 = sp.reference(shape, x, w, live, torch.float64)
    if shape.situ:
        return limits.excess(out[0], exact, limits.situ_limit(x, w))
    worst = limits.excess(out[0], exact, limits.projection_limit(x, w[shape.fp32_rows :], exact))
    if exact32 is not None:
        bound = limits.accumulation(x, w[:live]) + 2.0**-24 * exact32.abs() + 2.0**-149
        worst = max(worst, limits.excess(out[1], exact32, bound))
    return worst


def check(name: str, rows: list[int], launches: int, floor: float) -> list[dict[str, Any]]:
    shape, live = sp.cases()[name]
    op = sp.StreamProjection(shape, rows, live=live)
    results = []
    with gpu():
        for m in rows:
            for kind, seed in itertools.product(
                ("random", "adversarial", "coded"), (1, 2) if m in (1, 8, 64) else (1,)
            ):
                x, w = sp.make_inputs(shape, m, seed, kind)
                buffers = Buffers(shape, m, live)
                buffers.poison()
                op.check(x, w, **buffers.args())
                op.run(x, w, **buffers.args())
                torch.cuda.synchronize()
                first = buffers.copy()
                worst = verify(shape, live, x, w, first)
                ok = buffers.untouched()
                entry: dict[str, Any] = {
                    "case": name,
                    "m": m,
                    "kind": kind,
                    "seed": seed,
                    "excess": worst,
                    "guard_row_untouched": ok,
                }
                if launches and seed == 1 and kind != "adversarial":
                    entry["repeat"] = repeat(op, x, w, buffers, first, launches)
                results.append(entry)
                if worst > 1 or not ok or entry.get("repeat", {}).get("different"):
                    print("WRONG", entry, flush=True)
    return results


def repeat(
    op: Any, x: torch.Tensor, w: torch.Tensor, buffers: Buffers, first: list[torch.Tensor], launches: int
) -> dict:
    """One graph of 5 chained launches, each into its own poisoned output, compared bit by bit with the first launch on
    the device; replayed until ``launches`` launches were checked."""
    n = 5
    others = [Buffers(op.shape, buffers.m, op.epilogue.live) for _ in range(n)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    bits = [f.view(torch.int16) for f in first]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for o in others:
            o.poison()
        for o in others:
            op.run(x, w, **o.args())
        for o in others:
            for t, f in zip((t for t in (o.y, o.y32) if t is not None), bits, strict=True):
                wrong += (t[: buffers.m].view(torch.int16) != f).any()
    replays = -(-launches // n)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return {"launches": replays * n, "replays": replays, "different": int(wrong)}


def candidates(shape: ProjectionShape, m: int) -> list[Setting]:
    """Settings worth timing: the present one first, then by how close the grid and the ring are to what paid before."""
    tiles = token_tiles(m)
    out = []
    if tiles <= 4:
        rings = (36, 48, 60, 72, 96) if tiles == 1 else (60, 72, 84)
        warps_kblk = ((4, 128), (8, 128), (6, 192), (8, 256))
        for rows, ksplit, (warps, kblk), ring in itertools.product(
            (16, 24, 32, 40, 48, 56, 64, 80), (1, 2, 3, 4, 7, 8), warps_kblk, rings
        ):
            out.append(Setting("rows", rows, ring * 1024 // (rows * kblk * 2), ksplit, kblk, warps))
    if tiles >= 2:
        for rows, ksplit, kblk, ring in itertools.product((64, 128, 192), (1, 2, 3, 4, 7, 8), (64, 128), (80, 96)):
            wbox, xbox = rows * kblk * 2, 8 * tiles * kblk * 2
            x = max(2, min(ring * 1024 // wbox, (108 - ring) * 1024 // xbox, 6))
            out.append(Setting("wgmma", rows, ring * 1024 // wbox, ksplit, kblk, wm=4, xstages=x))
    good: dict[Any, tuple[float, Setting]] = {}
    for s in out:
        try:
            k = sp.make_kernel(sp.Epilogue(shape), s, m)
        except ValueError:
            continue
        blocks = k.blocks * k.ksplit
        if s.stages < 2 or k.smem > 113 * 1024 or k.mt * k.tiles > 24:
            continue
        traffic = 8 * tiles * shape.k * 2 * k.blocks / shape.weight_bytes  # x from L2, in units of the weights
        if s.kind == "wgmma":
            cost = max(100 / blocks, blocks / 264, 1.0) + 0.3 * max(0.0, traffic - 0.5) + 0.02 * s.ksplit
        else:
            resident = 132 * (227 // (k.smem // 1024 + 1))
            cost = max(190 / blocks, blocks / resident, 1.0) + 0.3 * max(0.0, traffic - 0.5) + 0.03 * s.ksplit
        s = replace(s, stages=k.stages)
        good.setdefault(sp._untriggered(s), (cost, s))
    present = setting_for(shape, m)
    ordered = [
        s for _, s in sorted(good.values(), key=lambda t: t[0]) if sp._untriggered(s) != sp._untriggered(present)
    ]
    if tiles >= 2:  # interleave the kinds
        few = [s for s in ordered if s.kind == "rows"]
        wide = [s for s in ordered if s.kind == "wgmma"]
        ordered = [s for pair in itertools.zip_longest(wide, few) for s in pair if s]
    return [present, *ordered]


def one(op: Any, x: torch.Tensor, weights: list[torch.Tensor], buffers: Buffers, i: int) -> None:
    op.run(x, weights[i], **buffers.args())


def tune(
    name: str, rows: list[int], limit: int, shard: str, deadline: float, plan: Path | None
) -> list[dict[str, Any]]:
    """Times of the candidates, or of the settings that ``plan`` (see plan.py) has for this case and ``rows[-1]``."""
    shape, live = sp.cases()[name]
    m = rows[-1]
    if plan:
        chosen = [Setting(**s) for s in json.loads(plan.read_text(encoding="utf-8"))[name][str(m)]]
    else:
        chosen = candidates(shape, m)
    if limit:
        chosen = chosen[:limit]
    part, parts = map(int, shard.split("/"))
    chosen = chosen[part::parts]
    ops = []
    for s in chosen:
        try:
            ops.append(sp.StreamProjection(shape, rows, live=live, settings=dict.fromkeys(rows, s)))
        except Exception as e:  # a setting that does not compile is a result, too
            print("compile", name, s, type(e).__name__, str(e)[:200], flush=True)
    out = []
    with gpu():
        began = time.time()
        n = bench.distinct(shape.weight_bytes, most=160)
        weights = [
            torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16) * shape.k**-0.5
            for _ in range(min(n, 16))
        ]
        while len(weights) < n:
            weights.append(weights[len(weights) % 16].clone())
        xs = {r: torch.randn(r, shape.k, device="cuda", dtype=torch.bfloat16) for r in rows}
        for op in ops:
            if time.time() - began > deadline:
                break
            s = op.setting(m)
            kernel = sp.make_kernel(op.epilogue, s, m)
            entry = {"case": name, **asdict(s), "blocks": kernel.blocks * kernel.ksplit, "us": {}, "excess": 0.0}
            try:
                for r in rows:
                    buffers = Buffers(shape, r, live)
                    buffers.poison()
                    op.run(xs[r], weights[0], **buffers.args())
                    torch.cuda.synchronize()
                    entry["excess"] = max(entry["excess"], verify(shape, live, xs[r], weights[0], buffers.copy()))
                    triggers = (-1, 3) if kernel.stages < kernel.nst else (-1, 1000)
                    for trigger in sorted({*triggers, s.trigger}):
                        code = op._code[r][0]
                        op._code[r] = (code, replace(s, trigger=trigger))
                        t = bench.time_launches("", partial(one, op, xs[r], weights, buffers), n, replays=11)
                        entry["us"][f"{r}/{trigger}"] = round(t.us, 3)
            except Exception as e:
                entry["error"] = f"{type(e).__name__}: {e}"[:200]
                print("FAILED", entry, flush=True)
                out.append(entry)
                break
            out.append(entry)
    return out


def timing(name: str, rows: list[int], floor: float, replays: int) -> list[bench.Timing]:
    shape, live = sp.cases()[name]
    op = sp.StreamProjection(shape, rows, live=live)
    out = []
    with gpu():
        n = bench.distinct(shape.weight_bytes)
        for m in rows:
            layers = ProjectionLayers(shape, live, m, n)
            launch, size = partial(layers.launch, op), shape.bytes(m)
            mine = bench.time_launches(
                f"{name}/m{m}",
                launch,
                n,
                bytes_per_launch=size,
                floor_tbps=floor,
                replays=replays,
                extra={"setting": asdict(op.setting(m)), "library": "cute"},
            )
            layers.y.fill_(float("nan"))
            launch(n - 1)
            outputs = [layers.y] if layers.y32 is None else [layers.y, layers.y32]
            worst = verify(shape, live, layers.xs[(n - 1) % XS], layers.weights[n - 1], outputs)
            mine.extra["excess"] = worst
            base = bench.time_launches(
                f"{name}/m{m} cublas",
                layers.matmul,
                n,
                bytes_per_launch=size,
                floor_tbps=floor,
                replays=replays,
                extra={"library": "torch.mm", "note": "product only" if shape.situ or shape.fp32_rows else ""},
            )
            out += [mine, base]
            if worst > 1:
                print("WRONG", name, m, worst, flush=True)
            del layers, launch
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "tune", "time", "floor"))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--launches", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--plan", type=Path, help="settings to time, from plan.py")
    parser.add_argument("--shard", default="0/1", help="part/parts of the candidates")
    parser.add_argument("--deadline", type=float, default=20.0)
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.time()
    if args.what == "floor":
        with gpu():
            print(json.dumps({"read_floor_TBps": bench.read_floor(), **bench.environment()}))
        return
    results: list[Any] = []
    for name in args.case:
        if args.what == "check":
            results += check(name, args.rows, args.launches, args.floor)
        elif args.what == "tune":
            results += tune(name, args.rows, args.limit, args.shard, args.deadline, args.plan)
        else:
            timings = timing(name, args.rows, args.floor, args.replays)
            print(bench.table(timings), flush=True)
            results += [{**asdict(t), "fraction": t.fraction} for t in timings]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results) + "\n")
    worst = max((r.get("excess", 0.0) for r in results), default=0.0)
    took = f"{time.time() - began:.1f} s"
    print(
        f"{args.what} {args.case} rows {args.rows}: {len(results)} results, worst {worst:.3f}, {took}",
        flush=True,
    )
    if args.what == "check" and (worst > 1 or any(r.get("repeat", {}).get("different") for r in results)):
        sys.exit(1)


if __name__ == "__main__":
    main()
