"""The bench one op is run on: its own context, poisoned outputs, guards around everything not to be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode import registry
from kimi_k3.decode.executor import device_family
from kimi_k3.decode.mesh import IDLE, is_idle
from kimi_k3.decode.numerics.bounded import Bounded
from kimi_k3.decode.numerics.families import FAMILIES, Draw
from kimi_k3.decode.ops import OpContext, overload
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import FP8, Precision

#: Rows of a mailbox or a cache beyond the step's own, which must stay as they are.
CANARY_ROWS = 3

CHANGED = "changed"  #: key under which a run reports elements that should not have changed

Inputs = dict[str, Tensor]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def changed_elements(before: Tensor, after: Tensor, writable: Tensor | None = None) -> int:
    """Elements whose bits differ, outside of the bool mask ``writable``."""
    width = before.element_size()
    differs = (bits(before) != bits(after)).unflatten(-1, (-1, width)).any(-1)
    return int((differs & ~writable).sum() if writable is not None else differs.sum())


@dataclass(frozen=True)
class Shape:
    """One size of a step: ``live`` of ``rows`` rows are true ones.

    ``played``: how many of the ``tp`` ranks run here, 0 for all of them; publications go to all ``tp`` mailboxes either
    way. ``device`` holds every tensor.
    """

    config: KimiK3Config
    precision: Precision
    tp: int
    rows: int
    live: int
    query_len: int = 1
    dcp: int = 1
    interleave: int = 3
    played: int = 0
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """Leading dimension of what is rank-local."""
        return self.played or self.tp

    @property
    def cap(self) -> int:
        return self.rows + CANARY_ROWS

    @property
    def requests(self) -> int:
        return self.rows // self.query_len

    @property
    def live_requests(self) -> int:
        return self.live // self.query_len

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.tp

    @property
    def name(self) -> str:
        verify = f"-q{self.query_len}" if self.query_len > 1 else ""
        dcp = f"-dcp{self.dcp}" if self.dcp > 1 else ""
        fp8 = "-kvfp8" if self.precision.kv == FP8 else ""
        part = f"-{self.played}rank" if self.played else ""
        return f"tp{self.tp}{part}-m{self.rows}of{self.live}{verify}{dcp}{fp8}"

    @property
    def query_dtype(self) -> torch.dtype:
        return FP8 if self.precision.kv == FP8 else self.precision.activations


class Rig:
    """Runs one op. Everything handed out by :meth:`out` is poisoned; everything else is guarded."""

    def __init__(self, shape: Shape, provider: str, poison: float) -> None:
        self.shape, self.poison = shape, poison
        self.context = OpContext(shape.config, shape.precision, shape.tp, shape.dcp, shape.interleave)
        self.context.providers = registry.select(self.context, device_family(torch.device(shape.device)), provider)
        self._guards: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def out(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.shape.precision.activations
        if dtype.is_floating_point:
            return torch.full(size, self._poison(dtype), dtype=torch.float64).to(dtype)
        return torch.full(size, -(2**40), dtype=dtype)

    def _poison(self, dtype: torch.dtype) -> float:
        """The poison, or the largest number a narrow format has."""
        return min(self.poison, torch.finfo(dtype).max) if self.poison == self.poison else self.poison

    def padded(self, x: Tensor, dim: int = 1) -> Tensor:
        """``x`` with poison in the rows that are padding."""
        x = x.clone()
        x.narrow(dim, self.shape.live, self.shape.rows - self.shape.live).fill_(self._poison(x.dtype))
        return x

    def empty_box(self, *size: int, dim: int, dtype: torch.dtype | None = None, columns: int | None = None) -> Tensor:
        """An idle mailbox with poison in the canary rows; publications may write the step's rows only, and of them
        only the first ``columns`` columns."""
        box = self.out(*size, dtype=dtype)
        box.narrow(dim, 0, self.shape.rows).fill_(IDLE)
        writable = self._rows_of(box, dim)
        if columns is not None:
            writable[..., columns:] = False
        return self.guard(box, writable)

    def full_box(self, values: Tensor, dim: int) -> Tensor:
        """A mailbox that holds ``values`` in its live rows, poison in padding rows and canaries."""
        size = list(values.shape)
        size[dim] = self.shape.cap
        box = self.out(*size, dtype=values.dtype)
        box.narrow(dim, 0, self.shape.live).copy_(values.narrow(dim, 0, self.shape.live))
        return self.guard(box, self._rows_of(box, dim))

    def _rows_of(self, box: Tensor, dim: int) -> Tensor:
        mask = torch.zeros(box.shape, dtype=torch.bool)
        mask.narrow(dim, 0, self.shape.rows).fill_(True)
        return mask

    def guard(self, tensor: Tensor, writable: Tensor | None = None) -> Tensor:
        """Remember the bits of ``tensor``; elements outside ``writable`` must keep them."""
        self._guards.append((tensor, tensor.clone(), writable))
        return tensor

    def call(self, op: str, *args: Any) -> None:
        overload(op)(self.context.handle, *args)
        self.context.join()

    def changed(self) -> Tensor:
        return torch.tensor([sum(changed_elements(before, now, mask) for now, before, mask in self._guards)])

    def not_idle(self, box: Tensor, dim: int) -> Tensor:
        """How many words of the step's rows were not re-armed, [1]."""
        return (~is_idle(box.narrow(dim, 0, self.shape.rows))).sum().view(1)

    def live(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.narrow(dim, 0, self.shape.live)


ZERO = Bounded(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


@dataclass(frozen=True)
class OpCase:
    """How to draw inputs for one op, run it, and compute it in FP64 with bounds. Shapes come from ``shape``."""

    op: str
    shape: Shape
    draw: Callable[[Shape, Draw], Inputs]
    run: Callable[[Rig, Inputs], Mapping[str, Tensor]]
    oracle: Callable[[Shape, Inputs], Mapping[str, Bounded]]
    text: str  #: rounding points behind the bound, in words
    label: str = ""
    families: tuple[str, ...] = FAMILIES

    @property
    def name(self) -> str:
        return f"{self.op}{self.label}/{self.shape.name}"
