"""Seeds that nobody chose: derived from the head commit, the manifest's digest and a reviewer's nonce.

A contributor who cannot choose the seed cannot search for a lucky one; a reviewer who hands out a nonce
after the head commit is fixed knows that the run did not exist before. ``run.json`` keeps the inputs and
the root; ``fasttrack verify`` derives the root again.
"""

from __future__ import annotations

import hashlib

_DOMAIN = "fasttrack-seed-v1"


def root_seed(*, head: str | None, manifest_sha256: str, nonce: str | None) -> str:
    """Root of a run's seeds, 64 hex digits. ``head`` is None for a run that is bound to no commit."""
    return _digest("root", head or "", manifest_sha256, nonce or "")


def derive_seed(root: str, *labels: str | int) -> int:
    """A seed in [0, 2**63) for one use, named by ``labels`` (unit, purpose, index...)."""
    return int(_digest("use", root, *(str(label) for label in labels))[:16], 16) >> 1


def named_seed(root: str, name: str) -> int:
    """A run's seed for ``name``, in [0, 2**31): small enough for every random generator in use."""
    return derive_seed(root, name) % (1 << 31)


def _digest(*parts: str) -> str:
    """Length-prefixed, so that no two lists of parts share an encoding."""
    data = b"".join(b"%d:%s" % (len(raw), raw) for raw in (part.encode("utf-8") for part in (_DOMAIN, *parts)))
    return hashlib.sha256(data).hexdigest()
