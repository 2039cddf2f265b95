"""Printing: rich tables on a terminal, plain tab-free lines elsewhere; NO_COLOR is honoured by rich."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow", "not_run": "yellow"}


def plain(text: str) -> None:
    """Print a line. A reader that went away (``| head``) must not cost a finished run its exit code."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour_column: int | None = None) -> None:
    """Print rows under a header. ``colour_column`` holds a verdict word."""
    if not sys.stdout.isatty():
        widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
        for row in [header, *rows]:
            plain("  ".join(str(value).ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        drawn.add_column(name)
    for row in rows:
        cells = [Text(str(value)) for value in row]
        if colour_column is not None:
            cells[colour_column].stylize(COLOURS.get(str(row[colour_column]), ""))
        drawn.add_row(*cells)
    Console().print(drawn)
