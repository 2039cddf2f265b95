"""AIME answers: the integer in the last complete box of the response."""

from __future__ import annotations

import re
from typing import Any


def last_box(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` whose braces balance; a truncated last box does not count."""
    found = None
    for start in (m.end() for m in re.finditer(r"\\boxed\s*\{", text)):
        depth = 1
        for position in range(start, len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                found = text[start:position]
                break
    return found


def integer(text: str) -> int | None:
    """The integer a box holds, ``None`` when it holds anything else. Leading zeros and thousands commas are fine."""
    bare = re.sub(r"\\text\s*\{([^}]*)\}|\\,|\\!|\\ |\$", r"\1", text).replace(",", "").strip()
    return int(bare) if re.fullmatch(r"[+-]?\d{1,12}", bare) else None


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    box = last_box(results[0])
    value = integer(box) if box is not None else None
    return {"exact_match": float(value == int(doc["answer"])), "parsed": float(value is not None)}
