"""Which files a bundle may hold, and whether the kept difference is the one the environment speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fasttrack.bundle.files import printable, sha256
from fasttrack.bundle.journal import Journal

DIFF = "dirty.diff"


def is_known_name(name: str, documents: Iterable[str], journal: Journal) -> bool:
    """``name`` is one of ``documents``, ``dirty.diff``, the records of a check, a sample, or a journalled log."""
    from fasttrack.checks import CHECKS

    folder, _, rest = name.partition("/")
    if not rest:
        return name == DIFF or name in documents
    if folder == "records":
        return rest.removesuffix(".jsonl") in CHECKS and rest.endswith(".jsonl")
    if folder == "logs":
        return any(event.log == name for event in journal.events)
    return folder == "samples"


def layout_problems(names: Iterable[str], documents: Iterable[str], journal: Journal) -> Iterator[str]:
    """Files that no run writes and no sealing adds, one line each, whatever the hash list says."""
    allowed = set(documents)
    for name in names:
        if not is_known_name(name, allowed, journal):
            yield f"{printable(name)}: is no file of a bundle (documents, records/<check>.jsonl, samples/, named logs)"


def diff_problems(environment: Mapping[str, Any], diff: bytes | None) -> Iterator[str]:
    """``dirty.diff`` held against ``environment.json``. A difference too large to keep is there by digest only."""
    source = environment.get("source")
    source = source if isinstance(source, Mapping) else {}
    stated, dirty = source.get("diff_sha256"), bool(source.get("dirty"))
    if diff is not None and not dirty:
        yield f"{DIFF}: is there, but environment.json says that nothing was uncommitted"
    elif diff is not None and sha256(diff) != stated:
        yield f"{DIFF}: sha256 is not source.diff_sha256 of environment.json"
    elif diff is None and not dirty and stated not in (None, sha256(b"")):
        yield "environment.json: source says that nothing was uncommitted and gives the digest of a difference"
