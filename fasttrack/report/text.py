"""Numbers and untrusted text in Markdown: the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_ESCAPES = {ord(c): "\\" + c for c in "\\`*[]<|$"}


def plain(text: Any, limit: int = 400) -> str:
    """``text`` on one line, control and bidirectional characters escaped."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in str(text)
    )
    return line if len(line) <= limit else line[: limit - 3] + "..."


def cell(value: Any, limit: int = 400) -> str:
    """A value inside a Markdown table or sentence: it cannot end the cell, start a tag or become a link."""
    text = number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
    return plain(text, limit).translate(_ESCAPES)


def code(value: Any, limit: int = 400) -> str:
    """A value as inline code. Backticks and pipes cannot be escaped inside code, so they are replaced."""
    return "`" + plain(value, limit).replace("`", "'").replace("|", "¦") + "`"


def number(value: float, digits: int = 6) -> str:
    """Integers as they are, other numbers with ``digits`` significant digits, never locale dependent."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def pairs(values: Mapping[str, Any], limit: int = 24) -> str:
    """``a = 1, b = 2`` in the order given; long mappings end with how many are left out."""
    shown = [f"{plain(key, 80)} = {show(value)}" for key, value in list(values.items())[:limit]]
    rest = len(values) - len(shown)
    return ", ".join(shown) + (f", and {rest} more" if rest > 0 else "")


def show(value: Any) -> str:
    """Any JSON value in a few words."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, Mapping):
        return "{" + pairs(value, 8) + "}"
    if isinstance(value, (list, tuple)):
        items = [show(item) for item in value[:8]]
        return "[" + ", ".join(items) + (f", and {len(value) - 8} more" if len(value) > 8 else "") + "]"
    return plain(value, 120)


def count(how_many: int, noun: str, plural: str = "") -> str:
    """``1 gate``, ``2 gates``."""
    return f"{how_many} {noun if how_many == 1 else plural or noun + 's'}"


def listing(items: Iterable[str], limit: int = 6, separator: str = ", ") -> str:
    """``a, b, c and 4 more``."""
    found = list(items)
    shown = separator.join(found[:limit])
    return shown if len(found) <= limit else f"{shown} and {len(found) - limit} more"
