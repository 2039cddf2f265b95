"""Reading files that somebody else wrote: names, sizes, kinds of file, strict JSON.

A bundle is untrusted input. Nothing here follows a symbolic link, opens anything but a regular file,
reads past a cap, or raises anything but :class:`BundleError` for what it finds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fasttrack.errors import BundleError

MAX_FILE_BYTES = 512 << 20
MAX_TOTAL_BYTES = 4 << 30
MAX_FILES = 20_000
MAX_FOLDER_DEPTH = 8
MAX_DOCUMENT_BYTES = 64 << 20  #: JSON documents that are parsed in one piece
MAX_LINE_BYTES = 16 << 20  #: one JSONL record

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+=@%~-]{0,199}")
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def printable(text: str, limit: int = 200) -> str:
    """``text`` on one line and harmless to a terminal: control, bidirectional and lone code units escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def name_problem(name: str) -> str | None:
    """What is wrong with ``name`` as a path inside a bundle; None when it is fine.

    Names are relative, ``/``-separated, and made of segments that mean the same on every file system.
    """
    if not name or len(name) > 1000:
        return "is empty or too long"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is an absolute path"
    parts = name.split("/")
    if ".." in parts or "." in parts or "" in parts:
        return "leaves or re-enters its folder"
    if len(parts) > MAX_FOLDER_DEPTH:
        return f"is nested more than {MAX_FOLDER_DEPTH} folders deep"
    bad = next((part for part in parts if not _SEGMENT.fullmatch(part) or part.endswith(".")), None)
    return None if bad is None else f"has a name that is not portable ({printable(bad)!r})"


def list_files(root: Path) -> tuple[dict[str, int], list[str]]:
    """Every regular file below ``root`` with its size, by relative name, and what must not be there.

    The second value holds one line per symbolic link, special file, unusable name or exceeded cap.
    """
    files: dict[str, int] = {}
    problems: list[str] = []
    total = 0
    for entry, name in _walk(root, "", problems):
        shown = printable(name)
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError as error:
            problems.append(f"{shown}: cannot be read ({error.strerror})")
            continue
        if stat.S_ISLNK(info.st_mode):
            problems.append(f"{shown}: is a symbolic link; a bundle holds plain files only")
            continue
        if not stat.S_ISREG(info.st_mode):
            problems.append(f"{shown}: is not a plain file")
            continue
        if (wrong := name_problem(name)) is not None:
            problems.append(f"{shown}: {wrong}")
            continue
        total += info.st_size
        if len(files) >= MAX_FILES or total > MAX_TOTAL_BYTES:
            problems.append(f"{shown}: the bundle exceeds {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes; stopped here")
            break
        files[name] = info.st_size
    folded: dict[str, str] = {}
    for name in sorted(files):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            problems.append(f"{printable(name)}: differs from {printable(other)} in case only")
    return files, problems


def _walk(folder: Path, prefix: str, problems: list[str], depth: int = 0) -> Iterator[tuple[os.DirEntry[str], str]]:
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        problems.append(f"{printable(prefix or '.')}: cannot be listed ({error.strerror})")
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if depth >= MAX_FOLDER_DEPTH:
                problems.append(f"{printable(name)}: is nested more than {MAX_FOLDER_DEPTH} folders deep")
                continue
            children = list(_walk(Path(entry.path), f"{name}/", problems, depth + 1))
            if not children and not any(line.startswith(printable(name)) for line in problems):
                problems.append(f"{printable(name)}: is an empty folder")
            yield from children
        else:
            yield entry, name


def read_bytes(root: Path, name: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file; :class:`BundleError` when it is a link, special, too large or unreadable."""
    shown = printable(name)
    path = root.joinpath(*PurePosixPath(name).parts)
    try:
        handle = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        raise BundleError(f"{shown}: is missing") from None
    except OSError as error:
        raise BundleError(f"{shown}: cannot be opened as a plain file ({error.strerror})") from None
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{shown}: is not a plain file")
        if info.st_size > limit:
            raise BundleError(f"{shown}: has {info.st_size} bytes, more than the {limit} that are read")
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise BundleError(f"{shown}: cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise BundleError(f"{shown}: grew past {limit} bytes while it was read")
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {printable(key, 60)!r} is given twice")
            seen.add(key)
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {printable(text, 40)} is out of range")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)


def parse_json(data: bytes, *, where: str) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN or Infinity, bounded nesting. Raises :class:`BundleError`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{where}: is not UTF-8 (byte {error.start})") from None
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:  # an escaped lone surrogate is valid to the parser and cannot be written out again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise BundleError(f"{where}: is nested too deeply") from None
    except UnicodeEncodeError:
        raise BundleError(f"{where}: holds half of a surrogate pair") from None
    except ValueError as error:
        message = str(error).replace("Expecting", "expecting", 1)
        raise BundleError(f"{where}: is not strict JSON: {printable(message)}") from None
    return value


def canonical_json(value: Any) -> bytes:
    """The one way this package writes a JSON document: sorted keys, ASCII, one-space indent, final newline."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=True, indent=1, allow_nan=False) + "\n").encode("ascii")
