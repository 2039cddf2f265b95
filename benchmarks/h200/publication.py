"""Published projections on a GPU: what arrives in the peers' mailboxes, and launches compared bit by bit.

    publication.py --case kimi-k3-tp8-o_proj --rows 1 8 16 32 64 [--launches 5000] [--out FILE]

The mailboxes of all peers are on this GPU. They are NaN before every launch; a launch is right when its words, and no
others, are what the storing epilogue would write, with -0 as +0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from projection import gpu

from kimi_k3.kernels import limits
from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.bench_inputs import Peers

CHAIN = 5  #: launches of a graph, each to mailboxes of its own


def bits(peers: Peers) -> list[torch.Tensor]:
    return [box.view(torch.int16) for box in (peers.boxes, peers.logits) if box is not None]


def check(name: str, m: int, kind: str, launches: int) -> dict[str, Any]:
    shape, live = sp.cases()[name]
    ranks = int(name.rpartition("-tp")[2].partition("-")[0])
    sets = [Peers(shape, live, m, ranks, ranks - 1, rows=m + 1) for _ in range(CHAIN)]
    first = sets[0]
    op = sp.StreamProjection(shape, (m,), targets=first.targets, live=live, owner_width=first.owner_width)
    store = sp.StreamProjection(shape, (m,), live=live)
    with gpu():
        x, w = sp.make_inputs(shape, m, m, kind)
        y = torch.empty(m, store.columns, dtype=torch.bfloat16, device="cuda")
        y32 = torch.empty(m, live, device="cuda") if live else None
        store.run(x, w, y, y32)
        exact, _ = sp.reference(shape, x, w, live, torch.float64)
        worst = limits.excess(y, exact, limits.projection_limit(x, w[shape.fp32_rows :], exact))
        wanted = [t.view(torch.int16) for t in first.published(y, y32)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def chain() -> None:
            for peers in sets:
                peers.arm()
            for peers in sets:
                op.run(x, w, table=peers.table, pitch=peers.pitch)
            for peers in sets:
                for got, right in zip(bits(peers), wanted, strict=True):
                    wrong.add_((got != right).any())

        for peers in sets:
            op.check(x, w, table=peers.table)
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        replays = -(-launches // CHAIN)
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    repeat = {"launches": (replays + 1) * CHAIN, "replays": replays, "different": int(wrong)}
    how = "owners" if first.owner_width else "everyone"
    return {"case": name, "m": m, "kind": kind, "to": how, "excess": worst, "repeat": repeat}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--launches", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.time()
    results = [
        check(name, m, kind, args.launches)
        for name in args.case
        for m in args.rows
        for kind in ("random", "adversarial", "coded")
    ]
    for r in results:
        if r["excess"] > 1 or r["repeat"]["different"]:
            print("WRONG", r, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results) + "\n")
    launches = sum(r["repeat"]["launches"] for r in results)
    different = sum(r["repeat"]["different"] for r in results)
    took = time.time() - began
    print(f"publication {args.case}: {launches} launches, {different} different, {took:.1f} s", flush=True)
    if different or any(r["excess"] > 1 for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
