"""A kernel that only reads: the memory floor that every other kernel is compared with.

Each block copies its share of a buffer into a ring in shared memory with bulk copies and looks at none of it, so
nothing but the memory system limits it. The 16 KB chunks of a block are interleaved over the grid.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-overload"
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
from cutlass import Int32, Int64, Uint8, Uint64
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.experimental import primitives as prims

from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.contract import Contract, Parameter
from kimi_k3.kernels.cute_util import wait_uniform

CONTRACT = Contract(
    kernel="k3_stream_read",
    parameters=(Parameter("data", "weight", early=True), Parameter("chunks", "scalar")),
    pdl=False,
    wait="none",
    trigger="none",
)
CHUNK = 16384


class ReadKernel:
    """``chunks`` chunks of 16 KB, over ``blocks`` blocks with ``stages`` chunks in flight each."""

    def __init__(self, blocks: int, stages: int) -> None:
        self.blocks, self.stages = blocks, stages
        self.smem = stages * CHUNK + 8 * stages

    @cute.jit
    def __call__(self, data: cute.Pointer, chunks: Int32, stream) -> None:
        self.kernel(data, chunks).launch(grid=(self.blocks, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Pointer, chunks: Int32) -> None:
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        S: cutlass.Constexpr = self.stages
        smem = cmem.SmemAllocator()
        ring = smem.allocate_tensor(Uint8, cute.make_layout(S * CHUNK), 128)
        bars = smem.allocate_array(Uint64, S)
        if tid == 0:
            for s in cutlass.range_constexpr(S):
                cute.arch.mbarrier_init(bars + s, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        mine = (chunks - block + self.blocks - 1) // self.blocks
        for i in cutlass.range(0, mine + S, unroll=1):
            s = i % S
            if i >= S:
                wait_uniform(bars + s, (i // S - 1) % 2)
            if (i < mine) & (tid == 0):
                cute.arch.mbarrier_arrive_and_expect_tx(bars + s, CHUNK)
                source = data + Int64(block + i * self.blocks) * CHUNK
                prims.cp_async_bulk_shared_cluster_global(ring.iterator + s * CHUNK, source, bars + s, CHUNK)
            if (i >= mine) & (i < S) & (tid == 0):
                # fewer chunks than slots: complete the barrier that the drain waits for
                cute.arch.mbarrier_arrive(bars + s)


ReadKernel.kernel.set_name_prefix("k3_stream_read", keep_mangled_name=False)


def build(blocks: int = 264, stages: int = 6) -> tuple[Any, tuple[Any, ...]]:
    fake = make_ptr(Uint8, 16, cute.AddressSpace.gmem, assumed_align=16)
    return ReadKernel(blocks, stages), (fake, Int32(1), make_fake_stream())


def compile_cases() -> dict[str, CompileCase]:
    kernel, args = build()
    return {"read": CompileCase(kernel, args, 32, kernel.smem, CONTRACT)}
