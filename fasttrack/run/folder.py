"""The run folder: where a run's files live, when an unfinished run may be resumed, and how files are replaced.

runs/<manifest>-<UTC time>/
  manifest.yaml  run.json  environment.json  dirty.diff  journal.jsonl  records/  samples/  gates.json
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fasttrack.errors import UsageError
from fasttrack.run.journal import Journal, read_journal


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, data: Any) -> None:
    write_atomic(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            "is missing", where=str(path), expected="a run folder written by `fasttrack validate`"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read ({error})", where=str(path)) from None
    if not isinstance(data, dict):
        raise UsageError("is not a JSON object", where=str(path))
    return data


def identity(facts: Mapping[str, Any]) -> str:
    """Digest of everything that must be equal for two attempts to belong to the same run."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"
        self.samples = path / "samples"
        self.logs = path / "logs"

    @property
    def journal(self) -> Journal:
        return Journal(self.path / "journal.jsonl")

    def history(self) -> Any:
        return read_journal(self.path / "journal.jsonl")

    def facts(self) -> dict[str, Any]:
        return read_json(self.path / "run.json")

    @property
    def finished(self) -> bool:
        return (self.path / "gates.json").is_file()

    def create(self, manifest: bytes, facts: Mapping[str, Any], environment: Mapping[str, Any], diff: str) -> None:
        """Write the files that exist from the start; ``run.json`` last, since it makes the folder a run."""
        self.records.mkdir(parents=True)
        (self.path / "manifest.yaml").write_bytes(manifest)
        write_json(self.path / "environment.json", environment)
        if diff:
            write_atomic(self.path / "dirty.diff", diff)
        write_json(self.path / "run.json", facts)


def usable_parent(path: Path, option: str) -> Path:
    """A folder that exists or can be made; a regular file in its place is bad input."""
    for part in (path, *path.parents):
        if part.is_file():
            raise UsageError("is a regular file", where=f"{option} {part}", expected="a folder")
        if part.is_dir():
            if not os.access(part, os.W_OK):
                raise UsageError("is not writable", where=f"{option} {part}", expected="a writable folder")
            return path
    return path


def find_unfinished(runs: Path, wanted: str) -> RunFolder | None:
    """The newest unfinished run with this identity, if there is one."""
    for path in sorted(runs.glob("*/run.json"), reverse=True):
        folder = RunFolder(path.parent)
        if not folder.finished and folder.facts().get("identity") == wanted:
            return folder
    return None


def new_folder(runs: Path, name: str) -> RunFolder:
    """A folder name that does not exist yet: manifest name and UTC time, numbered within a second."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 1000):
        path = runs / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        if not path.exists():
            return RunFolder(path)
    raise UsageError("holds a thousand runs of this second", where=str(runs))
