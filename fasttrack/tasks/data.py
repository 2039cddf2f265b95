"""The rows of a task, from a local file or generated, checked before lm-eval sees them. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fasttrack.errors import UsageError
from fasttrack.manifest.model import TaskConfig
from fasttrack.tasks import generate

TASKS = Path(__file__).parent

#: task -> the columns each row needs, besides ``id``
COLUMNS: dict[str, tuple[str, ...]] = {
    "aime25": ("problem", "answer"),
    "gpqa_diamond": ("question", "options", "answer"),
    "mrcr": ("prompt", "answer", "prefix"),
}
#: task -> the metric that is recorded
METRICS = {"aime25": "exact_match", "gpqa_diamond": "acc", "mrcr": "ratio"}
#: Questions whose text must not leave the machine; records hold hashes.
GATED = ("gpqa_diamond",)

_GENERATORS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "aime25": generate.aime,
    "gpqa_diamond": generate.gpqa,
    "mrcr": generate.mrcr,
}


def check_source(task: TaskConfig) -> None:
    """:class:`UsageError` unless the task's data is generated or a readable file with usable rows."""
    if not task.generated:
        read_rows(task)


def rows_for(task: TaskConfig, *, items: int, seed: int, max_chars: int) -> list[dict[str, Any]]:
    """At most ``items`` rows, each with an ``id``. Generated MRCR prompts stay below ``max_chars``."""
    if task.generated:
        extra = {"needles": task.needles or [2], "max_chars": max_chars} if task.task == "mrcr" else {}
        return _GENERATORS[task.task](items, seed, **extra)
    return read_rows(task)[:items]


def read_rows(task: TaskConfig) -> list[dict[str, Any]]:
    """The rows of the task's JSONL file. Errors name file, row and field."""
    if not task.data:
        raise UsageError(
            "has neither data nor generated",
            where=f"tasks.{task.name}",
            expected="data: FILE.jsonl, or generated: true",
        )
    path = Path(task.data)
    if not path.is_file():
        raise UsageError("no such file", where=str(path), expected=f"the JSONL data of task {task.name}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"byte {error.start} is not UTF-8", where=str(path), expected="UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"not JSON ({error.msg})", where=where, expected="one JSON object per line") from None
        if not isinstance(row, dict):
            raise UsageError("not an object", where=where, expected="one JSON object per line")
        row.setdefault("id", str(len(rows)))
        _check_row(row, task.task, where)
        if str(row["id"]) in seen:
            raise UsageError(f"id {row['id']!r} occurs twice", where=where, expected="unique ids")
        seen.add(str(row["id"]))
        rows.append(row)
    if not rows:
        raise UsageError("no rows", where=str(path), expected=f"at least one item of task {task.name}")
    return rows


def _check_row(row: dict[str, Any], task: str, where: str) -> None:
    for column in COLUMNS[task]:
        if column not in row:
            raise UsageError(f"{column} is missing", where=where, expected=f"columns {', '.join(COLUMNS[task])}")
        if row[column] in ("", None, []):
            raise UsageError(f"{column} is empty", where=where, expected="a value")
    if task == "gpqa_diamond":
        options = row["options"]
        if not isinstance(options, list) or len(options) != 4 or len(set(map(str, options))) != 4:
            raise UsageError("options are not four different texts", where=where, expected="four different options")
        if row["answer"] not in (0, 1, 2, 3, "0", "1", "2", "3"):
            raise UsageError(
                f"answer is {row['answer']!r}", where=where, expected="the index of the right option, 0 to 3"
            )


def write_task(task: TaskConfig, rows: list[dict[str, Any]], folder: Path) -> str:
    """Write data and an lm-eval task file that includes ours into ``folder``; returns the task's name."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")
    name = f"fasttrack_{task.name}"
    config = {
        "include": str(TASKS / task.task / f"{task.task}.yaml"),
        "task": name,
        "dataset_path": "json",
        # datasets names its cache after the file's path and time stamp, not its content
        "dataset_kwargs": {
            "data_files": {"test": os.fspath(data.resolve())},
            "cache_dir": os.fspath((folder / "cache").resolve()),
        },
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return name
