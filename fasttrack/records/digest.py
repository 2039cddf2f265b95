"""The digest that ties a unit's record lines to the journal.

When an attempt of a unit finishes, the journal's ``finished`` event carries ``records``, the number of
record lines the attempt wrote, and ``sha256``, the digest of those lines. A bundle whose records were
removed, added, edited or reordered afterwards no longer agrees with its own journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


class UnitDigest:
    """Running count and SHA-256 of one attempt's record lines, in the order they were written.

    Where a unit writes to several files, the order is file name first, then line.
    """

    def __init__(self) -> None:
        self.records = 0
        self._hash = hashlib.sha256()

    def update(self, line: str | bytes) -> None:
        """Add one record line; a trailing newline (``\\n`` or ``\\r\\n``) does not matter."""
        data = line.encode("utf-8") if isinstance(line, str) else line
        self._hash.update(data.rstrip(b"\r\n") + b"\n")
        self.records += 1

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def unit_digest(lines: Iterable[str | bytes]) -> str:
    """SHA-256 (lowercase hex) over the record lines of one attempt of one unit."""
    digest = UnitDigest()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()
