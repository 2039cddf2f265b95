"""KDA decode core: the steps of one request inside a block, as methods of the kernel class of ``kda_core``."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import kda_core_ptx as px
from kimi_k3.kernels.kda_core_cases import HEAD, L2_EPS, LOWER_BOUND, NORM_EPS, TAPS


class KdaSteps:
    """Geometry (``heads``, ``width``, ``rows``, ``tokens``, ``warps`` ...) is set by ``KdaCore``."""

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
    def job_taps(
        self, taps, lane, job, rank, head, first, taken, conv_state, conv_stride, inputs, step,
        begin: cutlass.Constexpr, end: cutlass.Constexpr,
    ):  # fmt: skip
        """Inputs ``begin`` .. ``end`` of the window of job (unit, tensor), from the history or this step; padding: none.

        Tap j of a request's token t is its input t - 3 + j.
        """
        unit, tensor = job // 3, job % 3
        owner, token = unit, Int32(0)  # lane with the unit's tables
        if cutlass.const_expr(self.tokens > 1):
            owner, token = Int32(0), unit
        live, past = cute.arch.shuffle_sync(first, owner), cute.arch.shuffle_sync(taken, owner)
        if (live > 0) & (job < 3 * self.units):
            at = self.channel(lane, tensor, rank)
            old = Int64((past - 1 + token) * (3 * self.conv_width) + tensor * self.conv_width + head * HEAD + at)
            old = conv_state.toint() + (Int64(live) * conv_stride + old) * 2
            new = inputs + (Int64(unit * step) * self.pitch + (tensor * self.width + head * HEAD + at)) * 2
            for j in cutlass.range_constexpr(begin, end):
                source = old + Int64(j * 3 * self.conv_width * 2)
                if cutlass.const_expr(j == TAPS):
                    source = new
                elif cutlass.const_expr(self.tokens > 1):
                    if token + j >= TAPS:
                        source = new + Int64((j - TAPS) * self.pitch * 2)
                words = px.ldg2(source)
                taps[j, 0], taps[j, 1] = words[0], words[1]

    @cute.jit
    def convolve(self, taps, weights, lane, job, qs, ks, vs):
        """Convolution and SiLU of 4 channels a lane; q and k normalised over the head, q also scaled. To shared memory."""
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
    def shift(self, taps, lane, job, rank, head, first, taken, conv_state, conv_stride, inputs):
        """The history becomes [C[a], C[a + 1], x_0 .. x_{N-1}], a = tokens accepted; q and k by block 0, v by owners.

        One token: job (unit, tensor), its taps still in registers. Several: job = tensor, of the one request.
        """
        unit, tensor = job // 3, job % 3
        live, past = cute.arch.shuffle_sync(first, unit), cute.arch.shuffle_sync(taken, unit)
        if (live > 0) & ((tensor == 2) & (4 * lane < self.rows) | (tensor < 2) & (rank == 0)):
            at = self.channel(lane, tensor, rank)
            base = Int64(live) * conv_stride + Int64(tensor * self.conv_width + head * HEAD + at)
            base = conv_state.toint() + base * 2
            new = inputs + Int64(tensor * self.width + head * HEAD + at) * 2
            pitch: cutlass.Constexpr = 3 * self.conv_width * 2
            if cutlass.const_expr(self.tokens > 1):
                for j in cutlass.range_constexpr(2):
                    words = px.ldg2(base + Int64((past + j) * pitch))
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
        """decay[token, k] = exp(-5 sigmoid(exp(a_log) (bf16(F_B f) + dt_bias))) for this warp's k; two chains of four MMAs."""
        for i in cutlass.range_constexpr(self.tiles):
            acc = cute.make_rmem_tensor(cute.make_layout((2, 4), stride=(4, 1)), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(4):
                for h in cutlass.range_constexpr(2):
                    low, high = 2 * h, 2 * h + 1
                    a = (frags[i, 0, step, low], frags[i, 1, step, low], frags[i, 0, step, high], frags[i, 1, step, high])
                    d = cu.mma_bf16(a, (fa[step, low], fa[step, high]), [acc[h, v] for v in range(4)])
                    for v in cutlass.range_constexpr(4):
                        acc[h, v] = d[v]
            for v in cutlass.range_constexpr(4):
                token = 2 * (lane % 4) + v % 2  # or request
                if token < self.units:
                    raw, _ = cu.unpack_bf16(cu.pack_bf16(acc[0, v] + acc[1, v], Float32(0)))
                    gate = cu.sigmoid(scale * (raw + bias[i, v // 2])) * Float32(LOWER_BOUND * cu.LOG2E)
                    row = (warp * self.tiles + i) * 16 + lane // 4 + 8 * (v // 2)
                    px.sts1(decay + (token * HEAD + row) * 4, cu.f2i(cu.ex2_approx(gate)))

    # ------------------------------------------------------------------------------------------------- recurrence

    @cute.jit
    def advance(self, S, t, local, lane, qs, ks, decay, vs, beta, outs):
        """One token over this warp's rows in registers: decay, both dot products, delta-rule update, outputs.

        ``lanes`` lanes share a row: lane c of them holds columns 4 (j lanes + c) .. + 3, j = 0 .. 32 / lanes - 1; row i
        of a lane is row i (32 / lanes) + lane / lanes of the pass.
        """
        L: cutlass.Constexpr = self.lanes
        J: cutlass.Constexpr = 32 // L
        I: cutlass.Constexpr = self.slots
        bits: cutlass.Constexpr = (2 * I).bit_length() - 1  # halving steps: every lane ends with one sum
        dup: cutlass.Constexpr = L.bit_length() - 1 - bits  # lane bits that hold copies of it
        group, c = lane // L, lane % L
        kk = cute.make_rmem_tensor(cute.make_layout((J, 4), stride=(4, 1)), Float32)
        qq = cute.make_rmem_tensor(cute.make_layout((J, 4), stride=(4, 1)), Float32)
        sums = cute.make_rmem_tensor((2 * I,), Float32)  # r of every row, then p of every row
        sums.fill(0.0)
        kq = Float32(0)
        for j in cutlass.range_constexpr(J):
            at = (t * HEAD + 4 * (j * L + c)) * 4
            wk, wq, wd = cu.lds4(ks + at), cu.lds4(qs + at), cu.lds4(decay + at)
            for e in cutlass.range_constexpr(4):
                kk[j, e], qq[j, e] = cu.i2f(wk[e]), cu.i2f(wq[e])
                kq = px.fma(kk[j, e], qq[j, e], kq)
                for i in cutlass.range_constexpr(I):
                    S[i, j, e] = S[i, j, e] * cu.i2f(wd[e])
                    sums[i] = px.fma(S[i, j, e], kk[j, e], sums[i])
                    sums[I + i] = px.fma(S[i, j, e], qq[j, e], sums[I + i])
        kq = cute.arch.warp_reduction_sum(kq, threads_in_group=L)
        for step in cutlass.range_constexpr(bits):  # the first lane bit chooses r or p, the next ones the row
            half: cutlass.Constexpr = (2 * I) >> (step + 1)
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
            px.sts1(outs + at, cu.f2i(o))
        for i in cutlass.range_constexpr(I):
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
    def send_rows(self, S, lane, address, rows, slot, p: cutlass.Constexpr, state_stride):
        """As :meth:`store_rows` of pass ``p``, through shared memory (the place the rows came from) by a bulk copy."""
        J: cutlass.Constexpr = 32 // self.lanes
        size: cutlass.Constexpr = self.rpp * HEAD * 4
        for i in cutlass.range_constexpr(self.slots):
            for j in cutlass.range_constexpr(J):
                row = i * J + lane // self.lanes
                at = address + row * 512 + (j * self.lanes + lane % self.lanes) * 16
                cu.sts4(at, [cu.f2i(S[i, j, e]) for e in range(4)])
        cu.fence_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            px.bulk_store(rows + (Int64(slot) * state_stride * 4 + Int64(p * self.warps * size)), address, size)

    @cute.jit
    def store_rows(self, S, slot, local, lane, rank, head, state, state_stride):
        """And to the state of ``slot``, unless that is a null slot."""
        J: cutlass.Constexpr = 32 // self.lanes
        if slot > 0:
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
    def finish(self, outs, z, gamma, total, n: cutlass.Constexpr, t, lane, first, row, step):
        """out = o rsqrt(mean(o^2) + eps) norm_weight sigmoid(z), 4 columns of this block a lane; ``total`` = sum(o^2)."""
        live = cute.arch.shuffle_sync(first, t if self.tokens == 1 else 0)
        rstd = cu.rsqrt_approx(total * Float32(1.0 / HEAD) + Float32(NORM_EPS))
        if 4 * lane < self.rows:
            o = cu.lds4(outs + (t * self.rows + 4 * lane) * 4)
            y = cute.make_rmem_tensor((4,), Float32)
            for w in cutlass.range_constexpr(2):
                lo, hi = cu.unpack_bf16(z[n, w])
                y[2 * w] = cu.i2f(o[2 * w]) * rstd * gamma[2 * w] * cu.sigmoid(lo)
                y[2 * w + 1] = cu.i2f(o[2 * w + 1]) * rstd * gamma[2 * w + 1] * cu.sigmoid(hi)
            low, high = cu.pack_bf16(y[0], y[1]), cu.pack_bf16(y[2], y[3])
            if live <= 0:
                low, high = Uint32(0), Uint32(0)
            px.stg2(row + (Int64(t * step) * self.width + 4 * lane) * 2, [low, high])
