"""One row of a task's data, as published or as ours, checked and put into one shape per task. Torch-free.

Shapes (every row has a unique ``id``):

- ``aime25``: ``problem``, ``answer`` (decimal integer, as text);
- ``gpqa_diamond``: ``question``, ``options`` (four texts in the order shown), ``answer`` (index of the right one);
- ``mrcr``: ``messages`` (turns of role and content, the last one the user's), ``prompt`` (the same as plain text),
  ``answer``, ``prefix`` (random characters that a response must start with), ``needles``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from fasttrack.errors import UsageError

Row = dict[str, Any]

#: Published column names of the right answer first, then the wrong ones.
GPQA_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ROLES = ("system", "user", "assistant")


def normalise(task: str, raw: Mapping[str, Any], *, default_id: str, where: str, order_seed: int = 0) -> Row:
    """The row in its task's shape. :class:`UsageError` names ``where`` (file and row) and the field."""
    row = {_ALIASES[task].get(key, key): value for key, value in raw.items()}
    identity = row.get("id")
    if identity is None or str(identity).strip() == "":
        identity = default_id
    return {"id": str(identity), **_SHAPES[task](row, str(identity), where, order_seed)}


def option_order(row_id: str, seed: int, count: int = 4) -> list[int]:
    """A permutation that is a function of row and seed alone: no generator's state, no library's version."""

    def key(index: int) -> str:
        return hashlib.sha256(f"{seed}/{row_id}/{index}".encode()).hexdigest()

    return sorted(range(count), key=key)


def as_text(messages: list[dict[str, str]]) -> str:
    """A conversation for an engine without a chat template."""
    turns = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    return "\n".join([*turns, "Assistant:"])


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise UsageError(f"{column} is missing", where=where, expected=f"a column {column}")
    value = row[column]
    if value is None or (isinstance(value, (str, list)) and not value) or str(value).strip() == "":
        raise UsageError(f"{column} is empty", where=where, expected="a value")
    return value


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = _value(row, column, where)
    if not isinstance(value, str):
        raise UsageError(f"{column} is {type(value).__name__}", where=where, expected="text")
    return value


def _integer(row: Mapping[str, Any], column: str, where: str, expected: str) -> int:
    value = _value(row, column, where)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.removeprefix("-").isdigit()):
        raise UsageError(f"{column} is {value!r}", where=where, expected=expected)
    return int(text)


def _aime(row: Row, row_id: str, where: str, order_seed: int) -> Row:
    answer = _integer(row, "answer", where, "an integer")
    return {"problem": _text(row, "problem", where), "answer": str(answer)}


def _gpqa(row: Row, row_id: str, where: str, order_seed: int) -> Row:
    question = _text(row, "question", where)
    if "options" in row or GPQA_COLUMNS[0] not in row:
        options, right, names = _listed_options(row, where)
    else:
        options, right = [_text(row, column, where).strip() for column in GPQA_COLUMNS], 0
        names = list(GPQA_COLUMNS)
    for later in range(1, 4):
        for earlier in range(later):
            if options[earlier] == options[later]:
                what = f"{names[later]} equals {names[earlier]}"
                raise UsageError(what, where=where, expected="four different options")
    order = list(range(4)) if row.get("ordered") else option_order(row_id, order_seed)
    shown = {"options": [options[i] for i in order], "answer": order.index(right)}
    return {"question": question, **shown, "ordered": True}


def _listed_options(row: Row, where: str) -> tuple[list[str], int, list[str]]:
    options = _value(row, "options", where)
    if isinstance(options, str):  # a CSV cell
        try:
            options = json.loads(options)
        except json.JSONDecodeError:
            raise UsageError("options is not a JSON list", where=where, expected="four different texts") from None
    if not isinstance(options, list) or len(options) != 4 or not all(str(o).strip() for o in options):
        raise UsageError("options are not four texts", where=where, expected="four different options")
    right = _integer(row, "answer", where, "the index of the right option, 0 to 3")
    if right not in range(4):
        raise UsageError(f"answer is {right}", where=where, expected="the index of the right option, 0 to 3")
    return [str(o).strip() for o in options], right, [f"options[{i}]" for i in range(4)]


def _mrcr(row: Row, row_id: str, where: str, order_seed: int) -> Row:
    prompt, answer, prefix = (_text(row, column, where) for column in ("prompt", "answer", "prefix"))
    if not answer.startswith(prefix):
        raise UsageError("answer does not start with the prefix", where=where, expected=f"{prefix}...")
    messages = row.get("messages") or _messages(prompt, where)
    shape: Row = {"messages": messages, "prompt": as_text(messages), "answer": answer, "prefix": prefix}
    return {**shape, "needles": _integer({"needles": row.get("needles", 0)}, "needles", where, "a count")}


def _messages(prompt: str, where: str) -> list[dict[str, str]]:
    """The turns of a prompt: JSON as published, or plain text as one turn of the user's."""
    if not prompt.lstrip().startswith("["):
        return [{"role": "user", "content": prompt}]
    expected = "a JSON list of messages with role and content, the last one the user's"
    try:
        turns = json.loads(prompt)
    except json.JSONDecodeError as error:
        raise UsageError(f"prompt is not JSON ({error.msg})", where=where, expected=expected) from None
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES or not isinstance(turn.get("content"), str):
            raise UsageError("prompt has a malformed message", where=where, expected=expected)
    if not turns or turns[-1]["role"] != "user":
        raise UsageError("prompt does not end with the user's turn", where=where, expected=expected)
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


_SHAPES: dict[str, Callable[[Row, str, str, int], Row]] = {"aime25": _aime, "gpqa_diamond": _gpqa, "mrcr": _mrcr}
_ALIASES: dict[str, dict[str, str]] = {
    "aime25": {"question": "problem", "Problem": "problem", "Answer": "answer", "problem_idx": "id"},
    "gpqa_diamond": {"Question": "question", "Record ID": "id"},
    "mrcr": {"random_string_to_prepend": "prefix", "n_needles": "needles"},
}
