"""State that nobody owns must not change: checksums of cache rows and state slots around the model part of a step.

A step may write the KV rows of its own tokens and, per request, one state slot for each of its rows (a prefill: the
first). Everything else belongs to other requests, to a prefix cache, to padding, or to nobody.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.engine import EmbeddedEngine


class Canary:
    """Watches one engine while it is switched on. ``changed``: (run, index) of a step -> rows and slots, over all
    layers, that it changed though it may not write them."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.changed: dict[tuple[str, int], int] = {}

    def switch(self, on: bool) -> None:
        """Wrap the engine's forward pass, or give it back; reading checksums is all that is added."""
        watching = "_forward" in vars(self.engine)
        if on and not watching:
            real = self.engine._forward

            def forward(step: Any, batch: StepBatch, span: str) -> Any:
                before = checksums(self.engine.caches)
                result = real(step, batch, span)
                run, _, index = span.partition("/")[2].rpartition("/")
                self.changed[run, int(index)] = unowned_changes(before, checksums(self.engine.caches), batch)
                return result

            self.engine._forward = forward  # type: ignore[method-assign]
        elif not on and watching:
            del self.engine._forward
            self.changed.clear()


def checksums(caches: Caches) -> dict[str, list[Tensor]]:
    """Per layer, [KV rows] and [slots] int64: each row's or slot's bytes added up as words, whatever they mean as
    numbers. A change goes unseen only where changes of several words cancel."""
    return {
        "kv": [_words(x.flatten(0, 1)) for x in caches.kv.values()],
        "slots": [_words(x) for part in (caches.conv, caches.recurrent) for x in part.values()],
    }


def _words(values: Tensor) -> Tensor:
    """[N, ...] of any dtype -> [N] int64."""
    raw = values.flatten(1).view(torch.uint8)
    wide = next(d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if raw.shape[1] % d.itemsize == 0)
    return raw.view(wide).sum(1, dtype=torch.int64)


def unowned_changes(before: dict[str, list[Tensor]], after: dict[str, list[Tensor]], batch: StepBatch) -> int:
    """How many rows and slots changed, over all layers, besides those that ``batch`` may write."""
    rows = batch.slot_mapping
    counts = [1 if prompt else q for prompt, q in zip(batch.is_prefill, batch.query_lens, strict=True)]
    slots = [own[:n] for own, n in zip(batch.state_slots, counts, strict=True)]
    allowed = {"kv": rows[rows >= 0], "slots": torch.cat(slots) if slots else rows[:0]}
    found = 0
    for part, own in allowed.items():
        for one, other in zip(before[part], after[part], strict=True):
            changed = one != other
            changed[own] = False
            found += int(changed.sum())
    return found
