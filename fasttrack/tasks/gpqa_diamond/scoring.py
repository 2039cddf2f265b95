"""GPQA answers: the letter in the last complete box of the response, reasoning left out.

No box, no answer: a lone letter in the prose may be the article "a".
"""

from __future__ import annotations

import re
from typing import Any

from fasttrack.tasks.text import answer_part, boxes, plain


def letter(content: str) -> str | None:
    """The option a box names: a letter, perhaps in parentheses, perhaps with the option's text behind it."""
    found = re.match(r"\(?\s*([A-Da-d])\s*(?:[).:]|$)", plain(content))
    return found[1].upper() if found else None


def extract(response: str) -> str | None:
    answer = answer_part(response)
    found = boxes(answer) if answer is not None else []
    return letter(found[-1]) if found else None


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    chosen = extract(results[0])
    return {"exact_match": float(chosen == "ABCD"[int(doc["answer"])]), "parsed": float(chosen is not None)}
