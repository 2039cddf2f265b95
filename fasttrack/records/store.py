"""Append-only JSONL files of records, one per check, and the reading of what finished attempts wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from fasttrack.errors import UsageError
from fasttrack.records.schema import parse_record


class RecordWriter:
    """Appends records of one file; each is flushed before :meth:`write` returns, so a killed process loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, record: Any) -> str:
        """Append one record and hand it to the operating system; returns its line, without the newline."""
        line: str = record.model_dump_json()
        self._file.write(line + "\n")
        self._file.flush()
        return line

    def close(self) -> None:
        """Sync to disk and close: only then may a journal call the records' unit finished."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordReader:
    """Reads the records of finished attempts from every ``*.jsonl`` below a folder.

    A killed attempt leaves records, possibly a torn last line, and no ``finished`` entry in the
    journal. Its records stay in the file as evidence that it happened and are not used.
    """

    def __init__(self, folder: Path, finished: dict[str, int]) -> None:
        self.folder = folder
        self.finished = finished  #: unit -> the attempt that finished

    def __iter__(self) -> Iterator[Any]:
        for path in sorted(self.folder.glob("*.jsonl")):
            yield from self.read(path)

    def read(self, path: Path) -> Iterator[Any]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("}\n"):  # torn by a kill: belongs to no finished attempt
                    continue
                try:
                    record = parse_record(line, where=f"{path.name}:{number}")
                except UsageError:
                    if _is_whole(line):
                        raise
                    continue  # torn just behind an inner brace, and ended by a later attempt
                if self.finished.get(record.unit) == record.attempt:
                    yield record


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _end_torn_line(path: Path) -> None:
    """A kill can leave half a line; end it, so that the next record starts on a line of its own."""
    if path.is_dir():
        raise UsageError("is a folder", where=str(path), expected="a JSONL file")
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
