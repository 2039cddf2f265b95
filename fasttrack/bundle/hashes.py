"""``hashes.json``: size and SHA-256 of every other file, and the root digest over that list.

The root digest is SHA-256 over lines ``<sha256>  <name>\\n`` in byte order of the names (in-toto calls
this form ``dirHash``), so coreutils can recompute it inside a bundle:

    find . -type f ! -path ./hashes.json | cut -c3- | LC_ALL=C sort | xargs sha256sum | sha256sum
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fasttrack import SCHEMA_VERSION
from fasttrack.bundle.files import MAX_DOCUMENT_BYTES, MAX_FILES, canonical_json, name_problem, parse_json, printable
from fasttrack.bundle.files import sha256 as digest
from fasttrack.errors import BundleError

HASHES = "hashes.json"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class FileHash:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class HashList:
    """Every file of a bundle but ``hashes.json``, in byte order of the names."""

    files: tuple[FileHash, ...]

    @classmethod
    def of(cls, contents: Mapping[str, bytes]) -> HashList:
        return cls(tuple(FileHash(name, len(data), digest(data)) for name, data in sorted(contents.items(), key=_key)))

    @property
    def root(self) -> str:
        """The root digest, 64 hex digits."""
        return digest("".join(f"{file.sha256}  {file.name}\n" for file in self.files).encode("utf-8"))

    def to_bytes(self) -> bytes:
        files = [{"name": f.name, "bytes": f.bytes, "sha256": f.sha256} for f in self.files]
        return canonical_json({"schema_version": SCHEMA_VERSION, "algorithm": "sha256", "files": files})


def _key(item: tuple[str, bytes]) -> bytes:
    return item[0].encode("utf-8")


def parse_hashes(data: bytes) -> HashList:
    """Read ``hashes.json``. Raises :class:`BundleError`, one line, for anything that ``to_bytes`` would not write."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BundleError(f"{HASHES}: is larger than {MAX_DOCUMENT_BYTES} bytes")
    document = parse_json(data, where=HASHES)
    if not isinstance(document, dict) or set(document) != {"schema_version", "algorithm", "files"}:
        raise BundleError(f"{HASHES}: is not a hash list (schema_version, algorithm, files)")
    if document["schema_version"] != SCHEMA_VERSION or document["algorithm"] != "sha256":
        raise BundleError(f"{HASHES}: is not a sha256 list of schema_version {SCHEMA_VERSION}")
    rows = document["files"]
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise BundleError(f"{HASHES}: files is not a list of at most {MAX_FILES} entries")
    files = tuple(_entry(row, index) for index, row in enumerate(rows))
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise BundleError(f"{HASHES}: lists {printable(twice)} twice")
    found = HashList(files)
    if found.to_bytes() != data or names != sorted(names, key=lambda name: name.encode("utf-8")):
        raise BundleError(f"{HASHES}: is not in canonical form (sorted names and keys, one-space indent)")
    return found


def _entry(row: Any, index: int) -> FileHash:
    where = f"{HASHES}: files[{index}]"
    if not isinstance(row, dict) or set(row) != {"name", "bytes", "sha256"}:
        raise BundleError(f"{where}: is not an entry of name, bytes and sha256")
    name, size, value = row["name"], row["bytes"], row["sha256"]
    if not isinstance(name, str):
        raise BundleError(f"{where}: name is not text")
    if (wrong := name_problem(name)) is not None:
        raise BundleError(f"{where}: {printable(name)} {wrong}")
    if name == HASHES:
        raise BundleError(f"{where}: {HASHES} cannot list itself")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BundleError(f"{where}: bytes is not a size")
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise BundleError(f"{where}: sha256 is not 64 lowercase hex digits")
    return FileHash(name, size, value)
