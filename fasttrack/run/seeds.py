"""The seeds of one run: what they derive from, and one seed per named purpose."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrack.records.seeds import named_seed, root_seed


@dataclass(frozen=True)
class Seeds:
    """``head`` is the commit the run is about, None for an unbound run; ``nonce`` is a reviewer's."""

    head: str | None
    manifest_sha256: str
    nonce: str | None = None

    @property
    def root(self) -> str:
        return root_seed(head=self.head, manifest_sha256=self.manifest_sha256, nonce=self.nonce)

    def seed(self, name: str) -> int:
        return named_seed(self.root, name)

    def to_json(self) -> dict[str, str | None]:
        return {"head": self.head, "manifest_sha256": self.manifest_sha256, "nonce": self.nonce, "root": self.root}
