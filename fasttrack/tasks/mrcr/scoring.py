"""MRCR scores: 0 unless the response starts with the random prefix, else the similarity of what follows it.

The rule is that of OpenAI's public MRCR data set (huggingface.co/datasets/openai/mrcr).
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    response, prefix = results[0].strip(), str(doc["prefix"])
    if not response.startswith(prefix):
        return {"ratio": 0.0, "parsed": 0.0}
    wanted = str(doc["answer"]).strip().removeprefix(prefix)
    ratio = SequenceMatcher(None, response.removeprefix(prefix).strip(), wanted.strip()).ratio()
    return {"ratio": ratio, "parsed": 1.0}
