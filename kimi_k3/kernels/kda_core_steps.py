"""KDA decode core: the steps of one request inside a block, as methods of the kernel class of ``kda_core``."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
# ruff: noqa: SIM102 - a static condition cannot be joined with a dynamic one
from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import kda_core_ptx as px
from kimi_k3.kernels.kda_core_cases import HEAD, L2_EPS, LOWER_BOUND, NORM_EPS, TAPS


class KdaSteps:
    """Geometry (``heads``, ``width``, ``rows``, ``tokens``, ``warps`` ...) is set by ``KdaCore``."""

    # --------------------------------------------------------------------------------------------- tables and copies

    @cute.jit
    def padding(self, where, mem, at_head, req, next_first, next_slot):
        """Zero output rows; nothing else is touched."""
        tid, lane, warp, rank, head = where
        held, bars = mem[0], mem[9]
        state, state_stride, out, offset = at_head[3], at_head[5], at_head[6], at_head[7]
        quads: cutlass.Constexpr = self.rows // 4
        row = out.toint() + Int64(Int64(req * self.tokens) * self.width + head * HEAD + rank * self.rows) * 2
        for i in range(tid, self.tokens * quads, self.threads):
            px.stg2(row + Int64(i // quads) * (self.width * 2) + Int64(i % quads) * 8, [Uint32(0), Uint32(0)])
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.s.resident > 0):
            cu.fence_async_shared()
            cute.arch.sync_warp()
            if next_first > 0:
                for p in cutlass.range_constexpr(self.passes):
                    self.fetch(p, next_slot, lane, warp, held, bars, state.toint() + offset, state_stride)

    @cute.jit
    def lookup(self, slots, accepted, req):
        """(slot of the history or 0 for padding, slot of the initial state, tokens accepted in the previous step)."""
        taken = Int32(1)
        columns: cutlass.Constexpr = max(1, self.columns)
        table = slots.toint() + Int64(req * columns * self.ib)
        if cutlass.const_expr(self.columns > 0):
            taken = Int32(cu.ldg1(accepted.toint() + Int64(req * self.ib)))
            taken = cutlass.max(1, cutlass.min(taken, self.columns))
        first = Int32(cu.ldg1(table))
        slot = first
        if cutlass.const_expr(self.columns > 0):
            slot = Int32(cu.ldg1(table + Int64((taken - 1) * self.ib)))
            if slot <= 0:
                first = Int32(0)
        return first, slot, taken

    @cute.jit
    def fetch(self, p: cutlass.Constexpr, slot, lane, warp, held, bars, state, state_stride):
        """Start the copy of this warp's rows of pass ``p`` to shared memory."""
        size: cutlass.Constexpr = self.rpp * HEAD * 4
        if lane == 0:
            at = (p * self.warps + warp) * size
            cute.arch.mbarrier_arrive_and_expect_tx(bars + p, size)
            px.bulk_load(
                held + at, state + Int64(slot) * state_stride * 4 + Int64(at), size, bars + p, self.s.load_hint
            )

    # ------------------------------------------------------------------------------------------------ convolution

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
            words = cu.ldg4(conv_weight.toint() + at + Int64(j * self.width * 4))
            for c in cutlass.range_constexpr(4):
                weights[j, c] = cu.i2f(words[c])

    @cute.jit
    def conv_taps(
        self, taps, lane, job, rank, head, taken, conv, inputs, begin: cutlass.Constexpr, end: cutlass.Constexpr
    ):
        """Convolution inputs of job (token, tensor): tap j is input token - 3 + j, from the history or this step."""
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
    def convolve(self, taps, weights, lane, job, qs, ks, vs):
        """Convolution and SiLU of 4 channels a lane; q and k normalised over the head, q scaled. To shared memory."""
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
                cu.sts4(vs + (token * self.rows + 4 * lane) * 4, [cu.f2i(y[c]) for c in range(4)])
        else:
            total = cute.arch.warp_reduction_sum(px.dot4(y, y))
            norm = cu.rsqrt_approx(total + Float32(L2_EPS))
            norm = norm * px.select(Int32(tensor == 0), Float32(HEAD**-0.5), Float32(1.0))
            to = qs
            if tensor == 1:
                to = ks
            cu.sts4(to + (token * HEAD + 4 * lane) * 4, [cu.f2i(y[c] * norm) for c in range(4)])

    @cute.jit
    def shift(self, taps, lane, warp, rank, head, taken, conv, inputs):
        """The history becomes [C[a], C[a + 1], x_0 .. x_{N-1}], a = tokens accepted; q, k by block 0, v by owners."""
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

    # ------------------------------------------------------------------------------------------------------ gates

    @cute.jit
    def gate_weights(self, frags, bias, lane, warp, head, f_b, dt_bias):
        """Operand fragments of this warp's 16-row tiles of F_B and the biases of its rows."""
        for i in cutlass.range_constexpr(self.tiles):
            for h in cutlass.range_constexpr(2):
                row = head * HEAD + (warp * self.tiles + i) * 16 + lane // 4 + 8 * h
                for step in cutlass.range_constexpr(4):
                    words = cu.ldg4(f_b.toint() + Int64(row * 256 + step * 64 + lane % 4 * 16))
                    for c in cutlass.range_constexpr(4):
                        frags[i, h, step, c] = words[c]
                bias[i, h] = cu.i2f(cu.ldg1(dt_bias.toint() + Int64(row * 4)))

    @cute.jit
    def gates(self, frags, bias, fa, scale, lane, warp, decay):
        """decay[token, k] = exp(-5 sigmoid(exp(a_log) (bf16(F_B f) + dt_bias))), this warp's k; two chains of MMAs."""
        for i in cutlass.range_constexpr(self.tiles):
            acc = cute.make_rmem_tensor(cute.make_layout((2, 4), stride=(4, 1)), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(4):
                for h in cutlass.range_constexpr(2):
                    low, high = 2 * h, 2 * h + 1
                    a = (
                        frags[i, 0, step, low],
                        frags[i, 1, step, low],
                        frags[i, 0, step, high],
                        frags[i, 1, step, high],
                    )
                    d = cu.mma_bf16(a, (fa[step, low], fa[step, high]), [acc[h, v] for v in range(4)])
                    for v in cutlass.range_constexpr(4):
                        acc[h, v] = d[v]
            for v in cutlass.range_constexpr(4):
                token = 2 * (lane % 4) + v % 2
                if token < self.tokens:
                    raw, _ = cu.unpack_bf16(cu.pack_bf16(acc[0, v] + acc[1, v], Float32(0)))
                    gate = cu.sigmoid(scale * (raw + bias[i, v // 2])) * Float32(LOWER_BOUND * cu.LOG2E)
                    row = (warp * self.tiles + i) * 16 + lane // 4 + 8 * (v // 2)
                    cu.sts1(decay + (token * HEAD + row) * 4, cu.f2i(cu.ex2_approx(gate)))

    # ------------------------------------------------------------------------------------------------- recurrence

    @cute.jit
    def advance(self, S, t, local, lane, qs, ks, decay, vs, beta, outs):
        """One token over this warp's rows in registers: decay, both dot products, delta-rule update, outputs.

        ``lanes`` lanes share a row: lane c of them holds columns 4 (j lanes + c) .. + 3, j = 0 .. 32 / lanes - 1; row i
        of a lane is row i (32 / lanes) + lane / lanes of the pass.
        """
        L: cutlass.Constexpr = self.lanes
        J: cutlass.Constexpr = 32 // L
        own: cutlass.Constexpr = self.slots
        bits: cutlass.Constexpr = (2 * own).bit_length() - 1  # halving steps: every lane ends with one sum
        dup: cutlass.Constexpr = L.bit_length() - 1 - bits  # lane bits that hold copies of it
        group, c = lane // L, lane % L
        kk = cute.make_rmem_tensor(cute.make_layout((J, 4), stride=(4, 1)), Float32)
        qq = cute.make_rmem_tensor(cute.make_layout((J, 4), stride=(4, 1)), Float32)
        sums = cute.make_rmem_tensor((2 * own,), Float32)  # r of every row, then p of every row
        sums.fill(0.0)
        kq = Float32(0)
        for j in cutlass.range_constexpr(J):
            at = (t * HEAD + 4 * (j * L + c)) * 4
            wk, wq, wd = cu.lds4(ks + at), cu.lds4(qs + at), cu.lds4(decay + at)
            for e in cutlass.range_constexpr(4):
                kk[j, e], qq[j, e] = cu.i2f(wk[e]), cu.i2f(wq[e])
                kq = px.fma(kk[j, e], qq[j, e], kq)
                for i in cutlass.range_constexpr(own):
                    S[i, j, e] = S[i, j, e] * cu.i2f(wd[e])
                    sums[i] = px.fma(S[i, j, e], kk[j, e], sums[i])
                    sums[own + i] = px.fma(S[i, j, e], qq[j, e], sums[own + i])
        kq = cute.arch.warp_reduction_sum(kq, threads_in_group=L)
        for step in cutlass.range_constexpr(bits):  # the first lane bit chooses r or p, the next ones the row
            half: cutlass.Constexpr = (2 * own) >> (step + 1)
            mask: cutlass.Constexpr = (L // 2) >> step
            for i in cutlass.range_constexpr(half):
                send = px.select(c & mask, sums[i], sums[half + i])
                keep = px.select(c & mask, sums[half + i], sums[i])
                sums[i] = keep + cute.arch.shuffle_sync_bfly(send, offset=mask)
        total = sums[0]
        for b in cutlass.range_constexpr(dup):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << b)
        row = local + ((c & (L // 2 - 1)) >> dup) * J + group
        at = (t * self.rows + row) * 4
        u = (px.lds1(vs + at) - total) * px.lds1(beta + 4 * t)  # of use in the lower lanes
        o = px.fma(cute.arch.shuffle_sync_bfly(u, offset=L // 2), kq, total)  # and this in the upper ones
        if (c >= L // 2) & ((c & ((1 << dup) - 1)) == 0):
            cu.sts1(outs + at, cu.f2i(o))
        for i in cutlass.range_constexpr(own):
            ui = cute.arch.shuffle_sync(u, group * L + (i << dup))
            for j in cutlass.range_constexpr(J):
                for e in cutlass.range_constexpr(4):
                    S[i, j, e] = px.fma(ui, kk[j, e], S[i, j, e])

    @cute.jit
    def load_rows(self, S, lane, address):
        """This warp's rows of a pass from shared memory."""
        J: cutlass.Constexpr = 32 // self.lanes
        for i in cutlass.range_constexpr(self.slots):
            for j in cutlass.range_constexpr(J):
                row = i * J + lane // self.lanes
                words = cu.lds4(address + row * 512 + (j * self.lanes + lane % self.lanes) * 16)
                for e in cutlass.range_constexpr(4):
                    S[i, j, e] = cu.i2f(words[e])

    @cute.jit
    def store_rows(self, S, slot, local, lane, rank, head, state, state_stride, held):
        """And to the state of ``slot``, unless that is a null slot."""
        J: cutlass.Constexpr = 32 // self.lanes
        if cutlass.const_expr(self.s.bulk_store):
            if slot > 0:
                self.send_rows(S, slot, local, lane, rank, head, state, state_stride, held + local * 512)
        elif slot > 0:
            row = head * HEAD + rank * self.rows + local + lane // self.lanes
            base = state.toint() + (Int64(slot) * state_stride + Int64(row * HEAD + lane % self.lanes * 4)) * 4
            for i in cutlass.range_constexpr(self.slots):
                for j in cutlass.range_constexpr(J):
                    words = [cu.f2i(S[i, j, e]) for e in range(4)]
                    to = base + Int64(i * J * 512 + j * self.lanes * 16)
                    if cutlass.const_expr(self.s.store_hint != 0):
                        px.stg4_hint(to, words, self.s.store_hint)
                    else:
                        cu.stg4(to, words)

    @cute.jit
    def send_rows(self, S, slot, local, lane, rank, head, state, state_stride, address):
        """The same by one bulk copy from where the rows were loaded from."""
        J: cutlass.Constexpr = 32 // self.lanes
        if cutlass.const_expr(self.tokens > 1):
            if lane == 0:
                px.bulk_wait()  # the previous token's rows have been read
            cute.arch.sync_warp()
        for i in cutlass.range_constexpr(self.slots):
            for j in cutlass.range_constexpr(J):
                row = i * J + lane // self.lanes
                words = [cu.f2i(S[i, j, e]) for e in range(4)]
                cu.sts4(address + row * 512 + (j * self.lanes + lane % self.lanes) * 16, words)
        cu.fence_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            row = head * HEAD + rank * self.rows + local
            to = state.toint() + (Int64(slot) * state_stride + Int64(row * HEAD)) * 4
            px.bulk_store(to, address, self.rpp * HEAD * 4, self.s.store_hint)

    @cute.jit
    def finish(self, outs, z, gamma, total, n: cutlass.Constexpr, t, lane, row):
        """out = o rsqrt(mean(o^2) + eps) norm_weight sigmoid(z), 4 columns of this block a lane; ``total``: sum o^2."""
        rstd = cu.rsqrt_approx(total * Float32(1.0 / HEAD) + Float32(NORM_EPS))
        if 4 * lane < self.rows:
            o = cu.lds4(outs + (t * self.rows + 4 * lane) * 4)
            y = cute.make_rmem_tensor((4,), Float32)
            for w in cutlass.range_constexpr(2):
                lo, hi = cu.unpack_bf16(z[n, w])
                y[2 * w] = cu.i2f(o[2 * w]) * rstd * gamma[2 * w] * cu.sigmoid(lo)
                y[2 * w + 1] = cu.i2f(o[2 * w + 1]) * rstd * gamma[2 * w + 1] * cu.sigmoid(hi)
            words = [cu.pack_bf16(y[0], y[1]), cu.pack_bf16(y[2], y[3])]
            px.stg2(row + Int64(t * self.width + 4 * lane) * 2, words)

    @cute.jit
    def norm(self, outs, z, gamma, part, mine, lane, rank, row):
        """Gated RMS norm over the head's 128 outputs; warp ``mine`` + n warps does token n."""
        for n in cutlass.range_constexpr(self.turns):
            t = mine + n * self.warps
            if t < self.tokens:
                words = cu.lds4(outs + (t * self.rows + cutlass.min(4 * lane, self.rows - 4)) * 4)
                o = [cu.i2f(words[c]) for c in range(4)]
                total = cute.arch.warp_reduction_sum(px.select(Int32(4 * lane < self.rows), px.dot4(o, o), Float32(0)))
                if cutlass.const_expr(self.cluster > 1):
                    if lane < self.cluster:
                        px.st_peer(part + (t * self.cluster + rank) * 4, lane, total)
                else:
                    self.finish(outs, z, gamma, total, n, t, lane, row)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            for n in cutlass.range_constexpr(self.turns):
                t = mine + n * self.warps
                if t < self.tokens:
                    total = Float32(0)
                    for c in cutlass.range_constexpr(self.cluster):
                        total += px.lds1(part + (t * self.cluster + c) * 4)
                    self.finish(outs, z, gamma, total, n, t, lane, row)
