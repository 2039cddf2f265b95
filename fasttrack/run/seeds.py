"""Every random choice of a run derives from one root: head commit, manifest digest, reviewer's nonce.

A contributor cannot choose seeds after seeing results without changing the commit or the manifest, and a
reviewer who adds a nonce gets an experiment nobody could have tuned for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

UNBOUND = "unbound"


@dataclass(frozen=True)
class Seeds:
    head: str  #: commit the run is about, or "unbound"
    manifest_sha256: str
    nonce: str = ""

    @property
    def root(self) -> str:
        """Hex digest all seeds derive from."""
        text = "\n".join(("fasttrack-seeds-v1", self.head, self.manifest_sha256, self.nonce))
        return hashlib.sha256(text.encode()).hexdigest()

    def seed(self, name: str) -> int:
        """A seed in [0, 2**31) for a named purpose."""
        digest = hashlib.sha256(f"{self.root}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def to_json(self) -> dict[str, str]:
        return {"head": self.head, "manifest_sha256": self.manifest_sha256, "nonce": self.nonce, "root": self.root}
