"""The ``--data TASK=PATH`` option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from fasttrack.errors import UsageError

DataOption = Annotated[
    list[str] | None, typer.Option("--data", help="TASK=PATH: a JSONL, CSV or Parquet file with the task's questions.")
]


def task_data(given: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """(task, path) pairs; :class:`UsageError` for anything else, and for a task given twice."""
    pairs: dict[str, str] = {}
    for text in given or ():
        task, equals, path = text.partition("=")
        if not equals or not task or not path:
            raise UsageError(f"{text!r}", where="--data", expected="TASK=PATH, e.g. aime25=aime.jsonl")
        if task in pairs:
            raise UsageError(f"{task} given twice", where="--data", expected="each task once")
        pairs[task] = path
    return tuple(pairs.items())
