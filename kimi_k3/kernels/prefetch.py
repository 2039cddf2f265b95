"""L2 prefetch of static weights: a kernel that walks a device table of (address, bytes).

Runs on a side stream beside other kernels, so it is small (one warp a block) and reads nothing into the SM. Only data
that no step writes may be listed: a prefetched activation could be stale.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-overload"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental import primitives as prims
from torch import Tensor

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import runtime
from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.contract import Contract, Parameter

CONTRACT = Contract(
    kernel="k3_prefetch",
    parameters=(
        Parameter("table", "table", early=True, reason="written once, when the step is prepared"),
        Parameter("entries", "scalar"),
    ),
    pdl=False,
    wait="none",
    trigger="none",
)
PIECE = 16384
#: weights of one prefetch point, at most: half of an H200's L2, so that they survive until they are read
CAP_BYTES = 32 * 1024 * 1024


class PrefetchKernel:
    def __init__(self, blocks: int = 16) -> None:
        self.blocks = blocks
        self.threads = 32

    @cute.jit
    def __call__(self, table: cute.Pointer, entries: Int32, stream) -> None:
        self.kernel(table, entries).launch(grid=(self.blocks, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, table: cute.Pointer, entries: Int32) -> None:
        block, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        for e in cutlass.range(0, entries, unroll=1):
            base = cu.ldg1_64(table.toint() + Int64(e) * 16)
            size = cu.ldg1_64(table.toint() + Int64(e) * 16 + 8)
            pieces = Int32((size + (PIECE - 1)) // PIECE)
            for p in cutlass.range(block * self.threads + lane, pieces, self.blocks * self.threads, unroll=1):
                at = Int64(p) * PIECE
                left = Int32(cutlass.min(size - at, Int64(PIECE)))
                prims.cp_async_bulk_prefetch(
                    cute.make_ptr(Uint8, base + at, cute.AddressSpace.gmem, assumed_align=16), left
                )


PrefetchKernel.kernel.set_name_prefix("k3_prefetch", keep_mangled_name=False)


def fake_args() -> tuple[Any, ...]:
    return (runtime.fake_address(torch.int64), Int32(1), make_fake_stream())


def entries(weights: Sequence[Tensor], cap: int = CAP_BYTES) -> list[tuple[int, int]]:
    """(address, bytes) of the weights in order, cut off at ``cap`` bytes in all; sizes are multiples of 16."""
    out = []
    for w in weights:
        size = min(w.numel() * w.element_size(), cap) // 16 * 16
        if size <= 0:
            break
        out.append((w.data_ptr(), size))
        cap -= size
    return out


class Prefetch:
    """One prefetch point: its table is built and its kernel compiled here, :meth:`run` only launches."""

    def __init__(self, weights: Sequence[Tensor], cap: int = CAP_BYTES, blocks: int = 16) -> None:
        for w in weights:
            if not w.is_contiguous() or w.data_ptr() % 16:
                raise ValueError("prefetch: weights must be contiguous and 16-byte aligned")
        self.listed = entries(weights, cap)
        self._keep = tuple(weights)
        self.table = torch.tensor(self.listed or [(0, 0)], dtype=torch.int64, device=weights[0].device)
        self._code = runtime.compiled(("prefetch", blocks), PrefetchKernel(blocks), fake_args())

    def run(self) -> None:
        """Launch on the current stream."""
        if self.listed:
            self._code(runtime.address(self.table), len(self.listed), runtime.current_stream())


def reference(weights: Sequence[Tensor], cap: int = CAP_BYTES) -> None:
    """Changes nothing: a prefetch has no result."""


def compile_cases() -> dict[str, CompileCase]:
    kernel = PrefetchKernel()
    return {"walk": CompileCase(kernel, fake_args(), kernel.threads, 0, CONTRACT)}
