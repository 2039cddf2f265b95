"""The tables of README.md, from the records of a run or bundle: us, part of the read floor, the library's us.

    tables.py bundles/kimi-k3-h200-shard-*/

Bold: a goal was missed; ``!``: the library was faster. Parts of the floor are rounded down.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROWS = (1, 2, 4, 8, 16, 32, 64)


class Times:
    """Records by kernel name and arm."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "records" / "performance.jsonl").read_text(encoding="utf-8").splitlines()
        found = [r for r in map(json.loads, lines) if r["metric"] == "kernel_time"]
        self.own, self.library = (
            {r["details"]["kernel"]: r for r in found if r["arm"] == arm} for arm in ("optimized", "stock")
        )

    def us(self, kernel: str) -> float:
        return 1e6 * float(self.own[kernel]["value"])

    def part(self, kernel: str) -> float:
        return float(self.own[kernel]["details"]["floor_s"]) / float(self.own[kernel]["value"])

    def missed(self, kernel: str) -> bool:
        fraction, seconds = (self.own[kernel]["details"][k] for k in ("goal_fraction", "goal_s"))
        return bool((fraction and self.part(kernel) < fraction) or (seconds and self.own[kernel]["value"] > seconds))

    def cell(self, kernel: str, least: float = 0.0) -> str:
        """Empty where nothing was timed; a part of the floor below ``least`` says nothing and is left out."""
        if kernel not in self.own:
            return ""
        part = f" ({int(100 * self.part(kernel))} %)" if self.part(kernel) >= least else ""
        text = f"{self.us(kernel):.2f}{part}"
        text = f"**{text}**" if self.missed(kernel) else text
        stock = self.library.get(kernel)
        if stock:
            text += f" {1e6 * stock['value']:.1f}" + (" !" if stock["value"] < self.own[kernel]["value"] else "")
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
            size = str(t.own[f"{op}/tp{tp}/m1"]["details"]["shape"]).split(",")[0]
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
    goals = [k for k, r in t.own.items() if r["details"]["goal_fraction"] or r["details"]["goal_s"]]
    floors = {r["details"]["bytes"] / r["details"]["floor_s"] / 1e12 for r in t.own.values()}
    won = sum(t.library[k]["value"] >= t.own[k]["value"] for k in t.library)
    print(
        f"{sum(not t.missed(k) for k in goals)} of {len(goals)} goals met, {won} of {len(t.library)} at least as fast"
    )
    print(
        f"read floor {min(floors):.3f} to {max(floors):.3f} TB/s; missed:", ", ".join(k for k in goals if t.missed(k))
    )


if __name__ == "__main__":
    main()
