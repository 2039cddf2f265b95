"""The coverage grid as an SVG: plain text from a template, so the same grid gives the same bytes."""

from __future__ import annotations

from typing import Any

from fasttrack.report.coverage import Grid
from fasttrack.report.text import plain

#: State -> (fill, what it means). What the colours say, the numbers in the boxes say as well.
STATES = {
    "full": ("#8fd19e", "all specialised"),
    "partial": ("#ffd166", "some fell back"),
    "none": ("#e0706b", "all fell back"),
    "empty": ("#f4c2e7", "planned, no steps"),
    "unplanned": ("#e3e3e3", "claimed, not in this tier"),
}
_BOX, _GAP, _ROW = 62, 4, 30
CHARACTER = 7  #: pixels a character takes, about


def layout(grid: Grid) -> dict[str, Any]:
    """Template variables. Widths are estimated from character counts: no font is measured."""
    labels = [plain(row.label, 60) for row in grid.rows]
    left = 16 + CHARACTER * max([len(label) for label in labels] + [len("specialised / all steps")])
    pitch = _BOX + _GAP
    columns = [{"x": left + i * pitch + _BOX // 2, "text": str(c)} for i, c in enumerate(grid.columns)]
    rows = [
        {"y": 30 + index * _ROW, "label": label, "boxes": _boxes(row.counts, left)}
        for index, (row, label) in enumerate(zip(grid.rows, labels, strict=True))
    ]
    bottom = 30 + len(rows) * _ROW + 8
    legend, x = [], 8
    for fill, text in STATES.values():
        legend.append({"x": x, "y": bottom, "fill": fill, "text": text})
        x += 34 + CHARACTER * len(text)
    width = max(left + len(columns) * pitch + 8 + CHARACTER * len("requests at once"), x)
    return {"width": width, "height": bottom + 24, "columns": columns, "rows": rows, "legend": legend}


def _boxes(counts: Any, left: int) -> list[dict[str, Any]]:
    return [
        {"x": left + index * (_BOX + _GAP), "width": _BOX, "fill": STATES[count.state][0], "text": count.text}
        for index, count in enumerate(counts)
        if count is not None
    ]
