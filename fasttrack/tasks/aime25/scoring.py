"""AIME answers: the integer in the last complete box of the response, reasoning left out.

No box, no answer: text between dollar signs or behind "the answer is" is not looked at, since what is found there
depends on how the response was cut. The prompt asks for the box, and the rate of unparsed responses is watched.
"""

from __future__ import annotations

import re
from typing import Any

from fasttrack.tasks.text import answer_part, boxes, plain


def integer(content: str) -> int | None:
    """The integer a box holds, ``None`` when it holds anything else, or more than one number.

    Leading zeros, a name before it (``n = 42``), thousands commas and a zero fraction are fine.
    """
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", plain(content)).rstrip(".").strip()
    if not re.fullmatch(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.0+)?", text, re.ASCII):
        return None
    return int(text.partition(".")[0].replace(",", ""))


def extract(response: str) -> int | None:
    answer = answer_part(response)
    found = boxes(answer) if answer is not None else []
    return integer(found[-1]) if found else None


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    value = extract(results[0])
    return {"exact_match": float(value == int(doc["answer"])), "parsed": float(value is not None)}
