"""Printing what somebody else wrote: nothing in it may steer the terminal or fail to encode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fasttrack.bundle.files import printable
from fasttrack.cli.output import plain, table

MAX_LINE, MAX_CELL = 4000, 400


def say(text: str) -> None:
    """Print ``text``; each of its lines is made harmless. JSON of any length stays as it is, being ASCII."""
    _encodable()
    if not (text.isascii() and all(c >= " " or c == "\n" for c in text)):
        text = "\n".join(printable(line, MAX_LINE) for line in text.split("\n"))
    _while_read(lambda: plain(text))


def say_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour_column: int | None = None) -> None:
    """:func:`fasttrack.cli.output.table` with harmless cells."""
    _encodable()
    shown = [[printable(str(value), MAX_CELL) for value in row] for row in rows]
    _while_read(lambda: table(header, shown, colour_column=colour_column))


def _while_read(write: Callable[[], None]) -> None:
    """Print, unless nobody reads: a closed standard output must not change what a command finds and exits with."""
    if sys.stdout is not None:  # a reader that went away is output.plain's to bear
        write()


def _encodable() -> None:
    """A terminal that cannot show a character shows its escape, rather than ending the command."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
