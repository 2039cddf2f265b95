"""Prefix reuse: prompt pages by content, and the recurrent state at page boundaries ("align" mode).

KV rows of a prefix can be shared, but a KDA layer also needs its state after the prefix. So the prefill of a prompt
is cut at fixed positions, and at each cut the state is kept beside the pages. A later prompt that begins the same
way continues from the longest cut the two have in common. Cuts depend on the length of the prompt alone, so a hit
computes exactly the rows a miss would have computed after the same cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kimi_k3.reference.cache import Caches, PageAllocator

SNAPSHOTS = 256  #: states kept at most, the least recently used one goes first


@dataclass
class Snapshot:
    """A request's state after a prefix, by layer: what a request without rejected drafts has in its first slot."""

    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]

    @staticmethod
    def take(caches: Caches, slot: int, taps: int) -> Snapshot:
        return Snapshot(
            {layer: x[slot, :taps].clone() for layer, x in caches.conv.items()},
            {layer: x[slot].clone() for layer, x in caches.recurrent.items()},
        )

    def restore(self, caches: Caches, slot: int) -> None:
        for layer, x in self.conv.items():
            caches.conv[layer][slot, : len(x)] = x
            caches.recurrent[layer][slot] = self.recurrent[layer]


@dataclass
class _Page:
    page: int
    depth: int
    used: int
    snapshot: Snapshot | None = None


@dataclass
class Hit:
    """``pages`` hold the first ``tokens`` tokens; the caller has a reference to each."""

    tokens: int
    pages: list[int] = field(default_factory=list)
    snapshot: Snapshot | None = None


class PrefixCache:
    """``interval``: tokens between cuts, a multiple of the page size."""

    def __init__(self, pages: PageAllocator, interval: int) -> None:
        if interval < 1 or interval % pages.page_size:
            raise ValueError(f"interval {interval}, expected a multiple of the page size {pages.page_size}")
        self.pages, self.interval = pages, interval
        self.queried = self.hit = 0  #: prompt tokens looked up, and found
        self._pages: dict[bytes, _Page] = {}
        self._clock = 0

    def next_cut(self, position: int, length: int) -> int:
        """Where the prefill of a prompt of ``length`` tokens has to stop next after ``position``."""
        last = (length - 1) // self.pages.page_size * self.pages.page_size
        cut = (position // self.interval + 1) * self.interval
        return min(cut, last) if position < last else length

    def _keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Of the first ``count`` pages; each depends on everything before it."""
        keys, size = [], self.pages.page_size
        digest = hashlib.blake2b(digest_size=16)
        for page in range(count):
            digest.update(b"".join(t.to_bytes(4, "little") for t in tokens[page * size : (page + 1) * size]))
            keys.append(digest.copy().digest())
        return keys

    def find(self, tokens: Sequence[int]) -> Hit:
        """The longest reusable prefix of a prompt, shorter than the prompt. Takes a reference to its pages."""
        size = self.pages.page_size
        found: list[_Page] = []
        for key in self._keys(tokens, (len(tokens) - 1) // size):
            if key not in self._pages:
                break
            found.append(self._pages[key])
        best, cut = 0, 0
        while (cut := self.next_cut(cut, len(tokens))) <= len(found) * size and cut < len(tokens):
            if found[cut // size - 1].snapshot is not None:
                best = cut
        self._clock += 1
        used = found[: best // size]
        for entry in used:
            entry.used = self._clock
        self.pages.share(entry.page for entry in used)
        return Hit(best, [entry.page for entry in used], used[-1].snapshot if used else None)

    def counted(self, tokens: int, hit: int) -> None:
        """A prompt was admitted: ``tokens`` looked up, ``hit`` of them reused."""
        self.queried += tokens
        self.hit += hit

    def insert(self, tokens: Sequence[int], count: int, pages: Sequence[int], snapshot: Snapshot) -> None:
        """Remember the first ``count`` tokens, whole pages, which ``pages`` hold and after which ``snapshot`` was
        taken. Pages already known under the same content are left alone."""
        self._clock += 1
        keys = self._keys(tokens, count // self.pages.page_size)
        for depth, key in enumerate(keys):
            entry = self._pages.get(key)
            if entry is None:
                self.pages.share([pages[depth]])
                entry = self._pages[key] = _Page(pages[depth], depth, self._clock)
            entry.used = self._clock
        self._pages[keys[-1]].snapshot = snapshot
        kept = [e for e in self._pages.values() if e.snapshot is not None]
        if len(kept) > SNAPSHOTS:
            min(kept, key=lambda e: e.used).snapshot = None

    @property
    def evictable(self) -> int:
        """Pages that nobody but this cache holds."""
        return sum(self.pages.references(entry.page) == 1 for entry in self._pages.values())

    def evict(self, count: int) -> None:
        """Give back up to ``count`` pages: the least recently used first, of these the ends of prefixes first."""
        idle = [(e.used, -e.depth, key) for key, e in self._pages.items() if self.pages.references(e.page) == 1]
        for _, _, key in sorted(idle)[:count]:
            self.pages.release([self._pages.pop(key).page])
