"""KDA decode core: everything between the input projection and o_proj of a Kimi delta attention layer, one kernel.

Short convolution + SiLU, L2 norm of q and k, the F_B product and the decay gate, beta, the delta-rule recurrence, and the
gated RMS norm; the FP32 recurrent state and the BF16 convolution history are updated in place in the stock layouts.

  grid      (cluster, heads, requests): a cluster of C blocks shares one head of one request; block c owns the 128/C value
            rows [c R, (c+1) R) of the state, state[slot, head, v, k]. Everything that all rows need (q, k, decay) is
            computed by every block again: that is cheaper than an exchange, and F_B rows are an L2 hit after the first.
  early     tables, state rows (bulk copies into shared memory), convolution taps and weights, F_B fragments are read
            before the dependency wait: the state was last written a whole step ago, the rest never changes in a step.
  gates     raw = F_B f on the tensor cores: F_B rows are the M operand, the step's tokens (up to 8) the N operand.
  recurrence a warp owns P rows a pass, its 32 lanes 4 keys each. With S the decayed state, r = S k and p = S q are
            summed by one transposing reduction (one value per lane), then u = beta (v - r), o = p + u (k.q),
            S += u k^T. Tokens of a verify step run one after the other over the rows in registers.
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

HEAD = 128  #: key and value width of a head; one state row is 512 bytes
TAPS = 3  #: convolution history
NORM_EPS, L2_EPS, LOWER_BOUND = 1e-5, 1e-6, -5.0

_STEP = "written at the latest by the previous step, a whole graph ago"
CONTRACT = Contract(
    kernel="kda_core",
    parameters=(
        Parameter("projected", "activation"),
        Parameter("f_b", "weight", early=True),
        Parameter("conv_weight", "weight", early=True),
        Parameter("a_log", "weight", early=True),
        Parameter("dt_bias", "weight", early=True),
        Parameter("norm_weight", "weight", early=True),
        Parameter("slots", "table", early=True, reason="filled before the step starts"),
        Parameter("accepted", "table", early=True, reason="filled before the step starts"),
        Parameter("conv_state", "state", early=True, reason=_STEP),
        Parameter("state", "state", early=True, reason=_STEP),
        Parameter("conv_stride", "scalar"),
        Parameter("state_stride", "scalar"),
        Parameter("out", "output"),
    ),
    wait="first",
    trigger="after_wait",
)


@dataclass(frozen=True)
class Settings:
    """Geometry of one compilation. ``occupancy``: blocks per SM that the register budget must allow."""

    cluster: int = 1
    warps: int = 8
    occupancy: int = 2
    rows_per_pass: int = 8
    store_hint: int = 0  #: L2 policy of the state stores, 0 = none
    load_hint: int = cu.EVICT_FIRST  #: L2 policy of the state reads, 0 = none
    trigger: str = "after_wait"  #: when the next kernel may start: also "entry", "end"

    @property
    def rows(self) -> int:
        return HEAD // self.cluster


class KdaCore:
    """The kernel. ``heads`` of this rank, ``pitch``: elements of a row of ``projected``; ``tokens`` per request.

    ``columns`` = 0: plain decode, slots [requests], ``accepted`` is not read. Otherwise slots [requests, columns] and
    accepted [requests]: the native verify scheme, tokens <= columns. ``index_bytes``: 4 or 8, of both tables.
    ``conv_width``: channels of q in the convolution history, if that holds more heads than this rank's.
    """

    def __init__(
        self, heads, pitch, tokens=1, columns=0, index_bytes=4, settings=Settings(), early=True, conv_width=None
    ):
        s = settings
        assert s.cluster in (1, 2, 4, 8) and s.warps in (4, 8) and 1 <= tokens <= 8 and index_bytes in (4, 8)
        assert (columns == 0 and tokens == 1) or tokens <= columns
        self.heads, self.pitch, self.tokens, self.columns, self.ib = heads, pitch, tokens, columns, index_bytes
        self.cluster, self.warps, self.rows, self.s, self.early = s.cluster, s.warps, s.rows, s, early
        self.width = heads * HEAD
        self.conv_width = conv_width or self.width
        self.rpw = self.rows // self.warps  # rows per warp
        self.rpp = min(self.rpw, s.rows_per_pass)  # rows per warp and pass
        self.passes = self.rpw // self.rpp
        self.bits = (2 * self.rpp).bit_length() - 1  # halving steps of the transposing reduction
        self.tiles = 8 // self.warps  # m16 tiles of F_B per warp
        self.jobs = -(-3 * tokens // self.warps)  # convolution jobs per warp

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def smem(self):
        floats = self.tokens * (3 * HEAD + 2 * self.rows + 2 + self.cluster)
        return self.rows * HEAD * 4 + floats * 4 + 8 * self.passes + 256

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
        stream,
    ):
        self.kda_core(
            projected, f_b, conv_weight, a_log, dt_bias, norm_weight, slots, accepted, conv_state, state,
            conv_stride, state_stride, out,
        ).launch(
            grid=(self.cluster, self.heads, requests),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.s.occupancy,
            preferred_smem_carveout=100,  # without it the DSL asks a GPU, and several blocks must fit an SM
        )  # fmt: skip

    @cute.kernel
    def kda_core(
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
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank, head, req = cute.arch.block_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        if cutlass.const_expr(self.s.trigger == "entry"):
            cu.pdl_trigger()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(not self.early):
            cu.pdl_wait()
        taken = Int32(1)  # tokens accepted in the previous step
        table = slots.toint() + Int64(req * self.ib)
        if cutlass.const_expr(self.columns > 0):
            taken = Int32(cu.ldg1(accepted.toint() + Int64(req * self.ib)))
            taken = cutlass.max(1, cutlass.min(taken, self.columns))
            table = slots.toint() + Int64(req * (self.columns * self.ib))
        first = Int32(cu.ldg1(table))
        slot = first
        if cutlass.const_expr(self.columns > 0):
            slot = Int32(cu.ldg1(table + Int64((taken - 1) * self.ib)))
        row = out.toint() + Int64((req * self.tokens) * self.width + head * HEAD + rank * self.rows) * 2
        if (slot > 0) & (first > 0):
            conv = conv_state.toint() + Int64(first) * conv_stride * 2 + Int64(head * HEAD) * 2
            source = (
                state.toint() + (Int64(slot) * state_stride + Int64(head * HEAD * HEAD + rank * self.rows * HEAD)) * 4
            )
            inputs = projected.toint() + Int64(req * self.tokens) * (self.pitch * 2)
            self.run(
                lane, warp, rank, head, taken, table, conv, source, inputs, f_b.toint(), conv_weight.toint(),
                a_log.toint(), dt_bias.toint(), norm_weight.toint(), state.toint(), state_stride, row,
            )  # fmt: skip
        else:
            if cutlass.const_expr(self.early):
                cu.pdl_wait()
            if cutlass.const_expr(self.s.trigger != "entry"):
                cu.pdl_trigger()
            for i in range(tid, self.tokens * (self.rows // 4), self.threads):
                at = Int64(i // (self.rows // 4)) * (self.width * 2) + Int64(i % (self.rows // 4)) * 8
                px.stg2(row + at, [Uint32(0), Uint32(0)])
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.cluster_wait()

    @cute.jit
    def run(
        self, lane, warp, rank, head, taken, table, conv, source, inputs, f_b, conv_weight, a_log, dt_bias,
        norm_weight, state, state_stride, row,
    ):  # fmt: skip
        """The work of one block for a request that lives."""
        N: cutlass.Constexpr = self.tokens
        R: cutlass.Constexpr = self.rows
        chunk: cutlass.Constexpr = self.warps * self.rpp * HEAD * 4  # bytes of state per pass
        smem = cmem.SmemAllocator()
        held = Int32(smem.allocate(R * HEAD * 4, 128).toint())
        flat = cute.make_layout((N, HEAD), stride=(HEAD, 1))
        qs = smem.allocate_tensor(Float32, flat, 16)
        ks = smem.allocate_tensor(Float32, flat, 16)
        decay = smem.allocate_tensor(Float32, flat, 16)
        vs = smem.allocate_tensor(Float32, cute.make_layout((N, R), stride=(R, 1)), 16)
        outs = smem.allocate_tensor(Float32, cute.make_layout((N, R), stride=(R, 1)), 16)
        beta = smem.allocate_tensor(Float32, cute.make_layout(N), 16)
        target = smem.allocate_tensor(Int32, cute.make_layout(N), 16)  # slot of every token's state
        part = smem.allocate_tensor(Float32, cute.make_layout((N, self.cluster), stride=(self.cluster, 1)), 16)
        bars = smem.allocate_array(Uint64, self.passes)

        # ---- before the wait: state, weights, history
        if warp == self.warps - 1:
            if lane == 0:
                for p in cutlass.range_constexpr(self.passes):
                    cute.arch.mbarrier_init(bars + p, 1)
                cute.arch.mbarrier_init_fence()
                for p in cutlass.range_constexpr(self.passes):
                    cute.arch.mbarrier_arrive_and_expect_tx(bars + p, chunk)
                    px.bulk_load(held + p * chunk, source + Int64(p * chunk), chunk, bars + p, self.s.load_hint)
            if lane < N:
                target[lane] = Int32(cu.ldg1(table + Int64(lane * self.ib)))
        g, q = lane // 4, lane % 4
        frags = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2, 4, 4), stride=(32, 16, 4, 1)), Uint32)
        bias = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2), stride=(2, 1)), Float32)
        for i in cutlass.range_constexpr(self.tiles):
            for h in cutlass.range_constexpr(2):
                gate_row = head * HEAD + (warp * self.tiles + i) * 16 + g + 8 * h
                for step in cutlass.range_constexpr(4):
                    words = cu.ldg4(f_b + Int64(gate_row * 256 + step * 64 + q * 16))
                    for c in cutlass.range_constexpr(4):
                        frags[i, h, step, c] = words[c]
                bias[i, h] = cu.i2f(cu.ldg1(dt_bias + Int64(gate_row * 4)))
        scale_a = cu.ex2_approx(cu.i2f(cu.ldg1(a_log + Int64(head * 4))) * Float32(cu.LOG2E))
        taps = cute.make_rmem_tensor(cute.make_layout((4, 2), stride=(2, 1)), Uint32)
        weights = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Float32)
        if cutlass.const_expr(self.jobs == 1):
            if warp < 3 * N:
                self.conv_weights(weights, lane, warp, rank, head, conv_weight)
                if cutlass.const_expr(N == 1):
                    self.conv_taps(taps, lane, warp, rank, head, taken, conv, inputs, 0, TAPS)
        if cutlass.const_expr(self.early):
            cu.pdl_wait()
        if cutlass.const_expr(self.s.trigger == "after_wait"):
            cu.pdl_trigger()

        # ---- this step's inputs
        fa = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Uint32)
        for step in cutlass.range_constexpr(4):
            token = cutlass.min(g, N - 1)  # columns beyond N are computed and dropped
            words = cu.ldg4(inputs + Int64(token * self.pitch + 4 * self.width + 32 * step + 8 * q) * 2)
            for c in cutlass.range_constexpr(4):
                fa[step, c] = words[c]
        if warp == self.warps - 1:
            if lane < N:
                b = px.ldg_bf16(inputs + Int64(lane * self.pitch + 4 * self.width + HEAD + head) * 2)
                beta[lane] = cu.sigmoid(b)
        for j in cutlass.range_constexpr(self.jobs):
            job = warp + j * self.warps
            if job < 3 * N:
                if cutlass.const_expr(self.jobs > 1):
                    self.conv_weights(weights, lane, job, rank, head, conv_weight)
                self.conv_taps(taps, lane, job, rank, head, taken, conv, inputs, TAPS if N == 1 else 0, 4)
                self.convolve(taps, weights, lane, job, rank, qs, ks, vs)
        for i in cutlass.range_constexpr(self.tiles):
            acc = cute.make_rmem_tensor(cute.make_layout((2, 4), stride=(4, 1)), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(4):
                for h in cutlass.range_constexpr(2):
                    a = (frags[i, 0, step, 2 * h], frags[i, 1, step, 2 * h], frags[i, 0, step, 2 * h + 1],
                         frags[i, 1, step, 2 * h + 1])  # fmt: skip
                    d = cu.mma_bf16(a, (fa[step, 2 * h], fa[step, 2 * h + 1]), [acc[h, v] for v in range(4)])
                    for v in cutlass.range_constexpr(4):
                        acc[h, v] = d[v]
            for v in cutlass.range_constexpr(4):
                token = 2 * q + v % 2
                if token < N:
                    raw, _ = cu.unpack_bf16(cu.pack_bf16(acc[0, v] + acc[1, v], Float32(0)))
                    gate = cu.sigmoid(scale_a * (raw + bias[i, v // 2])) * Float32(LOWER_BOUND * cu.LOG2E)
                    decay[token, (warp * self.tiles + i) * 16 + g + 8 * (v // 2)] = cu.ex2_approx(gate)
        turns: cutlass.Constexpr = -(-N // self.warps)  # tokens that this warp finishes
        active: cutlass.Constexpr = R // 4
        column = cutlass.min(lane, active - 1) * 4
        z = cute.make_rmem_tensor(cute.make_layout((turns, 2), stride=(2, 1)), Uint32)
        for n in cutlass.range_constexpr(turns):
            t = cutlass.min(warp + n * self.warps, N - 1)
            at = t * self.pitch + 3 * self.width + head * HEAD + rank * R + column
            words = px.ldg2(inputs + Int64(at) * 2)
            z[n, 0], z[n, 1] = words[0], words[1]
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # the other blocks run: their shared memory may be written

        # ---- recurrence
        S = cute.make_rmem_tensor(cute.make_layout((self.rpp, 4), stride=(4, 1)), Float32)
        for p in cutlass.range_constexpr(self.passes):
            local = (p * self.warps + warp) * self.rpp  # first row of this warp's pass
            cu.wait_uniform(bars + p, 0)
            for m in cutlass.range_constexpr(self.rpp):
                words = cu.lds4(held + (local + m) * 512 + lane * 16)
                for c in cutlass.range_constexpr(4):
                    S[m, c] = cu.i2f(words[c])
            if cutlass.const_expr(N == 1):
                self.advance(S, 0, local, lane, qs, ks, decay, vs, beta, outs)
                self.store(S, target[0], local, lane, rank, head, state, state_stride)
            else:
                for t in cutlass.range(N, unroll=1):
                    self.advance(S, t, local, lane, qs, ks, decay, vs, beta, outs)
                    self.store(S, target[t], local, lane, rank, head, state, state_stride)

        if cutlass.const_expr(self.s.trigger == "end"):
            cu.pdl_trigger()

        # ---- gated RMS norm over the head's 128 outputs
        cute.arch.sync_threads()
        for n in cutlass.range_constexpr(turns):
            t = warp + n * self.warps
            if t < N:
                values = [outs[t, column + c] for c in range(4)]
                total = px.select(Int32(lane < active), px.dot4(values, values), Float32(0))
                total = cute.arch.warp_reduction_sum(total)
                if cutlass.const_expr(self.cluster > 1):
                    if lane < self.cluster:
                        px.st_peer(Int32((part.iterator + (t * self.cluster + rank)).toint()), lane, total)
                else:
                    self.finish(outs, z, norm_weight, total, n, t, rank, lane, row)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()  # also: every block of the head has read the history that rank 0 now shifts
            for n in cutlass.range_constexpr(turns):
                t = warp + n * self.warps
                if t < N:
                    total = Float32(0)
                    for c in cutlass.range_constexpr(self.cluster):
                        total += part[t, c]
                    self.finish(outs, z, norm_weight, total, n, t, rank, lane, row)
        self.shift(taps, lane, warp, rank, head, taken, conv, inputs)

    @cute.jit
    def channel(self, lane, tensor, rank):
        """First of this lane's 4 channels of tensor 0, 1, 2 = q, k, v inside the head; v: only this block's rows."""
        at = 4 * lane
        if tensor == 2:
            at = rank * self.rows + cutlass.min(at, self.rows - 4)
        return at

    @cute.jit
    def conv_weights(self, weights, lane, job, rank, head, conv_weight):
        tensor = job % 3
        at = Int64(tensor * 4 * self.width + head * HEAD + self.channel(lane, tensor, rank)) * 4
        for j in cutlass.range_constexpr(4):
            words = cu.ldg4(conv_weight + at + Int64(j * self.width * 4))
            for c in cutlass.range_constexpr(4):
                weights[j, c] = cu.i2f(words[c])

    @cute.jit
    def conv_taps(
        self, taps, lane, job, rank, head, taken, conv, inputs, begin: cutlass.Constexpr, end: cutlass.Constexpr
    ):
        """Pre-convolution inputs of job (token, tensor): tap j is input token - 3 + j, from the history or this step."""
        token, tensor = job // 3, job % 3
        at = self.channel(lane, tensor, rank)
        old = conv + Int64((taken - 1 + token) * (3 * self.conv_width) + tensor * self.conv_width + at) * 2
        new = inputs + Int64((token - TAPS) * self.pitch + tensor * self.width + head * HEAD + at) * 2
        for j in cutlass.range_constexpr(begin, end):
            source = old + Int64(j * 3 * self.conv_width * 2)
            if cutlass.const_expr(j == TAPS):
                source = new + Int64(j * self.pitch * 2)
            elif cutlass.const_expr(self.tokens > 1):
                if token + j >= TAPS:
                    source = new + Int64(j * self.pitch * 2)
            words = px.ldg2(source)
            taps[j, 0], taps[j, 1] = words[0], words[1]

    @cute.jit
    def convolve(self, taps, weights, lane, job, rank, qs, ks, vs):
        token, tensor = job // 3, job % 3
        y = cute.make_rmem_tensor((4,), Float32)
        y.fill(0.0)
        for j in cutlass.range_constexpr(4):
            for w in cutlass.range_constexpr(2):
                lo, hi = cu.unpack_bf16(taps[j, w])
                y[2 * w] = px.fma(weights[j, 2 * w], lo, y[2 * w])
                y[2 * w + 1] = px.fma(weights[j, 2 * w + 1], hi, y[2 * w + 1])
        for c in cutlass.range_constexpr(4):
            y[c] = y[c] * cu.sigmoid(y[c])
        if tensor == 2:
            if 4 * lane < self.rows:
                for c in cutlass.range_constexpr(4):
                    vs[token, 4 * lane + c] = y[c]
        else:
            total = cute.arch.warp_reduction_sum(px.dot4(y, y))
            norm = cu.rsqrt_approx(total + Float32(L2_EPS))
            if tensor == 0:
                for c in cutlass.range_constexpr(4):
                    qs[token, 4 * lane + c] = y[c] * norm * Float32(HEAD**-0.5)
            else:
                for c in cutlass.range_constexpr(4):
                    ks[token, 4 * lane + c] = y[c] * norm

    @cute.jit
    def advance(self, S, t, local, lane, qs, ks, decay, vs, beta, outs):
        """One token over the rpp rows in registers: decay, both dot products, delta-rule update, outputs."""
        P: cutlass.Constexpr = self.rpp
        dup: cutlass.Constexpr = 5 - self.bits  # lane bits that hold copies after the halving steps
        kk = [ks[t, 4 * lane + c] for c in range(4)]
        qq = [qs[t, 4 * lane + c] for c in range(4)]
        dd = [decay[t, 4 * lane + c] for c in range(4)]
        kq = cute.arch.warp_reduction_sum(px.dot4(kk, qq))
        sums = cute.make_rmem_tensor((2 * P,), Float32)  # r of every row, then p of every row
        for m in cutlass.range_constexpr(P):
            for c in cutlass.range_constexpr(4):
                S[m, c] = S[m, c] * dd[c]
            sums[m] = px.dot4([S[m, c] for c in range(4)], kk)
            sums[P + m] = px.dot4([S[m, c] for c in range(4)], qq)
        for step in cutlass.range_constexpr(self.bits):  # lane bit 4 chooses r or p, the next ones the row
            half: cutlass.Constexpr = (2 * P) >> (step + 1)
            mask: cutlass.Constexpr = 16 >> step
            upper = lane & mask
            for i in cutlass.range_constexpr(half):
                send = px.select(upper, sums[i], sums[half + i])
                keep = px.select(upper, sums[half + i], sums[i])
                sums[i] = keep + cute.arch.shuffle_sync_bfly(send, offset=mask)
        total = sums[0]
        for b in cutlass.range_constexpr(dup):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << b)
        mine = local + ((lane & 15) >> dup)
        u = (vs[t, mine] - total) * beta[t]
        o = px.fma(cute.arch.shuffle_sync_bfly(u, offset=16), kq, total)
        if (lane >= 16) & ((lane & ((1 << dup) - 1)) == 0):
            outs[t, mine] = o
        for m in cutlass.range_constexpr(P):
            um = cute.arch.shuffle_sync(u, m << dup)
            for c in cutlass.range_constexpr(4):
                S[m, c] = px.fma(um, kk[c], S[m, c])

    @cute.jit
    def store(self, S, slot, local, lane, rank, head, state, state_stride):
        if slot > 0:
            at = Int64((head * HEAD + rank * self.rows + local) * HEAD + 4 * lane)
            base = state + (Int64(slot) * state_stride + at) * 4
            for m in cutlass.range_constexpr(self.rpp):
                words = [cu.f2i(S[m, c]) for c in range(4)]
                if cutlass.const_expr(self.s.store_hint != 0):
                    px.stg4_hint(base + Int64(m * 512), words, self.s.store_hint)
                else:
                    cu.stg4(base + Int64(m * 512), words)

    @cute.jit
    def finish(self, outs, z, norm_weight, total, n: cutlass.Constexpr, t, rank, lane, row):
        """out = o * rsqrt(mean(o^2) + eps) * norm_weight * sigmoid(z), 4 columns of this block a lane."""
        rstd = cu.rsqrt_approx(total * Float32(1.0 / HEAD) + Float32(NORM_EPS))
        if 4 * lane < self.rows:
            gamma = cu.ldg4(norm_weight + Int64(rank * self.rows + 4 * lane) * 4)
            y = [Float32(0)] * 4
            for w in cutlass.range_constexpr(2):
                lo, hi = cu.unpack_bf16(z[n, w])
                for c, gate in ((2 * w, lo), (2 * w + 1, hi)):
                    y[c] = outs[t, 4 * lane + c] * rstd * cu.i2f(gamma[c]) * cu.sigmoid(gate)
            px.stg2(row + Int64(t * self.width + 4 * lane) * 2, [cu.pack_bf16(y[0], y[1]), cu.pack_bf16(y[2], y[3])])

    @cute.jit
    def shift(self, taps, lane, warp, rank, head, taken, conv, inputs):
        """The history becomes [C[a], C[a + 1], x_0 .. x_{N-1}], a = tokens accepted; q and k by block 0, v by owners."""
        if (warp == 2) & (4 * lane < self.rows) | (warp < 2) & (rank == 0):
            at = self.channel(lane, warp, rank)
            base = conv + Int64(warp * self.conv_width + at) * 2
            new = inputs + Int64(warp * self.width + head * HEAD + at) * 2
            pitch: cutlass.Constexpr = 3 * self.conv_width * 2
            if cutlass.const_expr(self.tokens > 1):  # one token: still in registers
                for j in cutlass.range_constexpr(2):
                    words = px.ldg2(base + Int64((taken + j) * pitch))
                    taps[1 + j, 0], taps[1 + j, 1] = words[0], words[1]
            px.stg2(base, [taps[1, 0], taps[1, 1]])
            px.stg2(base + Int64(pitch), [taps[2, 0], taps[2, 1]])
            if cutlass.const_expr(self.tokens == 1):
                px.stg2(base + Int64(2 * pitch), [taps[3, 0], taps[3, 1]])
            else:
                for t in cutlass.range_constexpr(self.tokens):
                    px.stg2(base + Int64((2 + t) * pitch), px.ldg2(new + Int64(t * self.pitch * 2)))
