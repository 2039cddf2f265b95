"""The rows of a task as a run uses them, and the lm-eval task file that runs them. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fasttrack.manifest.model import TaskConfig
from fasttrack.tasks import generate
from fasttrack.tasks.rows import Row
from fasttrack.tasks.sources import HUB, scan

TASKS = Path(__file__).parent

#: Upper ends of MRCR's length bins, in tokens of prompt and answer; a bin holds its upper end, not its lower one.
BINS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)

_GENERATORS: dict[str, Callable[..., list[Row]]] = {
    "aime25": generate.aime,
    "gpqa_diamond": generate.gpqa,
    "mrcr": generate.mrcr,
}


def task_file(task: TaskConfig) -> Path:
    """Our lm-eval task file for ``task``."""
    suffix = "_choice" if task.style == "choice" else ""
    return TASKS / task.task / f"{task.task}{suffix}.yaml"


def metric_of(task: TaskConfig) -> str:
    """Name of the recorded metric."""
    return "ratio" if task.task == "mrcr" else "acc" if task.style == "choice" else "exact_match"


def gated(task: TaskConfig) -> bool:
    """Questions whose text must not leave the machine; records hold hashes."""
    return HUB[task.task].gated and not task.generated


def check_source(task: TaskConfig) -> None:
    """:class:`UsageError` unless the task's local data is a readable file with usable rows."""
    if task.data:
        count_rows(task)


def count_rows(task: TaskConfig) -> int:
    """Rows of local data, each checked; what the hub's set is known to hold; 0 for generated rows (any number)."""
    if task.generated:
        return 0
    if not task.data:
        hub = HUB[task.task]
        return hub.rows * len(task.needles or (2, 4, 8)) // 3 if task.task == "mrcr" else hub.rows
    return sum(_wanted(task, row) for row in scan(task))


def rows_for(task: TaskConfig, *, items: int, seed: int, max_chars: int) -> list[Row]:
    """At most ``items`` rows. Generated MRCR prompts stay below ``max_chars``.

    Of more rows than ``items``, which ones run is a function of ``seed`` and row ids, evenly over needle counts:
    nobody chooses them, and both arms get the same. They come in the order of the data.
    """
    if task.generated:
        extra = {"needles": task.needles or [2], "max_chars": max_chars} if task.task == "mrcr" else {}
        return _GENERATORS[task.task](items, seed, **extra)
    groups: dict[Any, list[str]] = {}
    for row in scan(task, order_seed=seed):
        if _wanted(task, row):
            groups.setdefault(row.get("needles"), []).append(row["id"])
    for ids in groups.values():
        ids.sort(key=lambda row_id: hashlib.sha256(f"{seed}/{row_id}".encode()).hexdigest())
    turns = (ids[turn] for turn in range(items) for ids in groups.values() if turn < len(ids))
    chosen = {row_id for row_id, _ in zip(turns, range(items), strict=False)}
    return [row for row in scan(task, order_seed=seed) if row["id"] in chosen]


def _wanted(task: TaskConfig, row: Row) -> bool:
    return task.task != "mrcr" or not task.needles or row["needles"] in task.needles


def bin_of(tokens: int) -> str:
    """The length bin of an item by its engine's own tokens, e.g. ``4097-8192``; shorter and longer ones say so."""
    low = 0
    for high in BINS:
        if tokens <= high:
            return f"{low + 1}-{high}" if low else f"<={high}"
        low = high
    return f">{low}"


def rows_digest(rows: list[Row]) -> str:
    """SHA-256 of the rows as they are asked, option order included."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def write_task(task: TaskConfig, rows: list[Row], folder: Path, *, max_tokens: int) -> str:
    """Write data and an lm-eval task file that includes ours into ``folder``; returns the task's name."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")
    name = f"fasttrack_{task.name}"
    config: dict[str, Any] = {
        "include": str(task_file(task)),
        "task": name,
        "metadata": {"version": 1.0, "data": os.fspath(data.resolve())},
    }
    if task.style == "generate":
        config["generation_kwargs"] = {"until": [], "do_sample": False, "max_gen_toks": max_tokens}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return name
