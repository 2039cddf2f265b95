"""What of a response is its answer: the text after the reasoning, and the boxes in it."""

from __future__ import annotations

import re
import unicodedata

#: Opening and closing marks of a reasoning block, as chat templates in use spell them.
THINK_MARKS = (
    ("<think>", "</think>"),
    ("◁think▷", "◁/think▷"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
_CHANNEL = re.compile(r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>|<\|end_of_msg\|>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def answer_part(response: str) -> str | None:
    """The response without its reasoning; ``None`` when the reasoning was cut off before it ended."""
    opened = max(response.rfind(start) for start, _ in THINK_MARKS)
    closed, end = max((response.rfind(mark), response.rfind(mark) + len(mark)) for _, mark in THINK_MARKS)
    if opened > closed:
        return None
    return _CHANNEL.sub("", response[end:] if closed >= 0 else response)


def boxes(text: str) -> list[str]:
    r"""Contents of every ``\boxed{...}`` or ``\fbox{...}`` whose braces balance, in the order of their starts."""
    found = []
    for start in (m.end() for m in _BOX.finditer(text)):
        depth, position = 1, start
        while position < len(text) and depth:
            character = text[position]
            if character == "\\":
                position += 1  # an escaped brace is no brace
            else:
                depth += (character == "{") - (character == "}")
            position += 1
        if depth == 0:
            found.append(text[start : position - 1])
    return found


def plain(content: str) -> str:
    r"""A box's content without what typesetting adds: ``\text{...}`` groups, thin spaces, dollar signs, degree signs.

    Full-width characters become ASCII, invisible ones go. Text groups are kept only where nothing else is left:
    they are units (``42\text{ cm}``), or the answer itself (``\text{42}``).
    """
    text = unicodedata.normalize("NFKC", content)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf").replace("\u2212", "-")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°|\\%|%|\\[,;:! ]|\\(?:left|right|displaystyle)\b|\$|~", " ", text)
    group = r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
    bare = re.sub(group, " ", text).strip()
    return bare if bare else re.sub(group, r"\1", text).strip()
