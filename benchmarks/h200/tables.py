"""The tables of README.md, from the records of a run or bundle: us, part of the read floor, the library's us.

    tables.py bundles/kimi-k3-h200-shard-*/

Bold: a goal was missed; ``!``: the library was faster. Parts of the floor are rounded down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fasttrack.gates.kernels import goal_text, met, part_of_floor, percent
from fasttrack.records.schema import parse_record

ROWS = (1, 2, 4, 8, 16, 32, 64)


class Times:
    """Records by kernel name and arm."""

    def __init__(self, folder: Path) -> None:
        path = folder / "records" / "performance.jsonl"
        records = [parse_record(line, where=path.name) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [r for r in records if r.metric == "kernel_time"]
        self.own, self.library = (
            {str(r.details["kernel"]): r for r in found if r.arm == arm} for arm in ("optimized", "stock")
        )

    def cell(self, kernel: str, least: float = 0.0) -> str:
        """Empty where nothing was timed; a part of the floor below ``least`` says nothing and is left out."""
        own, stock = self.own.get(kernel), self.library.get(kernel)
        if own is None:
            return ""
        part = f" ({percent(own, 0).replace('%', ' %')})" if part_of_floor(own) >= least else ""
        text = f"{1e6 * own.value:.2f}{part}"
        text = text if met(own) else f"**{text}**"
        if stock:
            text += f" {1e6 * stock.value:.1f}" + (" !" if stock.value < own.value else "")
        return text


def table(head: str, lines: Iterable[tuple[str, Callable[[int], str]]], rows: tuple[int, ...] = ROWS) -> None:
    print(f"| {head} | " + " | ".join(map(str, rows)) + " |")
    print("|" + "---|" * (head.count("|") + 1 + len(rows)))
    for name, cell in lines:
        print(f"| {name} | " + " | ".join(cell(m) for m in rows) + " |")
    print()


def projections(t: Times) -> Iterator[tuple[str, Callable[[int], str]]]:
    for tp in (8, 16):
        for op in dict.fromkeys(k.split("/")[0] for k in t.own if f"/tp{tp}/m" in k):
            size = str(t.own[f"{op}/tp{tp}/m1"].details["shape"]).split(",")[0]
            n, k = map(int, size.split(" x "))
            yield f"TP{tp} {op} {size} | {2e-6 * n * k:.1f}", lambda m, at=f"{op}/tp{tp}": t.cell(f"{at}/m{m}")


def published(t: Times) -> Iterator[tuple[str, Callable[[int], str]]]:
    for tp in (8, 16):
        for op in ("o_proj", "moe_front", "shared_down", "dense_down"):
            yield f"TP{tp} {op}", lambda m, at=f"{op}/tp{tp}": t.cell(f"{at}/m{m}/published")


def kda_core(t: Times) -> Iterator[tuple[str, Callable[[int], str]]]:
    for tp in (8, 16):
        for tokens, label in ((1, "plain"), (4, "q4"), (8, "q8")):
            name = f"kda_core/tp{tp}/b{{}}" + (f"q{tokens}" if tokens > 1 else "")
            yield f"TP{tp} {label}", lambda m, name=name, q=tokens: t.cell(name.format(m // q), 0.15) if m >= q else ""


def residual(t: Times) -> Iterator[tuple[str, Callable[[int], str]]]:
    for site in ("pre1", "pre8", "open7", "final"):
        yield site, lambda m, site=site: t.cell(f"attn_res/{site}/m{m}", 0.12)


def main() -> None:
    t = Times(Path(sys.argv[1]))
    table("shard, op | MB", projections(t))
    table("shard, op", published(t), (1, 8, 64))
    table("", kda_core(t))
    table("site", residual(t))
    goals = {k: met(r) for k, r in t.own.items() if goal_text(r)}
    floors = {r.details["bytes"] / r.details["floor_s"] / 1e12 for r in t.own.values()}
    won = sum(t.library[k].value >= t.own[k].value for k in t.library)
    print(f"{sum(goals.values())} of {len(goals)} goals met, {won} of {len(t.library)} at least as fast")
    missed = ", ".join(k for k, good in goals.items() if not good)
    print(f"read floor {min(floors):.3f} to {max(floors):.3f} TB/s; missed: {missed}")


if __name__ == "__main__":
    main()
