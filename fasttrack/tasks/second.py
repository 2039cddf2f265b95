"""A second scorer per task, written against the rules and not against the first one: other code, other techniques.

Where the two disagree on a response, one of them has a bug, and no verdict is drawn from the task.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_OPENING = ("<think>", "◁think▷", "<|open|>think<|sep|>")
_CLOSING = ("</think>", "◁/think▷", "<|close|>think<|sep|>")
_MARKS = re.compile("(" + "|".join(re.escape(m) for m in (*_OPENING, *_CLOSING)) + ")")
_FORMAT = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|open|>message<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
)
_TEXT = {"text", "textbf", "mathrm", "mathbf", "mbox", "operatorname"}
_NOTHING = {"left", "right", "displaystyle", ",", ";", ":", "!", " ", "%"}


def second_score(task: str, doc: Mapping[str, Any], response: str) -> float:
    """The score of ``response`` to a row of :mod:`fasttrack.tasks.rows`."""
    visible = _visible(response)
    if task == "mrcr":
        return _mrcr(doc, visible)
    box = _last_box(visible)
    if box is None:
        return 0.0
    reading = _reading(box)
    if task == "gpqa_diamond":
        return float(_option(reading) == int(doc["answer"]))
    return float(_number(reading) == int(doc["answer"]))


def second_choice(log_likelihoods: Sequence[float], answer: int) -> float:
    """Whether the right option is the likeliest; of equally likely ones the first counts."""
    best = 0
    for index, value in enumerate(log_likelihoods):
        if value > log_likelihoods[best]:
            best = index
    return float(best == answer)


def _visible(response: str) -> str:
    """What was said after the last finished thought; nothing when the last thought was not finished."""
    said, thinking = "", False
    for piece in _MARKS.split(response):
        if piece in _OPENING:
            thinking = True
        elif piece in _CLOSING:
            said, thinking = "", False
        else:
            said += piece
    if thinking:
        return ""
    for mark in _FORMAT:
        said = said.replace(mark, "")
    return said


def _last_box(text: str) -> str | None:
    """Walks backwards over the box commands until one has a closing brace."""
    end = len(text)
    while end > 0:
        command, end = max(((c, text.rfind(c, 0, end)) for c in ("\\boxed", "\\fbox")), key=lambda found: found[1])
        after = text[end + len(command) :].lstrip() if end >= 0 else ""
        if not after.startswith("{"):
            continue
        content, open_ = "", 0
        for token in re.findall(r"\\.|[{}]|[^\\{}]+|\\$", after, re.DOTALL):
            open_ += (token == "{") - (token == "}")
            if open_ == 0:
                return content[1:]
            content += token
    return None


def _reading(content: str) -> str:
    """What a reader sees: set text is an aside unless there is nothing else."""
    rest = "".join(c for c in unicodedata.normalize("NFKC", content) if unicodedata.category(c) != "Cf")
    main, aside = "", ""
    while rest:
        command = re.match(r"\\([A-Za-z]+|.)", rest, re.DOTALL)
        group = re.match(r"\\[a-z]+\s*\{([^{}]*)\}", rest)
        degree = re.match(r"\^\s*\{?\s*\\circ\s*\}?", rest)
        if command and command[1] in _TEXT and group:
            aside, main, rest = aside + group[1], main + " ", rest[group.end() :]
        elif degree:
            main, rest = main + " ", rest[degree.end() :]
        elif command and command[1] in _NOTHING:
            main, rest = main + " ", rest[command.end() :]
        else:
            first = rest[0]
            main, rest = main + (" " if first in "$~%°" else "-" if first == "−" else first), rest[1:]
    return main.strip() or aside.strip()


def _number(reading: str) -> int | None:
    name, equals, value = reading.partition("=")
    if equals and name.strip().isidentifier() and name.strip().isascii() and not name.strip().startswith("_"):
        reading = value.strip()
    reading = reading.rstrip(".").strip()
    sign = -1 if reading.startswith("-") else 1
    digits = reading[1:] if reading[:1] in ("+", "-") else reading
    whole, point, fraction = digits.partition(".")
    if point and (not fraction or set(fraction) != {"0"}):
        return None
    groups = whole.split(",")
    if len(groups) > 1 and (not 1 <= len(groups[0]) <= 3 or any(len(g) != 3 for g in groups[1:])):
        return None
    joined = "".join(groups)
    return sign * int(joined) if joined and all(c in "0123456789" for c in joined) else None


def _option(reading: str) -> int | None:
    reading = reading.removeprefix("(").lstrip()
    if not reading or reading[0] not in "ABCDabcd":
        return None
    rest = reading[1:].lstrip()
    return "abcd".index(reading[0].lower()) if not rest or rest[0] in ").:" else None


def _mrcr(doc: Mapping[str, Any], visible: str) -> float:
    prefix, said = str(doc["prefix"]), visible.strip()
    if said[: len(prefix)] != prefix:
        return 0.0
    wanted = str(doc["answer"]).strip()
    if wanted[: len(prefix)] == prefix:
        wanted = wanted[len(prefix) :]
    return similarity(said[len(prefix) :].strip(), wanted.strip())


def similarity(a: str, b: str) -> float:
    """Ratcliff and Obershelp's pattern recognition (1988): 2 x matching characters / all characters.

    Matching characters are those of the longest common block and, recursively, of what lies left and right of it.
    As in Python's documentation of ``difflib``: where ``b`` has 200 characters or more, a character that makes up
    more than one per cent of it cannot start a block, though blocks grow over it.
    """
    if not a and not b:
        return 1.0
    left, right = (np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) for text in (a, b))
    codes, counts = np.unique(right, return_counts=True)
    popular = codes[counts > len(b) // 100 + 1] if len(b) >= 200 else codes[:0]
    usable = ~np.isin(right, popular)
    matched, pending = 0, [(0, len(a), 0, len(b))]
    while pending:
        a_low, a_high, b_low, b_high = pending.pop()
        if a_low >= a_high or b_low >= b_high:
            continue
        i, j, size = _longest(left, right, usable, a_low, a_high, b_low, b_high)
        while i > a_low and j > b_low and left[i - 1] == right[j - 1]:
            i, j, size = i - 1, j - 1, size + 1
        while i + size < a_high and j + size < b_high and left[i + size] == right[j + size]:
            size += 1
        if size:
            matched += size
            pending += [(a_low, i, b_low, j), (i + size, a_high, j + size, b_high)]
    return 2 * matched / (len(a) + len(b))


def _longest(
    left: Any, right: Any, usable: Any, a_low: int, a_high: int, b_low: int, b_high: int
) -> tuple[int, int, int]:
    """Longest common block of usable characters: first in ``a``, then in ``b``. Lengths of runs, row by row."""
    own, allowed = right[b_low:b_high], usable[b_low:b_high]
    best = (a_low, b_low, 0)
    runs = np.zeros(len(own) + 1, dtype=np.int64)
    for i in range(a_low, a_high):
        runs[1:] = np.where((own == left[i]) & allowed, runs[:-1] + 1, 0)
        longest = int(runs.argmax())
        if runs[longest] > best[2]:
            size = int(runs[longest])
            best = (i - size + 1, b_low + longest - size, size)
    return best
