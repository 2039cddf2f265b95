"""KDA decode core: everything between the input projection and o_proj of a Kimi delta attention layer, one kernel.

Short convolution + SiLU, L2 norm of q and k, the F_B product and the decay gate, beta, the delta-rule recurrence, and the
gated RMS norm; the FP32 recurrent state and the BF16 convolution history are updated in place in the stock layouts.

  grid      (cluster, heads, groups): a cluster of C blocks shares one head of one request; block c owns the 128/C value
            rows [c R, (c+1) R) of state[slot, head, v, k]. What all rows need (q, k, decay) every block computes again:
            that is cheaper than an exchange. Without clusters a block may serve up to 8 requests of its head.
  units     the tokens of the block's one request (verify), or its requests (plain decode): at most 8. Convolution, gates
            and norms are done for all units at once, so that the loop over states is a pure stream.
  early     tables, the first state rows, convolution taps and weights, F_B fragments are read before the dependency wait:
            nothing of it was written in this step.
  gates     raw = F_B f on the tensor cores: F_B rows are the M operand, the units the N operand.
  recurrence  a warp keeps ``rows_per_pass`` rows in registers, ``lanes`` lanes a row. With S the decayed state, r = S k
            and p = S q are summed by one transposing reduction (one sum per lane), then u = beta (v - r),
            o = p + u (k.q), S += u k^T. The tokens of a verify step run one after the other over the rows in registers.
            Every warp has a private ring of chunks of its rows, filled by bulk copies; warps do not meet in the loop.
  end       sums of o^2 are exchanged once over the cluster, every block finishes its own rows.

Rounding: BF16 at raw, at the stored taps (inputs) and at the output; everything else is FP32. Sums have a fixed order.
Requests whose first slot, or whose accepted slot, is <= 0 are padding: their output rows are zero, nothing is written.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import kda_core_ptx as px
from kimi_k3.kernels.contract import Contract, Parameter
from kimi_k3.kernels.kda_core_cases import HEAD, TAPS
from kimi_k3.kernels.kda_core_steps import KdaSteps

_STEP = "written at the latest by the previous step, a whole graph ago"
_TABLE = "filled before the step starts"
CONTRACT = Contract(
    kernel="k3_kda_core",
    parameters=(
        Parameter("projected", "activation"),
        Parameter("f_b", "weight", early=True),
        Parameter("conv_weight", "weight", early=True),
        Parameter("a_log", "weight", early=True),
        Parameter("dt_bias", "weight", early=True),
        Parameter("norm_weight", "weight", early=True),
        Parameter("slots", "table", early=True, reason=_TABLE),
        Parameter("accepted", "table", early=True, reason=_TABLE),
        Parameter("conv_state", "state", early=True, reason=_STEP),
        Parameter("state", "state", early=True, reason=_STEP),
        Parameter("conv_stride", "scalar"),
        Parameter("state_stride", "scalar"),
        Parameter("out", "output"),
        Parameter("requests", "scalar"),
    ),
    wait="first",
    trigger="after_wait",
)


@dataclass(frozen=True)
class Settings:
    """Geometry of one compilation."""

    cluster: int = 1
    warps: int = 8
    lanes: int = 8  #: lanes that share a state row: 8, 16 or 32
    rows_per_pass: int = 8  #: of a warp, in registers
    occupancy: int = 2  #: blocks per SM that the register budget must allow
    units: int = 1  #: plain decode: requests of a block
    stages: int = 0  #: chunks in a warp's ring; 0: as many as one request has
    bulk_store: bool = False  #: plain decode: states leave through shared memory with bulk copies
    store_hint: int = 0  #: L2 policy of the state stores, 0: none
    load_hint: int = cu.EVICT_FIRST  #: L2 policy of the state reads, 0: none
    trigger: str = "after_wait"  #: when the next kernel may start: also "entry", "end"

    @property
    def rows(self) -> int:
        return HEAD // self.cluster

    def groups(self, requests: int) -> int:
        """Blocks (or clusters) per head."""
        return -(-requests // self.units)


class KdaCore(KdaSteps):
    """The kernel. ``heads`` of this rank, ``pitch``: elements of a row of ``projected``; ``tokens`` per request.

    ``columns`` = 0: plain decode, slots [requests], ``accepted`` is not read. Otherwise slots [requests, columns] and
    accepted [requests]: the native verify scheme, tokens <= columns. ``index_bytes``: 4 or 8, of both tables.
    ``conv_width``: channels of q in the convolution history, if that holds more heads than this rank's.
    """

    def __init__(self, heads, pitch, tokens=1, columns=0, index_bytes=4, settings=None, early=True, conv_width=None):
        self.s = s = settings or Settings()
        assert s.cluster in (1, 2, 4, 8) and s.warps in (4, 8) and 1 <= tokens <= 8 and index_bytes in (4, 8)
        assert tokens <= columns if columns else tokens == 1
        assert s.units == 1 or (s.cluster == 1 and tokens == 1 and s.units <= 8)
        self.heads, self.pitch, self.tokens, self.columns, self.ib = heads, pitch, tokens, columns, index_bytes
        self.cluster, self.warps, self.rows, self.lanes, self.early = s.cluster, s.warps, s.rows, s.lanes, early
        self.width = heads * HEAD
        self.conv_width = conv_width or self.width
        self.units = tokens if tokens > 1 else s.units
        self.rpw = self.rows // self.warps  # rows per warp
        self.rpp = min(self.rpw, s.rows_per_pass)  # and pass: a chunk
        self.passes = self.rpw // self.rpp
        self.stages = max(self.passes, s.stages) if tokens == 1 else self.passes
        self.bulk = s.bulk_store and tokens == 1
        self.slots = self.rpp * self.lanes // 32  # rows per lane and pass
        assert self.slots >= 1 and 2 * self.slots <= self.lanes, f"{s}: {self.rpp} rows do not fit {self.lanes} lanes"
        self.tiles = 8 // self.warps  # m16 tiles of F_B per warp
        self.jobs = -(-3 * self.units // self.warps)  # convolution jobs per warp
        self.turns = -(-self.units // self.warps)  # units that a warp finishes

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def smem(self):
        floats = self.units * (3 * HEAD + 2 * self.rows + 1 + self.cluster)
        return self.warps * self.stages * (self.rpp * HEAD * 4 + 8) + floats * 4 + 128

    @cute.jit
    def __call__(
        self,
        projected: cute.Pointer,
        f_b: cute.Pointer,
        conv_weight: cute.Pointer,
        a_log: cute.Pointer,
        dt_bias: cute.Pointer,
        norm_weight: cute.Pointer,
        slots: cute.Pointer,
        accepted: cute.Pointer,
        conv_state: cute.Pointer,
        state: cute.Pointer,
        conv_stride: Int64,
        state_stride: Int64,
        out: cute.Pointer,
        requests: Int32,
        groups: Int32,
        stream,
    ):
        self.kernel(
            projected, f_b, conv_weight, a_log, dt_bias, norm_weight, slots, accepted, conv_state, state,
            conv_stride, state_stride, out, requests,
        ).launch(
            grid=(self.cluster, self.heads, groups),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.s.occupancy,
            preferred_smem_carveout=100,  # several blocks per SM; without it the DSL asks a GPU at compile time
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        projected: cute.Pointer,
        f_b: cute.Pointer,
        conv_weight: cute.Pointer,
        a_log: cute.Pointer,
        dt_bias: cute.Pointer,
        norm_weight: cute.Pointer,
        slots: cute.Pointer,
        accepted: cute.Pointer,
        conv_state: cute.Pointer,
        state: cute.Pointer,
        conv_stride: Int64,
        state_stride: Int64,
        out: cute.Pointer,
        requests: Int32,
    ):
        if cutlass.const_expr(self.s.trigger == "entry"):
            cu.pdl_trigger()
        tid, _, _ = cute.arch.thread_idx()
        rank, head, start = cute.arch.block_idx()
        _, _, groups = cute.arch.grid_dim()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        N: cutlass.Constexpr = self.tokens
        U: cutlass.Constexpr = self.units
        R: cutlass.Constexpr = self.rows
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        smem = cmem.SmemAllocator()
        size: cutlass.Constexpr = self.rpp * HEAD * 4
        ring = Int32(smem.allocate(self.warps * self.stages * size, 128).toint()) + warp * (self.stages * size)
        qs = Int32(smem.allocate(U * HEAD * 4, 16).toint())
        ks = Int32(smem.allocate(U * HEAD * 4, 16).toint())
        decay = Int32(smem.allocate(U * HEAD * 4, 16).toint())
        vs = Int32(smem.allocate(U * R * 4, 16).toint())
        outs = Int32(smem.allocate(U * R * 4, 16).toint())
        beta = Int32(smem.allocate(U * 4, 4).toint())
        part = Int32(smem.allocate(U * self.cluster * 4, 4).toint())  # sums of o^2 of every block
        bars = smem.allocate_array(Uint64, self.stages * self.warps) + warp * self.stages
        if lane == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(bars + i, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(not self.early):
            cu.pdl_wait()

        # ---- before the wait: tables (lane u: unit u), first state rows, weights, history
        count = Int32(1)  # states of this block
        if cutlass.const_expr(N == 1 and U > 1):
            count = cutlass.min(U, (requests - start + groups - 1) // groups)
        first, slot, taken, target = self.lookup(slots, accepted, start, groups, count, lane)
        rows = state.toint() + Int64(head * HEAD * HEAD + rank * R * HEAD + warp * self.rpp * HEAD) * 4
        for i in cutlass.range_constexpr(self.stages):
            self.fetch(i, i, count * self.passes, first, slot, lane, ring, bars, rows, state_stride)
        frags = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2, 4, 4), stride=(32, 16, 4, 1)), Uint32)
        bias = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2), stride=(2, 1)), Float32)
        taps = cute.make_rmem_tensor(cute.make_layout((4, 2), stride=(2, 1)), Uint32)
        taps.fill(0)
        weights = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Float32)
        self.gate_weights(frags, bias, lane, warp, head, f_b, dt_bias)
        # row of unit u in projected and out: base + u step, for u <= last
        base, step, last = start * N, Int32(1), Int32(N - 1)
        if cutlass.const_expr(N == 1):
            step, last = groups, count - 1
        inputs = projected.toint() + Int64(base) * (self.pitch * 2)
        if cutlass.const_expr(self.jobs == 1):
            if warp < 3 * U:
                self.conv_weights(weights, lane, warp, rank, head, conv_weight)
            if cutlass.const_expr(N == 1):
                self.job_taps(taps, lane, warp, rank, head, first, taken, conv_state, conv_stride, inputs, step, 0, TAPS)
        gamma = cute.make_rmem_tensor((4,), Float32)
        norm_words = cu.ldg4(norm_weight.toint() + Int64(rank * R + cutlass.min(4 * lane, R - 4)) * 4)
        for c in cutlass.range_constexpr(4):
            gamma[c] = cu.i2f(norm_words[c])
        scale = cu.ex2_approx(cu.i2f(cu.ldg1(a_log.toint() + Int64(head * 4))) * Float32(cu.LOG2E))
        if cutlass.const_expr(self.early):
            cu.pdl_wait()
        if cutlass.const_expr(self.s.trigger == "after_wait"):
            cu.pdl_trigger()

        # ---- all units: inputs, convolution, gates
        fa = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Uint32)
        unit = cutlass.min(lane // 4, last)  # other columns are computed and dropped
        for i in cutlass.range_constexpr(4):
            at = Int64(unit * step) * self.pitch + (4 * self.width + 32 * i + 8 * (lane % 4))
            fa_words = cu.ldg4(inputs + at * 2)
            for c in cutlass.range_constexpr(4):
                fa[i, c] = fa_words[c]
        if (warp == self.warps - 1) & (lane <= last):
            at = Int64(lane * step) * self.pitch + (4 * self.width + HEAD + head)
            px.sts1(beta + 4 * lane, cu.f2i(cu.sigmoid(px.ldg_bf16(inputs + at * 2))))
        for j in cutlass.range_constexpr(self.jobs):
            job = warp + j * self.warps
            if job < 3 * U:
                if cutlass.const_expr(self.jobs > 1):
                    self.conv_weights(weights, lane, job, rank, head, conv_weight)
                begin: cutlass.Constexpr = TAPS if N == 1 and self.jobs == 1 else 0
                self.job_taps(taps, lane, job, rank, head, first, taken, conv_state, conv_stride, inputs, step, begin, 4)
                self.convolve(taps, weights, lane, job, qs, ks, vs)
                if cutlass.const_expr(N == 1 and self.cluster == 1):  # nobody else reads these channels
                    self.shift(taps, lane, job, rank, head, first, taken, conv_state, conv_stride, inputs)
        z = cute.make_rmem_tensor(cute.make_layout((self.turns, 2), stride=(2, 1)), Uint32)
        mine = (warp + self.warps - 3) % self.warps  # unit 0 goes to a warp that had no convolution
        for n in cutlass.range_constexpr(self.turns):
            unit = cutlass.min(mine + n * self.warps, last)
            at = Int64(unit * step) * self.pitch + (3 * self.width + head * HEAD + rank * R + cutlass.min(4 * lane, R - 4))
            z_words = px.ldg2(inputs + at * 2)
            z[n, 0], z[n, 1] = z_words[0], z_words[1]
        self.gates(frags, bias, fa, scale, lane, warp, decay)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # the other blocks run: their shared memory may be written

        # ---- recurrence
        vectors: cutlass.Constexpr = 32 // self.lanes
        S = cute.make_rmem_tensor(cute.make_layout((self.slots, vectors, 4), stride=(4 * vectors, 4, 1)), Float32)
        S.fill(0.0)
        for t in cutlass.range(count, unroll=1):
            live = cute.arch.shuffle_sync(first, t)
            to = cute.arch.shuffle_sync(target, t)
            for p in cutlass.range_constexpr(self.passes):
                local = (p * self.warps + warp) * self.rpp  # first of this warp's rows
                chunk = t * self.passes + p
                stage = chunk % self.stages
                cu.wait_uniform(bars + stage, (chunk // self.stages) % 2)
                if live > 0:
                    self.load_rows(S, lane, ring + stage * size)
                if cutlass.const_expr(U > 1 and N == 1 and not self.bulk):
                    cu.fence_async_shared()
                    cute.arch.sync_warp()
                    after = chunk + self.stages
                    self.fetch(after, stage, count * self.passes, first, slot, lane, ring, bars, rows, state_stride)
                if live > 0:
                    if cutlass.const_expr(N == 1):
                        self.advance(S, t, local, lane, qs, ks, decay, vs, beta, outs)
                        if cutlass.const_expr(self.bulk):
                            self.send_rows(S, lane, ring + stage * size, rows, to, p, state_stride)
                        else:
                            self.store_rows(S, to, local, lane, rank, head, state, state_stride)
                    else:
                        for token in cutlass.range(N, unroll=1):
                            self.advance(S, token, local, lane, qs, ks, decay, vs, beta, outs)
                            to = cute.arch.shuffle_sync(target, token)
                            self.store_rows(S, to, local, lane, rank, head, state, state_stride)
                if cutlass.const_expr(U > 1 and self.bulk):  # refill the stage whose rows left one chunk ago
                    if chunk > 0:
                        if lane == 0:
                            px.bulk_wait(1, True)
                        self.fetch(
                            chunk - 1 + self.stages, (chunk - 1) % self.stages, count * self.passes, first, slot, lane,
                            ring, bars, rows, state_stride,
                        )  # fmt: skip
        if cutlass.const_expr(self.s.trigger == "end"):
            cu.pdl_trigger()
        cute.arch.sync_threads()
        row = out.toint() + (Int64(base) * self.width + (head * HEAD + rank * R)) * 2
        self.norm(outs, z, gamma, part, mine, lane, rank, first, row, step, last)
        if cutlass.const_expr(self.bulk):
            if lane == 0:
                px.bulk_wait(0, False)
        if cutlass.const_expr(self.cluster > 1 or N > 1):  # every block has read the history that is shifted now
            if warp < 3:
                self.shift(taps, lane, warp, rank, head, first, taken, conv_state, conv_stride, inputs)

    @cute.jit
    def lookup(self, slots, accepted, start, groups, count, lane):
        """Lane u: slot of unit u's history (0: padding), of its initial state, tokens accepted before, target slot."""
        columns: cutlass.Constexpr = max(1, self.columns)
        request = start
        if cutlass.const_expr(self.tokens == 1):
            request = start + cutlass.min(lane, count - 1) * groups
        table = slots.toint() + Int64(request * columns * self.ib)
        taken = Int32(1)
        if cutlass.const_expr(self.columns > 0):
            taken = Int32(cu.ldg1(accepted.toint() + Int64(request * self.ib)))
            taken = cutlass.max(1, cutlass.min(taken, self.columns))
        first = Int32(cu.ldg1(table))
        slot, target = first, first
        if cutlass.const_expr(self.columns > 0):
            slot = Int32(cu.ldg1(table + Int64((taken - 1) * self.ib)))
            if slot <= 0:
                first = Int32(0)
        if cutlass.const_expr(self.tokens > 1):
            target = Int32(cu.ldg1(table + Int64(cutlass.min(lane, self.tokens - 1) * self.ib)))
        elif cutlass.const_expr(self.units > 1):
            if lane >= count:  # beyond the last request: neither its history nor its state exists
                first = Int32(0)
        return first, slot, taken, target

    @cute.jit
    def fetch(self, chunk, stage, chunks, first, slot, lane, ring, bars, rows, state_stride):
        """Start the copy of a chunk of this warp's rows into a stage of its ring; a padding unit's chunk is empty."""
        size: cutlass.Constexpr = self.rpp * HEAD * 4
        if chunk < chunks:
            unit, p = chunk // self.passes, chunk % self.passes
            live, source = cute.arch.shuffle_sync(first, unit), cute.arch.shuffle_sync(slot, unit)
            if lane == 0:
                if live > 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, size)
                    at = Int64(source) * state_stride * 4 + Int64(p * self.warps * size)
                    px.bulk_load(ring + stage * size, rows + at, size, bars + stage, self.s.load_hint)
                else:
                    cute.arch.mbarrier_arrive(bars + stage)

    @cute.jit
    def norm(self, outs, z, gamma, part, mine, lane, rank, first, row, step, last):
        """Gated RMS norm over the head's 128 outputs; warp ``mine`` + n warps does unit n. Padding units get zeros."""
        for n in cutlass.range_constexpr(self.turns):
            t = mine + n * self.warps
            if t <= last:
                words = cu.lds4(outs + (t * self.rows + cutlass.min(4 * lane, self.rows - 4)) * 4)
                o = [cu.i2f(words[c]) for c in range(4)]
                total = cute.arch.warp_reduction_sum(px.select(Int32(4 * lane < self.rows), px.dot4(o, o), Float32(0)))
                if cutlass.const_expr(self.cluster > 1):
                    if lane < self.cluster:
                        px.st_peer(part + (t * self.cluster + rank) * 4, lane, total)
                else:
                    self.finish(outs, z, gamma, total, n, t, lane, first, row, step)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            for n in cutlass.range_constexpr(self.turns):
                t = mine + n * self.warps
                if t <= last:
                    total = Float32(0)
                    for c in cutlass.range_constexpr(self.cluster):
                        total += px.lds1(part + (t * self.cluster + c) * 4)
                    self.finish(outs, z, gamma, total, n, t, lane, first, row, step)


KdaCore.kernel.set_name_prefix("k3_kda_core", keep_mangled_name=False)
