"""Printing what somebody else wrote: nothing in it may steer the terminal or fail to encode."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fasttrack.bundle.files import printable
from fasttrack.cli.output import plain, table

MAX_LINE, MAX_CELL = 4000, 400


def say(text: str) -> None:
    """Print ``text``; each of its lines is made harmless. JSON of any length stays as it is, being ASCII."""
    _encodable()
    if text.isascii() and all(c >= " " or c == "\n" for c in text):
        plain(text)
    else:
        plain("\n".join(printable(line, MAX_LINE) for line in text.split("\n")))


def say_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour_column: int | None = None) -> None:
    """:func:`fasttrack.cli.output.table` with harmless cells."""
    _encodable()
    table(header, [[printable(str(value), MAX_CELL) for value in row] for row in rows], colour_column=colour_column)


def _encodable() -> None:
    """A terminal that cannot show a character shows its escape, rather than ending the command."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
