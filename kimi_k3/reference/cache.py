"""Paged KV cache, KDA state slots, and the allocators of both.

Layouts are the stock ones, whole over all heads; a tensor-parallel rank's share is a slice of the head
dimension. Both paths read and write the same tensors, so a request can change path at any step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import Precision

NULL_SLOT = 0  #: KDA slot that padding rows point at; never written


@dataclass
class Caches:
    """All state that outlives a step.

    ``kv[l]``: [pages, page_size, kv_row], MLA layer ``l`` (key: 0-based layer index).
    ``conv[l]``: [slots, 3 + draft_length, 3 * kda_width], pre-convolution q|k|v rows, oldest first.
    ``recurrent[l]``: [slots, heads, head_dim (v), head_dim (k)].
    """

    page_size: int
    kv: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @staticmethod
    def allocate(
        config: KimiK3Config,
        precision: Precision,
        *,
        pages: int,
        page_size: int,
        slots: int,
        draft_length: int = 0,
        device: torch.device | str = "cpu",
    ) -> Caches:
        """Zero-filled caches. ``slots`` counts the null slot."""
        kv, conv, recurrent = {}, {}, {}
        taps = config.short_conv_kernel_size - 1
        for layer in range(config.num_hidden_layers):
            if config.is_kda(layer):
                conv[layer] = torch.zeros(
                    slots, taps + draft_length, 3 * config.kda_width, dtype=precision.conv, device=device
                )
                recurrent[layer] = torch.zeros(
                    slots,
                    config.kda_num_heads,
                    config.kda_head_dim,
                    config.kda_head_dim,
                    dtype=precision.state,
                    device=device,
                )
            else:
                kv[layer] = torch.zeros(pages, page_size, config.kv_row, dtype=precision.kv, device=device)
        return Caches(page_size, kv, conv, recurrent)


class PageAllocator:
    """KV pages with reference counts, lowest free page first, so that equal histories give equal block tables.

    A page shared by several requests (a common prefix) is freed by its last owner.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"pages={pages}, page_size={page_size}: expected both at least 1")
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages))  # a heap: ascending is already one
        self._references = [0] * pages

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one reference each; None, and nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. A page that is free cannot be shared."""
        pages = list(pages)
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is already free")
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)


class SlotAllocator:
    """KDA state slots, ``1 + draft_length`` per request, never :data:`NULL_SLOT`."""

    def __init__(self, requests: int, draft_length: int = 0) -> None:
        self.width = 1 + draft_length
        self.slots = 1 + requests * self.width  #: with the null slot: what :meth:`Caches.allocate` needs
        self._free = list(range(1, self.slots))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Requests that still fit."""
        return len(self._free) // self.width

    def allocate(self) -> list[int] | None:
        """The slots of one request, or None when all are taken."""
        if self.free == 0:
            return None
        taken = [heapq.heappop(self._free) for _ in range(self.width)]
        self._taken.update(taken)
        return taken

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self._taken:
                raise ValueError(f"slot {slot} is not allocated")
            self._taken.remove(slot)
            heapq.heappush(self._free, slot)
