"""The streaming projection for 9-64 tokens: x shares the ring with W, and K is split over a cluster.

With b tokens every block needs K b elements of x from L2 beside its K rows elements of W, and L2 delivers little more
than device memory does. So blocks own many rows, ``rows`` rows of W x one of ``ksplit`` K ranges, and ``xcast``
neighbours share x: each loads a part of it and multicasts that to all. A cluster is ksplit x xcast blocks.

producer  one warp: per stage one TMA box [rows, kblk] of W and one [tokens, kblk] of x, one barrier for both. x may
          have a shorter ring (``xstages``). The first ``stages`` W boxes are issued before griddepcontrol.wait, and
          ``l2`` more are fetched into L2; x after. With xcast a slot is free when the consumers of all sharing blocks
          have released it, and a block ends when all its slots have been released for the last time
consumers wm x wk warps; a warp multiplies rows/wm rows with all tokens over every wk-th 32-wide K slice of a stage.
          Same permuted K order as the kernel for few tokens: 16-byte conflict-free reads of both operands, no ldmatrix.
          On sm_90a optionally wm/4 warpgroups with wgmma, which reads both operands from shared memory itself
end       rank r owns 1/ksplit of the rows: every block puts its partial rows into its drained ring and sends each owner
          its slab by one bulk copy; the owner adds the slabs in (rank, warp) order and emits. Deterministic

The protocol of the rings is run under random schedules in tests/kimi_k3/kernels/ring_protocol.py: change both.

Rows of x beyond b are outside the tensor map and read as zeros. ``trigger`` as in the kernel for few tokens.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-overload"
from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels.arch import padding
from kimi_k3.kernels.contract import Contract, Parameter
from kimi_k3.kernels.stream_projection_epilogue import Epilogue, Output

CONTRACT = Contract(
    kernel="k3_stream_projection_tiles",
    parameters=(
        Parameter("w", "weight", early=True),
        Parameter("w_up", "weight", early=True),
        Parameter("x", "activation"),
        Parameter("x_rows", "scalar"),
        Parameter("y", "output"),
        Parameter("y32", "output"),
        Parameter("table", "table"),
        *(Parameter(name, "scalar") for name in ("ldy", "ld32", "b", "trigger")),
    ),
    wait="late",
    trigger="entry",  # a run-time choice: entry is the earliest that a setting makes it
)


class TilesKernel(Output):
    """``tiles``: n8 tiles of tokens. Raises ValueError for a geometry that does not divide."""

    def __init__(self, epilogue: Epilogue, rows: int, stages: int, kblk: int = 64, ksplit: int = 1, wm: int = 4,
                 wk: int = 2, tiles: int = 2, ldx: int = 0, warpgroup_mma: bool = False,
                 xstages: int = 0, per_sm: int = 0, xcast: int = 1, prompt: bool = False,
                 l2: int = 0) -> None:  # fmt: skip
        n, k, situ = epilogue.shape.n, epilogue.shape.k, epilogue.shape.situ
        self.epilogue, self.n, self.k, self.rows, self.kblk, self.ksplit = epilogue, n, k, rows, kblk, ksplit
        self.wm, self.wk, self.tiles, self.ldx, self.wgmma = wm, wk, tiles, ldx or k, warpgroup_mma
        self.halves = 2 if situ else 1
        self.half = rows // self.halves
        self.warps, self.tokens, self.mt = wm * wk, 8 * tiles, rows // (16 * wm)
        self.slices = kblk // 32 // wk  # 32-wide K slices of a warp and stage
        if rows % (16 * wm) or self.half % 8 or kblk % 64 or k % (kblk * ksplit) or (kblk // 32) % wk:
            raise ValueError(f"{n}x{k}: rows {rows}, kblk {kblk}, ksplit {ksplit}, warps {wm}x{wk} do not divide")
        if warpgroup_mma and (wk != 1 or wm % 4 or self.half % 64):
            raise ValueError(f"{n}x{k}: warpgroups need 64-row blocks, wk 1 and wm 4 or 8; got {self.half}, {wk}, {wm}")
        if self.half % (8 * ksplit):
            raise ValueError(
                f"{n}x{k}: {self.half} output columns of a block do not divide over {ksplit} ranks in eights"
            )
        if xcast < 1 or tiles % xcast or ksplit * xcast > 8:
            raise ValueError(f"{n}x{k}: x of {8 * tiles} tokens, ksplit {ksplit}: {xcast} blocks cannot share it")
        self.xcast, self.slice = xcast, 8 * tiles // xcast  # tokens that a block loads for all
        self.xkb = 1 if xcast > 1 else kblk // 64  # of a copy: shared sub-blocks stay contiguous over all tokens
        self.prompt, self.l2 = prompt, l2
        self.own = self.half // ksplit  # output columns of a rank
        self.nst = k // ksplit // kblk
        self.stages = min(stages, self.nst)
        self.xstages = min(xstages or self.stages, self.stages)
        if warpgroup_mma and not prompt and self.xstages < min(2, self.nst):
            # a slot is released when the next stage's products have been issued, which would wait for that slot
            raise ValueError(f"{n}x{k}: wgmma needs two slots of x, or prompt release; got {self.xstages}")
        self.wbox, self.xbox = rows * kblk * 2, self.tokens * kblk * 2
        self.pitch = self.halves * self.own + 4  # floats per token of a partial tile: written without bank conflicts
        self.slab = self.tokens * self.pitch  # floats one source sends to one owner
        self.region = max(
            self.stages * self.wbox + self.xstages * self.xbox, 4 * (ksplit + (ksplit > 1) * ksplit) * wk * self.slab
        )
        self.smem = self.region + 16 * self.stages + 8
        extra = padding(self.smem, per_sm)
        self.region, self.smem = self.region + extra, self.smem + extra
        self.blocks = -(-epilogue.columns // self.half)
        self.cluster = ksplit * xcast
        self.sharing = sum(1 << (n * ksplit) for n in range(xcast))  # blocks of rank 0, as a multicast mask
        self.threads = 32 * self.warps + 32

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
        xtile: cutlass.Constexpr = (self.slice, 64, self.xkb)
        xlayout = cute.tile_to_shape(atom, xtile, (0, 1, 2))
        # a run-time extent: a static 1 would be dropped from the tensor map
        xshape = cute.make_layout((b, 64, self.k // 64), stride=(self.ldx, 1, 64))
        xop = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.xcast > 1 else op
        xa, xt = cpasync.make_tiled_tma_atom(xop, cute.make_tensor(x, xshape), xlayout, xtile)
        blocks: cutlass.Constexpr = -(-self.blocks // self.xcast) * self.xcast  # surplus ones have no columns
        self.kernel(w0, t0, w1, t1, xa, xt, layout, xlayout, y, y32, table, ldy, ld32, b, trigger).launch(
            grid=(self.ksplit, blocks, 1), block=(self.threads, 1, 1),
            cluster=(self.ksplit, self.xcast, 1) if self.cluster > 1 else None, stream=stream, use_pdl=True,
            min_blocks_per_mp=1, preferred_smem_carveout=100)  # fmt: skip

    @cute.kernel
    def kernel(self, w0: cute.CopyAtom, t0: cute.Tensor, w1: cute.CopyAtom, t1: cute.Tensor, xa: cute.CopyAtom,
               xt: cute.Tensor, layout: cute.ComposedLayout, xlayout: cute.ComposedLayout, y: cute.Pointer,
               y32: cute.Pointer, table: cute.Pointer, ldy: Int32, ld32: Int32, b: Int32,
               trigger: Int32) -> None:  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        rank, block, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        S: cutlass.Constexpr = self.stages
        X: cutlass.Constexpr = self.xstages
        smem = cmem.SmemAllocator()
        ring = smem.allocate(self.region, 1024)
        bars = smem.allocate_array(Uint64, 2 * S + 1)  # full, empty, exchange
        if tid == 0:
            for s in cutlass.range_constexpr(S):
                cute.arch.mbarrier_init(bars + s, 1)
                cute.arch.mbarrier_init(bars + S + s, self.warps * self.xcast)
            cute.arch.mbarrier_init(bars + 2 * S, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.xcast > 1):
            cute.arch.cluster_arrive_relaxed()  # the barriers' initialisation is fenced for the cluster
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ksplit > 1):  # noqa: SIM102 - compile time outside, run time inside
            if tid == 0:
                received: cutlass.Constexpr = (self.ksplit - 1) * self.wk * self.slab * 4
                cute.arch.mbarrier_arrive_and_expect_tx(bars + 2 * S, received)
        acc = cute.make_rmem_tensor(cute.make_layout((self.mt, self.tiles, 4), stride=(4 * self.tiles, 4, 1)), Float32)
        if warp == self.warps:
            g0 = cute.local_tile(t0, (self.half, 64, self.kblk // 64), (block, 0, None))
            g1 = cute.local_tile(t1, (self.half, 64, self.kblk // 64), (block, 0, None))
            gx = cute.local_tile(xt, (self.slice, 64, self.xkb), (block % self.xcast, 0, None))
            first = rank * self.nst
            if trigger < 0:
                cu.pdl_trigger()
            xring = ring + S * self.wbox
            for i in cutlass.range_constexpr(S):
                self.arm(bars + i)
                self.load_w(w0, g0, w1, g1, layout, ring + i * self.wbox, bars + i, first + i)
            for i in cutlass.range(S, min(S + self.l2, self.nst), unroll=1):
                self.hint_w(w0, g0, w1, g1, layout, ring, first + i)
            cu.pdl_wait()
            if cutlass.const_expr(self.xcast > 1):
                cute.arch.cluster_wait()
            for i in cutlass.range_constexpr(X):
                self.load_x(xa, gx, xlayout, xring + i * self.xbox, bars + i, first + i, rank, block)
            late = self.nst - S - trigger  # stages that are consumed when `trigger` W boxes are left
            if (trigger >= 0) & (late <= 0):
                cu.pdl_trigger()
            for j in cutlass.range(0, self.nst - X, unroll=1):
                if (j == late) & (late > 0):
                    cu.pdl_trigger()
                s = j % S
                cu.wait_uniform(bars + S + s, (j // S) % 2)
                more = j < self.nst - S
                if more:
                    self.arm(bars + s)
                n = j + X  # the barrier of stage n is armed: X <= S
                # x first: it is waited for, W was asked for long ago
                self.load_x(xa, gx, xlayout, xring + (j % X) * self.xbox, bars + n % S, first + n, rank, block)
                if more:
                    self.load_w(w0, g0, w1, g1, layout, ring + s * self.wbox, bars + s, first + j + S)
        else:
            acc.fill(0.0)
            cu.pdl_wait()
            if cutlass.const_expr(self.xcast > 1):
                cute.arch.cluster_wait()
            if cutlass.const_expr(self.wgmma):
                self.multiply_warpgroup(ring, bars, acc, warp, tid % 32, rank)
            else:
                self.multiply(ring, bars, acc, warp, tid % 32, rank)
        cu.fence_async_shared()  # also completes this thread's reads of the ring, so that a relaxed arrive suffices
        if cutlass.const_expr(self.ksplit > 1):
            cute.arch.cluster_arrive_relaxed()  # peers may write to this ring once all blocks are here
        cute.arch.sync_threads()
        if warp < self.warps:
            self.keep(ring, acc, rank, warp, tid % 32)
        cu.fence_async_shared()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ksplit > 1):
            cute.arch.cluster_wait()
            if (tid < self.ksplit) & (tid != rank):
                self.send(ring, bars + 2 * S, rank, tid, block % self.xcast * self.ksplit)
            cu.wait_cluster(bars + 2 * S, 0)
            cute.arch.cluster_arrive_relaxed()  # what was sent to this block has arrived
        self.finish(ring, (y.toint(), y32.toint(), table.toint(), ldy, ld32), b, rank, block, tid)
        if cutlass.const_expr(self.xcast > 1):  # noqa: SIM102 - compile time outside, run time inside
            if warp == self.warps:  # the neighbours' last releases have arrived: nobody touches this block any more
                for s in cutlass.range_constexpr(S):
                    uses: cutlass.Constexpr = -(-(self.nst - s) // S)
                    cu.wait_uniform(bars + S + s, (uses - 1) % 2)
        if cutlass.const_expr(self.ksplit > 1):
            cute.arch.cluster_wait()  # all copies out of this block have been read

    @cute.jit
    def multiply(self, ring, bars, acc, warp, lane, rank):
        S: cutlass.Constexpr = self.stages
        g, q = lane // 4, lane % 4
        wm, wk = warp % self.wm, warp // self.wm
        base = Int32(ring.toint())
        for i in cutlass.range(0, self.nst, unroll=1):
            s = i % S
            cu.wait_uniform(bars + s, (i // S) % 2)
            for j in cutlass.range_constexpr(self.slices):
                piece = wk + j * self.wk
                sub, chunk = piece // 2, ((2 * q + piece % 2) ^ g) * 16 + g * 128
                at = base + s * self.wbox + chunk
                xat = base + S * self.wbox + (i % self.xstages) * self.xbox + chunk + sub * (self.tokens * 128)
                xr = [cu.lds4(xat + 1024 * t) for t in range(self.tiles)]
                for m in cutlass.range_constexpr(self.mt):
                    j8 = wm * (2 * self.mt) + 2 * m
                    lo = cu.lds4(at + self.block_offset(j8, sub))
                    hi = cu.lds4(at + self.block_offset(j8 + 1, sub))
                    for h in cutlass.range_constexpr(2):
                        a = (lo[2 * h], hi[2 * h], lo[2 * h + 1], hi[2 * h + 1])
                        for t in cutlass.range_constexpr(self.tiles):
                            c = [acc[m, t, v] for v in range(4)]
                            d = cu.mma_bf16(a, (xr[t][2 * h], xr[t][2 * h + 1]), c)
                            for v in cutlass.range_constexpr(4):
                                acc[m, t, v] = d[v]
            # without this fence the refill of the slot may overtake the reads above
            cu.fence_async_shared()
            cute.arch.sync_warp()
            self.release(bars + S + s, lane, rank)

    @cute.jit
    def release(self, bar, lane, rank):
        """This warp has read a slot: tell the producers that write to it, this block's and those that share x."""
        if cutlass.const_expr(self.xcast > 1):
            if lane < self.xcast:
                cu.arrive_peer(cu.mapa(Int32(bar.toint()), rank + lane * self.ksplit))
        elif lane == 0:
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def multiply_warpgroup(self, ring, bars, acc, warp, lane, rank):
        """One warpgroup: every (wm/4)-th 64-row block. A slot is released one stage late, when its reads are complete
        (``prompt``: the warpgroup waits for them); wgmma reads through the async proxy like TMA, so no proxy fence is
        needed here."""
        S: cutlass.Constexpr = self.stages
        group = warp // 4
        base = Int32(ring.toint())
        for i in cutlass.range(0, self.nst, unroll=1):
            s = i % S
            cu.wait_uniform(bars + s, (i // S) % 2)
            at = base + s * self.wbox
            xslot = base + S * self.wbox + (i % self.xstages) * self.xbox
            cu.wgmma_fence()
            for step in cutlass.range_constexpr(self.kblk // 16):
                sub: cutlass.Constexpr = step // 4
                xat = xslot + (sub * (self.tokens * 128) + (step % 4) * 32)
                for m in cutlass.range_constexpr(self.mt):
                    block = m * (self.wm // 4) + group
                    wat = at + self.block_offset(8 * block, sub) + (step % 4) * 32
                    c = [acc[m, t, v] for t in range(self.tiles) for v in range(4)]
                    d = cu.wgmma_bf16(cu.wgmma_descriptor(wat), cu.wgmma_descriptor(xat), c)
                    for t in cutlass.range_constexpr(self.tiles):
                        for v in cutlass.range_constexpr(4):
                            acc[m, t, v] = d[4 * t + v]
            cu.wgmma_commit()
            cu.wgmma_wait(0 if self.prompt else 1)
            if cutlass.const_expr(self.prompt):
                self.release(bars + S + s, lane, rank)
            elif i > 0:
                self.release(bars + S + (i - 1) % S, lane, rank)
        cu.wgmma_wait(0)
        if cutlass.const_expr(self.xcast > 1 and not self.prompt):
            self.release(bars + S + (self.nst - 1) % S, lane, rank)

    @cute.jit
    def block_offset(self, j8, sub):
        """Byte offset of 8-row block ``j8``, 64-wide sub-block ``sub``: boxes of ``half`` rows, [kblk/64][half][64]."""
        if cutlass.const_expr(self.halves == 1):
            return sub * (self.rows * 128) + j8 * 1024
        per: cutlass.Constexpr = self.half // 8
        return (j8 // per) * (self.half * self.kblk * 2) + sub * (self.half * 128) + (j8 % per) * 1024

    @cute.jit
    def keep(self, ring, acc, rank, warp, lane):
        """A warp's accumulators to shared memory as slabs [token][gate | up][column]: received ones first (one per
        source, this block's own in place), then the outgoing ones of every owner."""
        g, q = lane // 4, lane % 4
        wm, wk = warp % self.wm, warp // self.wm
        local = Int32(ring.toint())
        for m in cutlass.range_constexpr(self.mt):
            for h in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.wgmma):
                    j8 = 8 * (m * (self.wm // 4) + warp // 4) + 2 * (warp % 4) + h
                else:
                    j8 = wm * (2 * self.mt) + 2 * m + h
                half, within = j8 // (self.half // 8), j8 % (self.half // 8)
                owner, row = within // (self.own // 8), (within % (self.own // 8)) * 8 + g
                slot = (self.ksplit + owner) * self.wk + wk
                if owner == rank:
                    slot = rank * self.wk + wk
                at = local + 4 * (slot * self.slab + 2 * q * self.pitch + half * self.own + row)
                for t in cutlass.range_constexpr(self.tiles):
                    for v in cutlass.range_constexpr(2):
                        cu.sts1(at + 4 * (8 * t + v) * self.pitch, cu.f2i(acc[m, t, 2 * h + v]))

    @cute.jit
    def send(self, ring, bar, rank, owner, base):
        """One bulk copy: this block's slabs for ``owner`` into its received slot of this rank. ``base``: rank 0's place
        in the cluster."""
        size: cutlass.Constexpr = 4 * self.wk * self.slab
        local = Int32(ring.toint())
        to = cu.mapa(local + rank * size, base + owner)
        cu.bulk_to_block(to, local + (self.ksplit + owner) * size, size, cu.mapa(Int32(bar.toint()), base + owner))

    @cute.jit
    def finish(self, ring, out, b, rank, block, tid):
        """The owner adds the sources in (rank, warp) order and emits."""
        tile = (Int32(ring.toint()), 4 * self.pitch, 4 * self.slab)
        first = block * self.half + rank * self.own
        self.emit_tile(tile, out, self.own, self.ksplit * self.wk, first, b, tid)

    @cute.jit
    def arm(self, bar):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.wbox + self.xbox)

    @cute.jit
    def load_w(self, w0, g0, w1, g1, layout, ptr, bar, i):
        self.copy(w0, g0, layout, ptr, bar, i, cu.EVICT_FIRST)
        if cutlass.const_expr(self.halves == 2):
            self.copy(w1, g1, layout, ptr + self.wbox // 2, bar, i, cu.EVICT_FIRST)

    @cute.jit
    def hint_w(self, w0, g0, w1, g1, layout, ptr, i):
        """Fetch a box of W into L2. ``ptr``: any place in the ring, nothing is written there."""
        first, second = self.boxes(w0, g0, layout, ptr, i)[1], self.boxes(w1, g1, layout, ptr, i)[1]
        with cute.arch.elect_one():
            cute.prefetch(w0, first)
            if cutlass.const_expr(self.halves == 2):
                cute.prefetch(w1, second)

    @cute.jit
    def load_x(self, xa, gx, xlayout, ptr, bar, i, rank, block):
        """x of a stage: all of it, or this block's tokens to the same place in every sharing block."""
        if cutlass.const_expr(self.xcast == 1):
            self.copy(xa, gx, xlayout, ptr, bar, i, cu.EVICT_LAST)
        else:
            mask = Int16(self.sharing << rank)
            at = ptr + block % self.xcast * (self.slice * 128)
            for sub in cutlass.range_constexpr(self.kblk // 64):
                n = i * (self.kblk // 64) + sub
                self.copy(xa, gx, xlayout, at + sub * (self.tokens * 128), bar, n, cu.EVICT_LAST, mask)

    @cute.jit
    def boxes(self, atom, g, layout, ptr, i):
        """(shared, global) box ``i`` as a copy takes them."""
        s = cute.make_tensor(cute.recast_ptr(ptr, layout.inner, dtype=BFloat16), layout.outer)
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 3), cute.group_modes(g[None, None, None, i], 0, 3)
        )

    @cute.jit
    def copy(self, atom, g, layout, ptr, bar, i, hint: cutlass.Constexpr, mask=None):
        sp, gp = self.boxes(atom, g, layout, ptr, i)
        # cute.copy elects a lane itself
        if cutlass.const_expr(mask is None):
            cute.copy(atom, gp, sp, tma_bar_ptr=bar, cache_policy=Int64(hint))
        else:
            cute.copy(atom, gp, sp, tma_bar_ptr=bar, cache_policy=Int64(hint), mcast_mask=mask)


TilesKernel.kernel.set_name_prefix("k3_stream_projection_tiles", keep_mangled_name=False)
