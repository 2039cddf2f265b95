"""KDA decode core: everything between the input projection and o_proj of a Kimi delta attention layer, one kernel.

Short convolution + SiLU, L2 norm of q and k, the F_B product and the decay gate, beta, the delta-rule recurrence, and
the gated RMS norm; the FP32 recurrent state and the BF16 convolution history are updated in place, in stock layouts.

  grid      (cluster, heads, groups): a cluster of C blocks shares one head of one request; block c owns the 128/C
            value rows [c R, (c+1) R) of state[slot, head, v, k]. What all rows need (q, k, decay) every block computes
            again: cheaper than an exchange. Without clusters a block may serve several requests of its head in turn.
  early     tables, state rows (every warp copies its own to shared memory with bulk copies), convolution taps and
            weights, F_B fragments are read before the dependency wait: nothing of it was written in this step.
  gates     raw = F_B f on the tensor cores: F_B rows are the M operand, the request's tokens (up to 8) the N operand.
  update    a warp keeps ``rows_per_pass`` rows in registers, ``lanes`` lanes a row. With S the decayed state, r = S k
            and p = S q are summed by one transposing reduction (one sum per lane), then u = beta (v - r),
            o = p + u (k.q), S += u k^T. The tokens of a verify step run one after the other over the rows in registers.
            A warp's shared memory is refilled with the next request's rows as soon as it is in registers.
  end       sums of o^2 are exchanged once over the cluster, every block finishes its own rows.

Rounding: BF16 at raw, at the stored taps (inputs) and at the output; everything else is FP32. Sums have a fixed order.
Requests whose first slot, or whose accepted slot, is <= 0 are padding: their output rows are zero, nothing is written.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
# ruff: noqa: SIM102 - a static condition cannot be joined with a dynamic one
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
import torch
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import kda_core_ptx as px
from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.contract import Contract, Parameter
from kimi_k3.kernels.kda_core_cases import HEAD, TAPS
from kimi_k3.kernels.kda_core_steps import KdaSteps
from kimi_k3.kernels.shapes import PREPARED_ROWS, shard

_STEP = "written at the latest by the previous step, a whole graph ago"
_TABLE = "filled before the step starts"
CONTRACT = Contract(
    kernel="k3_kda_core",
    parameters=(
        Parameter("projected", "activation", buffer="y"),
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
        Parameter("out", "output", buffer="x"),
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
    resident: int = 0  #: blocks per SM over which the requests are spread, each taking several; 0: a block per request
    store_hint: int = 0  #: L2 policy of the state stores, 0: none
    load_hint: int = cu.EVICT_FIRST  #: L2 policy of the state reads, 0: none
    bulk_store: bool = False  #: state rows go back through shared memory and bulk copies; only without ``resident``
    trigger: str = "after_wait"  #: when the next kernel may start: also "entry", "end"

    @property
    def rows(self) -> int:
        return HEAD // self.cluster

    def groups(self, heads: int, requests: int, sms: int) -> int:
        """Blocks (or clusters) per head."""
        if self.resident == 0:
            return requests
        most = max(1, self.resident * sms // heads)
        return -(-requests // -(-requests // most))  # the fewest that need no more turns than ``most`` do


class KdaCore(KdaSteps):
    """The kernel. ``heads`` of this rank, ``pitch``: elements of a row of ``projected``; ``tokens`` per request.

    ``columns`` = 0: plain decode, slots [requests], ``accepted`` is not read. Otherwise slots [requests, columns] and
    accepted [requests]: the native verify scheme, tokens <= columns. ``index_bytes``: 4 or 8, of both tables.
    ``conv_width``: channels of q in the convolution history, if that holds more heads than this rank's.
    """

    def __init__(self, heads, pitch, tokens=1, columns=0, index_bytes=4, settings=None, early=True, conv_width=None):
        self.s = s = settings or Settings()
        fits = s.cluster in (1, 2, 4, 8) and s.warps in (4, 8) and (s.cluster == 1 or s.resident == 0)
        fits = fits and not (s.bulk_store and s.resident)
        sound = 1 <= tokens <= 8 and index_bytes in (4, 8) and (tokens <= columns if columns else tokens == 1)
        assert fits and sound, (s, tokens, columns, index_bytes)  # noqa: PT018
        self.heads, self.pitch, self.tokens, self.columns, self.ib = heads, pitch, tokens, columns, index_bytes
        self.cluster, self.warps, self.rows, self.lanes, self.early = s.cluster, s.warps, s.rows, s.lanes, early
        self.width = heads * HEAD
        self.conv_width = conv_width or self.width
        self.rpw = self.rows // self.warps  # rows per warp
        self.rpp = min(self.rpw, s.rows_per_pass)  # and pass
        self.passes = self.rpw // self.rpp
        self.slots = self.rpp * self.lanes // 32  # rows per lane and pass
        assert 2 <= 2 * self.slots <= self.lanes, f"{s}: {self.rpp} rows of a pass do not fit {self.lanes} lanes a row"
        self.tiles = 8 // self.warps  # m16 tiles of F_B per warp
        self.jobs = -(-3 * tokens // self.warps)  # convolution jobs per warp
        self.turns = -(-tokens // self.warps)  # tokens that a warp finishes

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def smem(self):
        floats = self.tokens * (3 * HEAD + 2 * self.rows + 2 + self.cluster)
        return self.rows * HEAD * 4 + floats * 4 + 8 * self.passes * self.warps + 128

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
        R: cutlass.Constexpr = self.rows
        several: cutlass.Constexpr = self.s.resident > 0
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        smem = cmem.SmemAllocator()
        held = Int32(smem.allocate(R * HEAD * 4, 128).toint())
        qs = Int32(smem.allocate(N * HEAD * 4, 16).toint())
        ks = Int32(smem.allocate(N * HEAD * 4, 16).toint())
        decay = Int32(smem.allocate(N * HEAD * 4, 16).toint())
        vs = Int32(smem.allocate(N * R * 4, 16).toint())
        outs = Int32(smem.allocate(N * R * 4, 16).toint())
        beta = Int32(smem.allocate(N * 4, 4).toint())
        target = Int32(smem.allocate(N * 4, 4).toint())  # slot of every token's state
        part = Int32(smem.allocate(N * self.cluster * 4, 4).toint())  # sums of o^2 of every block
        bars = smem.allocate_array(Uint64, self.passes * self.warps) + warp * self.passes
        if lane == 0:
            for p in cutlass.range_constexpr(self.passes):
                cute.arch.mbarrier_init(bars + p, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if cutlass.const_expr(not self.early):
            cu.pdl_wait()

        # ---- before the wait: state, weights, history
        first, slot, taken = self.lookup(slots, accepted, start)
        offset = Int64(head * HEAD * HEAD + rank * R * HEAD) * 4
        if first > 0:
            for p in cutlass.range_constexpr(self.passes):
                self.fetch(p, slot, lane, warp, held, bars, state.toint() + offset, state_stride)
        frags = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2, 4, 4), stride=(32, 16, 4, 1)), Uint32)
        bias = cute.make_rmem_tensor(cute.make_layout((self.tiles, 2), stride=(2, 1)), Float32)
        taps = cute.make_rmem_tensor(cute.make_layout((4, 2), stride=(2, 1)), Uint32)
        weights = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Float32)
        gamma = cute.make_rmem_tensor((4,), Float32)
        inputs = projected.toint() + Int64(start * N) * (self.pitch * 2)
        conv = conv_state.toint() + (Int64(first) * conv_stride + Int64(head * HEAD)) * 2
        if cutlass.const_expr(not several):
            self.gate_weights(frags, bias, lane, warp, head, f_b, dt_bias)
            if cutlass.const_expr(self.jobs == 1):
                if warp < 3 * N:
                    self.conv_weights(weights, lane, warp, rank, head, conv_weight)
        if cutlass.const_expr(N == 1):
            if (warp < 3) & (first > 0):
                self.conv_taps(taps, lane, warp, rank, head, taken, conv, inputs, 0, TAPS)
        norm_words = cu.ldg4(norm_weight.toint() + Int64(rank * R + cutlass.min(4 * lane, R - 4)) * 4)
        for c in cutlass.range_constexpr(4):
            gamma[c] = cu.i2f(norm_words[c])
        scale = cu.ex2_approx(cu.i2f(cu.ldg1(a_log.toint() + Int64(head * 4))) * Float32(cu.LOG2E))
        if cutlass.const_expr(self.early):
            cu.pdl_wait()
        if cutlass.const_expr(self.s.trigger == "after_wait"):
            cu.pdl_trigger()

        # ---- requests of this block, one after the other
        mem = (held, qs, ks, decay, vs, outs, beta, target, part, bars)
        at_head = (projected, slots, conv_state, state, conv_stride, state_stride, out, offset)
        regs = (frags, bias, taps, weights, gamma, scale)
        where = (tid, lane, warp, rank, head)
        if cutlass.const_expr(several):
            phase = Int32(0)
            for req in cutlass.range(start, requests, groups, unroll=1):
                after = req + groups
                next_first, next_slot, next_taken = Int32(0), Int32(0), Int32(1)
                if after < requests:
                    next_first, next_slot, next_taken = self.lookup(slots, accepted, after)
                if first > 0:
                    self.gate_weights(frags, bias, lane, warp, head, f_b, dt_bias)
                    if cutlass.const_expr(self.jobs == 1):
                        if warp < 3 * N:
                            self.conv_weights(weights, lane, warp, rank, head, conv_weight)
                    self.request(
                        where, mem, at_head, regs, conv_weight, req, first, taken, phase, next_first, next_slot
                    )  # fmt: skip
                    phase = phase ^ 1
                else:
                    self.padding(where, mem, at_head, req, next_first, next_slot)
                first, slot, taken = next_first, next_slot, next_taken
                if cutlass.const_expr(N == 1):
                    if (warp < 3) & (first > 0):
                        conv = conv_state.toint() + (Int64(first) * conv_stride + Int64(head * HEAD)) * 2
                        self.conv_taps(taps, lane, warp, rank, head, taken, conv, inputs, 0, TAPS)
        else:
            none = Int32(0)
            if first > 0:
                self.request(where, mem, at_head, regs, conv_weight, start, first, taken, none, none, none)
            else:
                self.padding(where, mem, at_head, start, none, none)

    @cute.jit
    def request(self, where, mem, at_head, regs, conv_weight, req, first, taken, phase, next_first, next_slot):
        """One live request. ``next_first`` > 0: state rows of ``next_slot`` are fetched as soon as there is room."""
        _, lane, warp, rank, head = where
        held, qs, ks, decay, vs, outs, beta, target, part, bars = mem
        projected, slots, conv_state, state, conv_stride, state_stride, out, offset = at_head
        frags, bias, taps, weights, gamma, scale = regs
        N: cutlass.Constexpr = self.tokens
        R: cutlass.Constexpr = self.rows
        inputs = projected.toint() + Int64(req * N) * (self.pitch * 2)
        conv = conv_state.toint() + (Int64(first) * conv_stride + Int64(head * HEAD)) * 2
        row = out.toint() + Int64(Int64(req * N) * self.width + head * HEAD + rank * R) * 2
        fa = cute.make_rmem_tensor(cute.make_layout((4, 4), stride=(4, 1)), Uint32)
        token = cutlass.min(lane // 4, N - 1)  # columns beyond N are computed and dropped
        for step in cutlass.range_constexpr(4):
            at = token * self.pitch + 4 * self.width + 32 * step + 8 * (lane % 4)
            fa_words = cu.ldg4(inputs + Int64(at) * 2)
            for c in cutlass.range_constexpr(4):
                fa[step, c] = fa_words[c]
        if (warp == self.warps - 1) & (lane < N):
            at = lane * self.pitch + 4 * self.width + HEAD + head
            cu.sts1(beta + 4 * lane, cu.f2i(cu.sigmoid(px.ldg_bf16(inputs + Int64(at) * 2))))
            columns: cutlass.Constexpr = max(1, self.columns)
            cu.sts1(target + 4 * lane, cu.ldg1(slots.toint() + Int64((req * columns + lane) * self.ib)))
        for j in cutlass.range_constexpr(self.jobs):
            job = warp + j * self.warps
            if job < 3 * N:
                if cutlass.const_expr(self.jobs > 1):
                    self.conv_weights(weights, lane, job, rank, head, conv_weight)
                begin: cutlass.Constexpr = TAPS if N == 1 else 0
                self.conv_taps(taps, lane, job, rank, head, taken, conv, inputs, begin, 4)
                self.convolve(taps, weights, lane, job, qs, ks, vs)
        z = cute.make_rmem_tensor(cute.make_layout((self.turns, 2), stride=(2, 1)), Uint32)
        mine = (warp + self.warps - 3) % self.warps  # warps 0 .. 2 are busy with the convolution
        for n in cutlass.range_constexpr(self.turns):
            token = cutlass.min(mine + n * self.warps, N - 1)
            at = token * self.pitch + 3 * self.width + head * HEAD + rank * R + cutlass.min(4 * lane, R - 4)
            z_words = px.ldg2(inputs + Int64(at) * 2)
            z[n, 0], z[n, 1] = z_words[0], z_words[1]
        self.gates(frags, bias, fa, scale, lane, warp, decay)
        if cutlass.const_expr(self.cluster == 1 and N == 1):
            self.shift(taps, lane, warp, rank, head, taken, conv, inputs)  # every warp its own channels
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # the other blocks run: their shared memory may be written

        S = cute.make_rmem_tensor(
            cute.make_layout((self.slots, 32 // self.lanes, 4), stride=(4 * (32 // self.lanes), 4, 1)), Float32
        )
        for p in cutlass.range_constexpr(self.passes):
            local = (p * self.warps + warp) * self.rpp  # first row of this warp's pass
            cu.wait_uniform(bars + p, phase)
            self.load_rows(S, lane, held + local * 512)
            if cutlass.const_expr(self.s.resident > 0):
                cu.fence_async_shared()
                cute.arch.sync_warp()
                if next_first > 0:
                    self.fetch(p, next_slot, lane, warp, held, bars, state.toint() + offset, state_stride)
            if cutlass.const_expr(N == 1):
                self.advance(S, 0, local, lane, qs, ks, decay, vs, beta, outs)
                self.store_rows(S, px.lds1i(target), local, lane, rank, head, state, state_stride, held)
            else:
                for t in cutlass.range(N, unroll=1):
                    self.advance(S, t, local, lane, qs, ks, decay, vs, beta, outs)
                    self.store_rows(S, px.lds1i(target + 4 * t), local, lane, rank, head, state, state_stride, held)
        if cutlass.const_expr(self.s.trigger == "end"):
            cu.pdl_trigger()
        cute.arch.sync_threads()
        self.norm(outs, z, gamma, part, mine, lane, rank, row)
        if cutlass.const_expr(self.cluster > 1 or N > 1):  # every block has read the history that is shifted now
            self.shift(taps, lane, warp, rank, head, taken, conv, inputs)
        if cutlass.const_expr(self.s.bulk_store):
            if lane == 0:
                px.bulk_wait()


KdaCore.kernel.set_name_prefix("k3_kda_core", keep_mangled_name=False)


def compile_cases() -> dict[str, CompileCase]:
    """The prepared settings of every shard: plain decode of all prepared rows, verify of 4 to 8 tokens.

    Tables as the executor has them, 1 to 8 slots of int64; of int32 for plain decode without a table and for 8 tokens.
    """
    from kimi_k3.kernels.kda_core_launch import choose, kernel_args

    cases: dict[str, CompileCase] = {}
    for model, tp in (("kimi-k3", 8), ("kimi-k3", 16), ("small", 1), ("small", 8), ("small", 16)):
        shape = shard(model, tp)
        steps = [(1, columns, 4 if columns == 0 else 8, n) for n in PREPARED_ROWS for columns in (0, 1)]
        steps += [(1, 8, 8, n) for n in (1, 64)]
        lengths = (4, 5, 6, 7, 8) if model == "kimi-k3" else (8,)
        steps += [(t, 8, index, n // t) for t in lengths for n in (t, 16, 64) for index in ((4, 8) if t == 8 else (8,))]
        steps += [(t, t, 8, 16 // t) for t in lengths if t < 8]
        for tokens, columns, index, requests in steps:
            s = choose(shape.heads, tokens, max(1, requests))
            kernel = KdaCore(shape.heads, shape.kda_rows, tokens, columns, index, s)
            table = f"n{columns}-i{8 * index}-c{s.cluster}-l{s.lanes}-p{kernel.rpp}-r{s.resident}{'-b' * s.bulk_store}"
            args = kernel_args(torch.int32 if index == 4 else torch.int64)
            kind = f"q{'1' if tokens == 1 else 'n'}-{table}"
            case = CompileCase(kernel, args, kernel.threads, kernel.smem, CONTRACT, kind)
            cases.setdefault(f"{model}-tp{tp}-q{tokens}-{table}", case)
    return cases
