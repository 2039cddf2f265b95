"""Kernel times of a shard as a grid: a row per kernel and deployment, a column per number of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fasttrack.gates.kernels import goal_text, met, natural, percent
from fasttrack.records import PerformanceRecord
from fasttrack.report.svg import CHARACTER, plain

#: state -> (fill, what it means)
STATES = {
    "met": ("#8fd19e", "goal met"),
    "missed": ("#e0706b", "goal missed"),
    "free": ("#d6e4f5", "no goal"),
}
_BOX, _ROW = 92, 40


@dataclass(frozen=True)
class Cell:
    """One kernel at one size.

    ``part`` of the floor is rounded down. ``library``: another library's time of the same product, or empty.
    """

    state: str
    us: str
    part: str
    goal: str
    library: str
    slower: bool  #: than the library

    @property
    def text(self) -> str:
        goal = f" ({self.goal}: {self.state})" if self.goal else ""
        beside = f"; {self.library}{' (faster)' if self.slower else ''}" if self.library else ""
        return f"{self.us} us, {self.part}{goal}{beside}"


@dataclass(frozen=True)
class KernelGrid:
    columns: tuple[int, ...]  #: rows of the step
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def kernel_grid(records: Iterable[Any]) -> KernelGrid:
    """The kernels that were timed; empty if none was."""
    found = [r for r in records if isinstance(r, PerformanceRecord) and r.metric == "kernel_time"]
    library = {str(r.details["kernel"]): r for r in found if r.arm == "stock"}
    series: dict[str, dict[int, Cell]] = {}
    for record in sorted((r for r in found if r.arm == "optimized"), key=lambda r: natural(str(r.details["kernel"]))):
        name, rows = str(record.details["kernel"]), int(record.details["rows"])
        series.setdefault(_series(name, rows), {})[rows] = _cell(record, library.get(name))
    columns = tuple(sorted({rows for cells in series.values() for rows in cells}))
    return KernelGrid(columns, tuple((name, tuple(cells.get(c) for c in columns)) for name, cells in series.items()))


def _series(name: str, rows: int) -> str:
    """``kda_core/tp8/b4q2`` of 8 rows -> ``kda_core/tp8/b*q2``: the last part that holds a divisor of the rows."""
    parts = name.split("/")
    for i in reversed(range(len(parts))):
        found = re.fullmatch(r"([a-z]+)(\d+)(.*)", parts[i])
        if found and found[1] != "tp" and int(found[2]) and rows % int(found[2]) == 0:
            return "/".join([*parts[:i], f"{found[1]}*{found[3]}", *parts[i + 1 :]])
    return name


def _cell(record: PerformanceRecord, library: PerformanceRecord | None) -> Cell:
    goal = goal_text(record)
    state = "free" if not goal else "met" if met(record) else "missed"
    beside = f"{library.details['measured']} {1e6 * library.value:.2f}" if library else ""
    slower = library is not None and record.value > library.value
    return Cell(state, f"{1e6 * record.value:.2f}", percent(record, 0), goal, beside, slower)


def kernel_layout(grid: KernelGrid) -> dict[str, Any]:
    """Template variables of the figure. What the colours say, the table of the report says as well."""
    labels = [plain(name, 60) for name, _ in grid.rows]
    left = 16 + CHARACTER * max(len(label) for label in [*labels, "us, part of the floor"])
    columns = [{"x": left + i * _BOX + _BOX // 2 - 2, "text": str(c)} for i, c in enumerate(grid.columns)]
    rows = [
        {"y": 30 + i * _ROW, "label": label, "boxes": _boxes(cells, left)}
        for i, (label, (_, cells)) in enumerate(zip(labels, grid.rows, strict=True))
    ]
    bottom = 30 + len(rows) * _ROW + 8
    legend, x = [], 8
    for fill, text in STATES.values():
        legend.append({"x": x, "y": bottom, "fill": fill, "stroke": "none", "text": text})
        x += 34 + CHARACTER * len(text)
    legend.append({"x": x, "y": bottom, "fill": "#ffffff", "stroke": "#b00020", "text": "slower than the library"})
    width = max(left + len(columns) * _BOX + 8 + CHARACTER * len("rows"), x + 34 + CHARACTER * 23)
    return {"width": width, "height": bottom + 24, "columns": columns, "rows": rows, "legend": legend}


def _boxes(cells: tuple[Cell | None, ...], left: int) -> list[dict[str, Any]]:
    return [
        {
            "x": left + i * _BOX,
            "width": _BOX - 4,
            "fill": STATES[cell.state][0],
            "stroke": "#b00020" if cell.slower else "none",
            "text": f"{cell.us}, {cell.part}",
            "below": f"{cell.library.rsplit(' ', 1)[-1]} library" if cell.library else "",
        }
        for i, cell in enumerate(cells)
        if cell is not None
    ]
