"""The streaming projection for few tokens: y[b, N] = x[b, K] @ W[N, K]^T, b up to 8, 16 or 32, x in registers.

block     ``rows`` consecutive rows of W x one of ``ksplit`` K ranges (a cluster)
producer  one warp: one rank-3 TMA box [rows, 64, kblk/64] of W (128-byte swizzle) per stage into a ring of ``stages``;
          the first ``stages`` boxes are issued before griddepcontrol.wait, since weights depend on no kernel
consumers ``warps`` warps; kblk/32 of them share a stage, each takes a 32-wide K slice: one 16-byte shared load per lane
          and 8 rows of W, weights as the M operand of m16n8k16, tokens as N. The K order inside a slice is permuted
          alike for both operands (lane 4 g + q owns the 8 consecutive k of 16-byte chunk 2 q + parity of its row), so
          swizzled reads have no bank conflicts and x comes straight from global memory, ``ahead`` stages early
end       the warps' partial sums, then the ranks' (sent to rank 0), in a fixed order: deterministic

``trigger`` (run time): dependents are launched when the producer has that many boxes left to issue; >= all of them:
right after the wait; -1: before the wait. Any position is safe for a successor that waits before it touches y; what
differs is how much of the ring is still to be loaded when the successor's own loads begin to compete.

A SiTU projection takes rows/2 gate rows and the matching rows/2 up rows, by two boxes per stage.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-overload"
from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels.arch import padding
from kimi_k3.kernels.contract import Contract, Parameter
from kimi_k3.kernels.stream_projection_epilogue import Epilogue, Output

CONTRACT = Contract(
    kernel="k3_stream_projection_rows",
    parameters=(
        Parameter("w", "weight", early=True),
        Parameter("w_up", "weight", early=True),
        Parameter("x", "activation"),
        Parameter("y", "output"),
        Parameter("y32", "output"),
        Parameter("table", "table"),
        *(Parameter(name, "scalar") for name in ("ldx", "ldy", "ld32", "b", "trigger")),
    ),
    wait="late",
    trigger="entry",  # a run-time choice: entry is the earliest that a setting makes it
)


class RowsKernel(Output):
    """``tiles``: n8 tiles of tokens, b <= 8 * tiles. Raises ValueError for a geometry that does not divide."""

    def __init__(self, epilogue: Epilogue, rows: int, stages: int, kblk: int = 128, ksplit: int = 1, warps: int = 8,
                 tiles: int = 1, per_sm: int = 0) -> None:  # fmt: skip
        n, k, situ = epilogue.shape.n, epilogue.shape.k, epilogue.shape.situ
        self.epilogue, self.n, self.k, self.rows, self.kblk, self.ksplit = epilogue, n, k, rows, kblk, ksplit
        self.warps, self.tiles = warps, tiles
        self.halves = 2 if situ else 1
        self.half = rows // self.halves  # output columns of a block
        self.wps = kblk // 32  # warps per stage
        if rows % (8 * self.halves) or kblk % 64 or k % (kblk * ksplit) or warps % self.wps:
            raise ValueError(f"{n}x{k}: rows {rows}, kblk {kblk}, ksplit {ksplit}, warps {warps} do not divide")
        self.nst = k // ksplit // kblk  # stages of a block
        self.groups = warps // self.wps
        if self.nst % self.groups:
            raise ValueError(f"{n}x{k}: {self.nst} stages do not divide over {self.groups} warp groups")
        self.turns = self.nst // self.groups  # stages of a warp
        self.ahead = max(d for d in range(1, {1: 8, 2: 4, 4: 2, 8: 1}[tiles] + 1) if self.turns % d == 0)
        self.stages = min(stages, self.nst)
        if self.stages != self.nst and self.stages % self.groups:
            raise ValueError(f"{n}x{k}: a ring of {self.stages} slots does not divide over {self.groups} warp groups")
        self.mt = -(-rows // 16)
        self.pitch = 16 * self.mt + 4  # floats per token of a partial tile: no bank conflicts
        self.tokens = 8 * tiles
        self.blocks = -(-epilogue.columns // self.half)
        self.threads = 32 * warps + 32
        self.box = rows * kblk * 2
        self.region = self.stages * self.box + 4 * warps * self.tokens * self.pitch
        self.smem = self.region + 16 * self.stages + 8 + (4 * ksplit * self.tokens * rows if ksplit > 1 else 0)
        extra = padding(self.smem, per_sm)
        self.region, self.smem = self.region + extra, self.smem + extra

    @cute.jit
    def __call__(self, x: cute.Pointer, w: cute.Pointer, y: cute.Pointer, y32: cute.Pointer, table: cute.Pointer,
                 ldx: Int32, ldy: Int32, ld32: Int32, b: Int32, trigger: Int32, stream) -> None:  # fmt: skip
        kb: cutlass.Constexpr = self.kblk // 64
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout = cute.tile_to_shape(atom, (self.half, 64, kb), (0, 1, 2))
        rows: cutlass.Constexpr = self.n // self.halves
        shape = cute.make_layout((rows, 64, self.k // 64), stride=(self.k, 1, 64))
        op = cpasync.CopyBulkTensorTileG2SOp()
        tile: cutlass.Constexpr = (self.half, 64, kb)
        w0, t0 = cpasync.make_tiled_tma_atom(op, cute.make_tensor(w, shape), layout, tile)
        second = w + (rows * self.k if self.halves == 2 else 0)
        w1, t1 = cpasync.make_tiled_tma_atom(op, cute.make_tensor(second, shape), layout, tile)
        self.kernel(w0, t0, w1, t1, layout, x, y, y32, table, ldx, ldy, ld32, b, trigger).launch(
            grid=(self.ksplit, self.blocks, 1), block=(self.threads, 1, 1),
            cluster=(self.ksplit, 1, 1) if self.ksplit > 1 else None, stream=stream, use_pdl=True,
            min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(self, w0: cute.CopyAtom, t0: cute.Tensor, w1: cute.CopyAtom, t1: cute.Tensor,
               layout: cute.ComposedLayout, x: cute.Pointer, y: cute.Pointer, y32: cute.Pointer, table: cute.Pointer,
               ldx: Int32, ldy: Int32, ld32: Int32, b: Int32, trigger: Int32) -> None:  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        rank, block, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        S: cutlass.Constexpr = self.stages
        W: cutlass.Constexpr = self.warps
        T: cutlass.Constexpr = self.tokens
        smem = cmem.SmemAllocator()
        ring = smem.allocate(self.region, 1024)
        tiles = cute.make_layout((W, T, self.pitch), stride=(T * self.pitch, self.pitch, 1))
        red = cute.make_tensor(cute.recast_ptr(ring + S * self.box, dtype=Float32), tiles)
        bars = smem.allocate_array(Uint64, 2 * S + 1)  # full, empty, cluster sum
        part = red
        if cutlass.const_expr(self.ksplit > 1):
            shape = cute.make_layout((self.ksplit, T, self.rows), stride=(T * self.rows, self.rows, 1))
            part = smem.allocate_tensor(Float32, shape, 16)
        if tid == 0:
            for s in cutlass.range_constexpr(S):
                cute.arch.mbarrier_init(bars + s, 1)
                cute.arch.mbarrier_init(bars + S + s, self.wps)
            cute.arch.mbarrier_init(bars + 2 * S, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.ksplit > 1):
            cute.arch.cluster_arrive_relaxed()  # the barrier's initialisation is fenced for the cluster
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ksplit > 1):  # noqa: SIM102 - compile time outside, run time inside
            if (tid == 0) & (rank == 0):
                cute.arch.mbarrier_arrive_and_expect_tx(bars + 2 * S, b * (self.ksplit * self.rows * 4))
        if warp == W:
            g0 = cute.local_tile(t0, (self.half, 64, self.kblk // 64), (block, 0, None))
            g1 = cute.local_tile(t1, (self.half, 64, self.kblk // 64), (block, 0, None))
            first = rank * self.nst
            if trigger < 0:
                cu.pdl_trigger()
            for i in cutlass.range_constexpr(S):
                self.load(w0, g0, w1, g1, layout, ring + i * self.box, bars + i, first + i)
            cu.pdl_wait()
            late = self.nst - trigger
            if (trigger >= 0) & (late <= S):
                cu.pdl_trigger()
            for i in cutlass.range(S, self.nst, unroll=1):
                if i == late:
                    cu.pdl_trigger()
                s = i % S
                cu.wait_uniform(bars + S + s, (i // S - 1) % 2)
                self.load(w0, g0, w1, g1, layout, ring + s * self.box, bars + s, first + i)
        else:
            self.consume(ring, bars, red, x, ldx, b, rank, warp, tid % 32)
        cute.arch.sync_threads()
        out = (y.toint(), y32.toint(), table.toint(), ldy, ld32)
        self.finish(red, part, bars + 2 * S, out, b, rank, block, tid)

    @cute.jit
    def consume(self, ring, bars, red, x, ldx, b, rank, warp, lane):
        """One warp: its K slice of every stage of its group, then its partial tile to shared memory."""
        g, q = lane // 4, lane % 4
        group, wi = warp // self.wps, warp % self.wps
        sub, chunk = wi // 2, 2 * q + wi % 2
        S: cutlass.Constexpr = self.stages
        P: cutlass.Constexpr = self.ahead
        NT: cutlass.Constexpr = self.tiles
        step: cutlass.Constexpr = self.groups * self.kblk * 2  # bytes of x between turns
        wbase = Int32(ring.toint()) + (sub * self.half + g) * 128 + (chunk ^ g) * 16
        column = (rank * self.nst + group) * self.kblk + 64 * sub + 8 * chunk
        xbase = cute.make_rmem_tensor((NT,), Int64)
        for t in cutlass.range_constexpr(NT):
            token = cutlass.min(g + 8 * t, b - 1)  # columns >= b are computed and dropped
            xbase[t] = x.toint() + (Int64(token) * ldx + column) * 2
        acc = cute.make_rmem_tensor(cute.make_layout((self.mt, NT, 4), stride=(4 * NT, 4, 1)), Float32)
        acc.fill(0.0)
        xr = cute.make_rmem_tensor(cute.make_layout((P, NT, 4), stride=(4 * NT, 4, 1)), Uint32)
        cu.pdl_wait()
        for p in cutlass.range_constexpr(P):
            self.fetch(xr, p, xbase, p * step)
        for t0 in cutlass.range(0, self.turns, P, unroll=1):
            for p in cutlass.range_constexpr(P):
                turn = t0 + p
                i = group + turn * self.groups
                s = i % S
                cu.wait_uniform(bars + s, (i // S) % 2)
                at = wbase + s * self.box
                for m in cutlass.range_constexpr(self.mt):
                    lo = cu.lds4(at + self.block_offset(2 * m))
                    if cutlass.const_expr(16 * m + 8 < self.rows):
                        hi = cu.lds4(at + self.block_offset(2 * m + 1))
                    else:
                        hi = [Uint32(0)] * 4
                    for t in cutlass.range_constexpr(NT):
                        for h in cutlass.range_constexpr(2):
                            a = (lo[2 * h], hi[2 * h], lo[2 * h + 1], hi[2 * h + 1])
                            c = [acc[m, t, v] for v in range(4)]
                            d = cu.mma_bf16(a, (xr[p, t, 2 * h], xr[p, t, 2 * h + 1]), c)
                            for v in cutlass.range_constexpr(4):
                                acc[m, t, v] = d[v]
                # without this fence the refill of the slot may overtake the reads above
                cu.fence_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars + S + s)
                if t0 + P < self.turns:
                    self.fetch(xr, p, xbase, Int64(turn + P) * step)
        for m in cutlass.range_constexpr(self.mt):
            for t in cutlass.range_constexpr(NT):
                for v in cutlass.range_constexpr(4):
                    if cutlass.const_expr(16 * m + 8 * (v // 2) < self.rows):
                        red[warp, 8 * t + 2 * q + v % 2, 16 * m + g + 8 * (v // 2)] = acc[m, t, v]

    @cute.jit
    def finish(self, red, part, bar, out, b, rank, block, tid):
        """Add the warps' tiles in warp order, then the ranks' in rank order, and emit."""
        R: cutlass.Constexpr = self.rows
        size: cutlass.Constexpr = 4 * self.tokens * R  # bytes of a rank's sums
        partial = Int32(red.iterator.toint())
        stride: cutlass.Constexpr = 4 * self.tokens * self.pitch
        if cutlass.const_expr(self.ksplit == 1):
            tile = (partial, 4 * self.pitch, stride)
            self.emit_tile(tile, out, self.half, self.warps, block * self.half, b, tid)
        else:
            cute.arch.cluster_wait()  # rank 0 runs and its barrier exists; bytes may arrive before it is armed
            bar0 = cu.mapa(Int32(bar.toint()), 0)
            sums = Int32(part.iterator.toint())
            mine = cu.mapa(sums + rank * size, 0)
            for i in range(tid, (R // 4) * b, self.threads):
                token, r = i // (R // 4), 4 * (i % (R // 4))
                v = self.added(partial + 4 * (token * self.pitch + r), stride, self.warps, 4)
                cu.st_async4(mine + 4 * (token * R + r), [cu.f2i(e) for e in v], bar0)
            if rank == 0:
                cu.wait_cluster(bar, 0)
                tile = (sums, 4 * R, size)
                self.emit_tile(tile, out, self.half, self.ksplit, block * self.half, b, tid)

    def block_offset(self, j: int) -> int:
        """Byte offset of 8-row block ``j`` inside a stage: boxes of ``half`` rows, each [kblk/64][half][64]."""
        per = self.half // 8
        return (j // per) * self.half * self.kblk * 2 + (j % per) * 1024

    @cute.jit
    def fetch(self, xr, p: cutlass.Constexpr, bases, offset):
        for t in cutlass.range_constexpr(self.tiles):
            v = cu.ldg4(bases[t] + Int64(offset))
            for c in cutlass.range_constexpr(4):
                xr[p, t, c] = v[c]

    @cute.jit
    def load(self, w0, g0, w1, g1, layout, ptr, bar, i):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.box)
        self.copy(w0, g0, layout, ptr, bar, i)
        if cutlass.const_expr(self.halves == 2):
            self.copy(w1, g1, layout, ptr + self.box // 2, bar, i)

    @cute.jit
    def copy(self, atom, g, layout, ptr, bar, i):
        s = cute.make_tensor(cute.recast_ptr(ptr, layout.inner, dtype=BFloat16), layout.outer)
        sp, gp = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 3), cute.group_modes(g[None, None, None, i], 0, 3)
        )
        # cute.copy elects a lane itself
        cute.copy(atom, gp, sp, tma_bar_ptr=bar, cache_policy=Int64(cu.EVICT_FIRST))


RowsKernel.kernel.set_name_prefix("k3_stream_projection_rows", keep_mangled_name=False)
