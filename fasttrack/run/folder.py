"""The run folder: where a run's files live, when an unfinished run may be resumed, and how files are replaced.

runs/<manifest>-<UTC time>/
  manifest.yaml  run.json  environment.json  dirty.diff  journal.jsonl  records/  samples/  gates.json
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

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


class FolderTaken(UsageError):
    """Another process made the folder between the choice of its name and its creation."""


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

    def create(self, manifest: bytes, facts: Mapping[str, Any], environment: Mapping[str, Any], diff: str) -> TextIO:
        """Write the files that exist from the start. The folder appears whole and locked, or not at all.

        Returns the lock (see :meth:`lock`). Raises :class:`FolderTaken` when another process made it meanwhile.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            (temporary / "records").mkdir(parents=True)
            (temporary / "manifest.yaml").write_bytes(manifest)
            write_json(temporary / "environment.json", environment)
            if diff:
                write_atomic(temporary / "dirty.diff", diff)
            write_json(temporary / "run.json", facts)
            lock = RunFolder(temporary).lock()  # before the rename: nobody can find the folder unlocked
            assert lock is not None
            temporary.replace(self.path)
            return lock
        except BaseException as error:  # a signal among them
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FolderTaken("exists already", where=str(self.path), expected="a new run folder") from None
            expected = "a place for a new run folder"
            raise UsageError(f"cannot be written ({error.strerror})", where=str(self.path), expected=expected) from None

    def lock(self) -> TextIO | None:
        """Hold the run for this process until the file is closed; None if another process holds it."""
        file = (self.path / "journal.jsonl").open("a", encoding="utf-8")
        try:
            import fcntl  # not everywhere: planning works on systems without it

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return file
        except OSError:
            file.close()
            return None
        return file


def usable_parent(path: Path, option: str) -> Path:
    """A folder that exists or can be made; a regular file in its place is bad input."""
    try:
        path.exists()
    except OSError as error:
        expected = "a place for a folder"
        raise UsageError(f"cannot be written ({error.strerror})", where=f"{option} {path}", expected=expected) from None
    for part in (path, *path.parents):
        if part.is_file():
            raise UsageError("is a regular file", where=f"{option} {part}", expected="a folder")
        if part.exists() != part.is_dir() or (part.is_symlink() and not part.exists()):
            raise UsageError("is no folder", where=f"{option} {part}", expected="a folder")
        if part.is_dir():
            if not os.access(part, os.W_OK):
                raise UsageError("is not writable", where=f"{option} {part}", expected="a writable folder")
            return path
    return path


def find_unfinished(runs: Path, wanted: str) -> RunFolder | None:
    """The newest unfinished run with this identity, if there is one."""
    for path in sorted(runs.glob("*/run.json"), reverse=True):
        folder = RunFolder(path.parent)
        try:
            same = not folder.finished and folder.facts().get("identity") == wanted
        except UsageError:
            continue  # somebody else's file: not a run to continue
        if same:
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
