"""MRCR scores: 0 unless the response starts with the random prefix, else the similarity of what follows it.

The rule is that of OpenAI's public MRCR data set (huggingface.co/datasets/openai/mrcr), with two additions that
no score should hang on: reasoning in front of the answer is left out, and so is white space around it.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from fasttrack.tasks.text import answer_part


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    prefix = str(doc["prefix"])
    response = (answer_part(results[0]) or "").strip()
    if not response.startswith(prefix):
        return {"ratio": 0.0, "parsed": 0.0}
    wanted = str(doc["answer"]).strip().removeprefix(prefix)
    ratio = SequenceMatcher(None, response.removeprefix(prefix).strip(), wanted.strip()).ratio()
    return {"ratio": ratio, "parsed": 1.0}
