"""Where a task's rows come from: a local file, the hub at a pinned revision, or a generator. Torch-free.

Errors are :class:`UsageError` and name file, row and field.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrack.errors import UsageError, nearest
from fasttrack.manifest.model import Manifest, TaskConfig
from fasttrack.tasks.rows import Row, normalise

FORMATS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class HubSet:
    """A published data set: repository, commit, files in it, and how many rows they hold."""

    repository: str
    revision: str
    files: tuple[str, ...]
    rows: int
    gated: bool = False


HUB: dict[str, HubSet] = {
    "aime25": HubSet("math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", ("test.jsonl",), 30),
    "gpqa_diamond": HubSet(
        "Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", ("gpqa_diamond.csv",), 198, gated=True
    ),
    "mrcr": HubSet(  # the state after the data set's own correction of 2025-12-05
        "openai/mrcr",
        "f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d",
        tuple(f"{n}needle/{n}needle_{part}.parquet" for n in (2, 4, 8) for part in (0, 1)),
        2400,
    ),
}


def bind_data(manifest: Manifest, given: Mapping[str, str], folder: Path) -> Manifest:
    """The manifest with its tasks' data as absolute paths.

    ``given`` maps a task's name, or its kind where only one task is of that kind, to a path, and wins over the
    manifest. Paths of the manifest are relative to ``folder``, given ones to the working directory.
    """
    chosen: dict[str, str] = {}
    for key, path in given.items():
        tasks = [t for t in manifest.tasks if t.name == key] or [t for t in manifest.tasks if t.task == key]
        if len(tasks) != 1:
            known = nearest(key, [t.name for t in manifest.tasks]) if manifest.tasks else "a manifest with tasks"
            what = f"{key!r} names {len(tasks)} tasks" if tasks else f"no task {key!r}"
            raise UsageError(what, where="--data", expected=known)
        if not Path(path).exists():
            raise UsageError("no such file", where=f"--data {key}={path}", expected=f"a file: {', '.join(FORMATS)}")
        chosen[tasks[0].name] = str(Path(path).resolve())
    bound = []
    for task in manifest.tasks:
        data = chosen.get(task.name) or (str((folder / task.data).resolve()) if task.data else None)
        generated = task.generated and task.name not in chosen
        bound.append(task.model_copy(update={"data": data, "generated": generated}))
    return manifest.model_copy(update={"tasks": bound})


def data_digest(task: TaskConfig) -> str:
    """SHA-256 over the bytes of the task's local files; empty where the data is not local."""
    if not task.data:
        return ""
    digest = hashlib.sha256()
    for path in local_files(Path(task.data), f"tasks.{task.name}"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_of(task: TaskConfig) -> str:
    """What the rows are, in words: for a record."""
    if task.generated:
        return "generated"
    if task.data:
        return f"file:{Path(task.data).name}"
    hub = HUB[task.task]
    return f"hub:{hub.repository}@{task.revision or hub.revision}"


def scan(task: TaskConfig, *, order_seed: int = 0) -> Iterator[Row]:
    """The rows of a task that is not generated, in order, one at a time: a million tokens is a long text.

    Raises for the first bad row, a repeated id, and a source without rows.
    """
    paths = local_files(Path(task.data), f"tasks.{task.name}") if task.data else download(task)
    seen: dict[str, str] = {}
    for path in paths:
        prefix = "" if len(paths) == 1 else f"{path.stem}-"
        for number, (where, raw) in enumerate(read_file(path)):
            row = normalise(task.task, raw, default_id=f"{prefix}{number}", where=where, order_seed=order_seed)
            if row["id"] in seen:
                what = f"id {row['id']!r} occurs twice, first in {seen[row['id']]}"
                raise UsageError(what, where=where, expected="unique ids")
            seen[row["id"]] = where
            yield row
    if not seen:
        where = str(task.data or HUB[task.task].repository)
        raise UsageError("no rows", where=where, expected=f"at least one item of task {task.name}")


def local_files(path: Path, where: str) -> list[Path]:
    """The file itself, or the data files of a folder in name order."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in FORMATS)
        if not found:
            raise UsageError("holds no data file", where=str(path), expected=f"files: {', '.join(FORMATS)}")
        return found
    if not path.is_file():
        raise UsageError("no such file", where=str(path), expected=f"the data of {where}")
    if path.suffix not in FORMATS:
        raise UsageError(f"unknown format {path.suffix!r}", where=str(path), expected=f"one of {', '.join(FORMATS)}")
    return [path]


def download(task: TaskConfig) -> list[Path]:
    """The pinned files of the task's published data set, from the hub's cache or the network."""
    hub, revision = HUB[task.task], task.revision or HUB[task.task].revision
    expected = f"network access{' and an HF_TOKEN that was granted access' if hub.gated else ''}, or a local file"
    where = f"tasks.{task.name}: {hub.repository}@{revision[:12]}"
    try:
        from huggingface_hub import hf_hub_download

        return [
            Path(hf_hub_download(hub.repository, name, repo_type="dataset", revision=revision)) for name in hub.files
        ]
    except ImportError:
        raise UsageError("huggingface_hub is not installed", where=where, expected="a local file") from None
    except Exception as error:  # network, permission and cache errors have no common class
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"cannot be fetched ({text[0][:200]})", where=where, expected=f"{expected}: --data {task.name}=PATH"
        ) from None


def read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, raw row) of a JSONL, CSV or Parquet file; ``where`` counts lines of text files from 1."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".csv":
        yield from _csv(path)
    else:
        yield from _jsonl(path)


def _lines(path: Path) -> Iterator[str]:
    """Lines of UTF-8 text, with their ends; names the line that is not."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}:{number}"
                raise UsageError(f"byte {error.start} is not UTF-8", where=where, expected="UTF-8 text") from None


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"not JSON ({error.msg})", where=where, expected="one JSON object per line") from None
        if not isinstance(row, dict):
            raise UsageError("not an object", where=where, expected="one JSON object per line")
        yield where, row


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_lines(path), strict=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                columns = len(reader.fieldnames or [])
                raise UsageError(f"the row does not have {columns} fields", where=where, expected="one per column")
            yield where, row
    except csv.Error as error:
        raise UsageError(f"malformed CSV ({error})", where=f"{path}:{reader.line_num}") from None


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("Parquet needs pyarrow", where=str(path), expected="pip install pyarrow, or JSONL") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=8):
                for index in range(batch.num_rows):
                    where = f"{path}: row {number}"
                    yield where, {name: _cell(batch, name, index, where) for name in batch.schema.names}
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"not a Parquet file ({str(error).splitlines()[0][:100]})", where=str(path)) from None


def _cell(batch: Any, column: str, index: int, where: str) -> Any:
    try:
        return batch.column(column)[index].as_py()
    except UnicodeDecodeError as error:
        raise UsageError(f"{column} is not UTF-8 ({error.reason})", where=where, expected="UTF-8 text") from None


def lm_eval_documents(
    task: str, data: str | None = None, revision: str | None = None, **_: Any
) -> dict[str, list[Row]]:
    """``custom_dataset`` of the task files: ``--metadata '{"data": "PATH"}'`` on lm-eval's command line, or the hub."""
    import datasets

    config = TaskConfig(name=task.replace("_", "-"), task=task, data=data, revision=revision)  # type: ignore[arg-type]
    return {"test": datasets.Dataset.from_list(list(scan(config)))}
