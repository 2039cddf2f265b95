"""Attention residual: the input of a sub-layer, a normalised softmax mixture over the saved blocks and the prefix.

One kernel does, per token: p = bf16(prefix + delta) (or p = delta, or p = prefix), stored back; optionally a copy of p
as a new block and as a drafter's tap; logits rsqrt(mean s^2 + eps) * (s . query) of every saved block s and of p;
softmax; the mixture of the raw sources; RMS norm times gamma, one BF16 rounding. The final site rounds the mixture
before its norm.

  grid    (cluster, rows): the blocks of a cluster share a token's columns, every thread holds ``vectors`` x 8 columns
          of every source in registers, so that each source is read once.
  early   saved blocks, prefix, query and gamma are read, and the blocks' sums formed, before the dependency wait.
  sums    per warp, then over all warps of the cluster in a fixed order: through shared memory, across blocks by
          st.async.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory as cmem
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass.cutlass_dsl import T, dsl_user_op

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.contract import Contract, Parameter

EPS = 1e-5
_OLD = "written by an earlier residual kernel; kernels that wait first lie between (layer 0, without: early is off)"
CONTRACT = Contract(
    kernel="k3_attn_res",
    parameters=(
        Parameter("delta", "activation"),
        Parameter("prefix", "scratch", early=True, reason=_OLD),
        Parameter("blocks", "scratch", early=True, reason=_OLD),
        Parameter("query", "weight", early=True),
        Parameter("gamma", "weight", early=True),
        Parameter("tap", "output"),
        Parameter("out", "output", buffer="x"),
    ),
    wait="first",
    trigger="after_wait",
)


@dataclass(frozen=True)
class Settings:
    """Geometry. ``vectors``: 16-byte column groups a thread holds of every source."""

    cluster: int = 1
    vectors: int = 1
    occupancy: int = 1
    trigger: str = "after_wait"  #: when the next kernel may start: also "entry", "end"


@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None):
    ops = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c)]
    return Float32(cu.asm(T.f32(), ops, "fma.rn.f32 $0,$1,$2,$3;", "=f,f,f,f", False, loc, ip))


@dsl_user_op
def _opaque(word, *, loc=None, ip=None):
    """The same word, but unknown to the compiler: what was computed from it before is not kept in registers."""
    return Uint32(cu.asm(T.i32(), [Uint32(word).ir_value(loc=loc, ip=ip)], "mov.b32 $0,$1;", "=r,r", True, loc, ip))


@dsl_user_op
def _select(cond, a, b, *, loc=None, ip=None):
    """a where the Int32 ``cond`` is not zero, else b."""
    ops = [
        Float32(a).ir_value(loc=loc, ip=ip),
        Float32(b).ir_value(loc=loc, ip=ip),
        Int32(cond).ir_value(loc=loc, ip=ip),
    ]
    code = "{ .reg .pred p; setp.ne.s32 p,$3,0; selp.f32 $0,$1,$2,p; }"
    return Float32(cu.asm(T.f32(), ops, code, "=f,f,f,r", False, loc, ip))


class AttnRes:
    """The kernel for rows of ``hidden`` columns and ``stored`` readable blocks, a buffer of ``pitch`` blocks a row.

    ``update``: "add" p = bf16(prefix + delta), "replace" p = delta, "none" p = prefix (delta is not read, prefix not
    written). ``opens``: p is also stored as block ``stored``. ``tap``: and as a row of ``tap``. ``final``: the mixture
    is rounded to BF16 before the norm.
    """

    def __init__(
        self, hidden, stored, pitch, update="add", opens=False, tap=False, final=False, settings=Settings(), early=True
    ):
        s = settings
        assert update in ("add", "replace", "none"), update
        assert 0 <= stored + opens <= pitch, (stored, opens, pitch)
        assert hidden % (s.cluster * s.vectors * 256) == 0, f"hidden {hidden} does not divide over {s}"
        self.hidden, self.stored, self.pitch, self.update = hidden, stored, pitch, update
        self.opens, self.tap, self.final, self.s, self.early = opens, tap, final, s, early
        self.columns = hidden // s.cluster
        self.threads = self.columns // (8 * s.vectors)
        self.warps = self.threads // 32
        self.parts = s.cluster * self.warps  # warps that share a token
        self.values = 2 * (stored + 1)  # sums of squares and dot products of all sources
        assert max(self.parts, self.values) <= 32, (self.parts, self.values)
        self.smem = 4 * self.parts * (self.values + 1) + 16 + 64

    @cute.jit
    def __call__(
        self,
        delta: cute.Pointer,
        prefix: cute.Pointer,
        blocks: cute.Pointer,
        query: cute.Pointer,
        gamma: cute.Pointer,
        tap: cute.Pointer,
        out: cute.Pointer,
        rows: Int32,
        stream,
    ):
        self.kernel(delta, prefix, blocks, query, gamma, tap, out).launch(
            grid=(self.s.cluster, rows, 1),
            block=(self.threads, 1, 1),
            cluster=(self.s.cluster, 1, 1) if self.s.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.s.occupancy,
            preferred_smem_carveout=20,
        )

    @cute.kernel
    def kernel(
        self,
        delta: cute.Pointer,
        prefix: cute.Pointer,
        blocks: cute.Pointer,
        query: cute.Pointer,
        gamma: cute.Pointer,
        tap: cute.Pointer,
        out: cute.Pointer,
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank, token, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.s.trigger == "entry"):
            cu.pdl_trigger()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        n: cutlass.Constexpr = self.stored
        V: cutlass.Constexpr = self.s.vectors
        C: cutlass.Constexpr = self.s.cluster
        smem = cmem.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(self.parts * self.values), 16)
        squares = smem.allocate_tensor(Float32, cute.make_layout(self.parts), 16)
        bars = smem.allocate_array(Uint64, 2)
        if cutlass.const_expr(C > 1):
            if tid == 0:
                cute.arch.mbarrier_init(bars, 1)
                cute.arch.mbarrier_init(bars + 1, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(bars, self.parts * self.values * 4)
                cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, self.parts * 4)
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(not self.early):
            cu.pdl_wait()
        first = rank * self.columns + tid * 8  # vector v: + v * threads * 8
        step: cutlass.Constexpr = self.threads * 8
        at = Int64(token * self.hidden + first) * 2

        # ---- before the wait: saved blocks, their sums, prefix and weights
        src = cute.make_rmem_tensor(cute.make_layout((n + 1, V, 4), stride=(4 * V, 4, 1)), Uint32)
        for b in cutlass.range_constexpr(n):
            base = blocks.toint() + (Int64(token * self.pitch + b) * self.hidden + first) * 2
            for v in cutlass.range_constexpr(V):
                self.take(src, b, v, cu.ldg4(base + Int64(v * step * 2)))
        if cutlass.const_expr(self.update != "replace"):
            for v in cutlass.range_constexpr(V):
                self.take(src, n, v, cu.ldg4(prefix.toint() + at + Int64(v * step * 2)))
        q = cute.make_rmem_tensor(cute.make_layout((V, 8), stride=(8, 1)), Float32)
        for v in cutlass.range_constexpr(V):
            for h in cutlass.range_constexpr(2):
                words = cu.ldg4(query.toint() + Int64(first + v * step + 4 * h) * 4)
                for c in cutlass.range_constexpr(4):
                    q[v, 4 * h + c] = cu.i2f(words[c])
        scale = cute.make_rmem_tensor(cute.make_layout((V, 4), stride=(4, 1)), Uint32)
        for v in cutlass.range_constexpr(V):
            words = cu.ldg4(gamma.toint() + Int64(first + v * step) * 2)
            for c in cutlass.range_constexpr(4):
                scale[v, c] = words[c]
        if cutlass.const_expr(n > 0):
            bits: cutlass.Constexpr = (2 * n - 1).bit_length()
            local = cute.make_rmem_tensor((1 << bits,), Float32)
            local.fill(0.0)
            for b in cutlass.range_constexpr(n):
                local[b], local[n + b] = self.score(src, b, q)
            total = self.spread(local, lane, bits)
            index = lane >> (5 - bits)
            if cutlass.const_expr(C > 1):
                cute.arch.cluster_wait()  # the other blocks run and their barriers are armed
            if ((lane & ((1 << (5 - bits)) - 1)) == 0) & (index < 2 * n):
                index = index + Int32(index >= n)  # leave room for the prefix
                self.share(sums, (rank * self.warps + warp) * self.values + index, total, bars)
        if cutlass.const_expr(C > 1 and n == 0):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.early):
            cu.pdl_wait()
        if cutlass.const_expr(self.s.trigger == "after_wait"):
            cu.pdl_trigger()

        # ---- prefix
        if cutlass.const_expr(self.update != "none"):
            for v in cutlass.range_constexpr(V):
                words = cu.ldg4(delta.toint() + at + Int64(v * step * 2))
                for c in cutlass.range_constexpr(4):
                    if cutlass.const_expr(self.update == "add"):
                        a0, a1 = cu.unpack_bf16(src[n, v, c])
                        b0, b1 = cu.unpack_bf16(words[c])
                        src[n, v, c] = cu.pack_bf16(a0 + b0, a1 + b1)
                    else:
                        src[n, v, c] = words[c]
        mine = [src[n, v, c] for v in range(V) for c in range(4)]
        for v in cutlass.range_constexpr(V):
            words = mine[4 * v : 4 * v + 4]
            if cutlass.const_expr(self.update != "none"):
                cu.stg4(prefix.toint() + at + Int64(v * step * 2), words)
            if cutlass.const_expr(self.opens):
                base = blocks.toint() + (Int64(token * self.pitch + n) * self.hidden + first) * 2
                cu.stg4(base + Int64(v * step * 2), words)
            if cutlass.const_expr(self.tap):
                cu.stg4(tap.toint() + at + Int64(v * step * 2), words)

        # ---- softmax over the sources
        prob = cute.make_rmem_tensor((n + 1,), Float32)
        prob.fill(1.0)
        if cutlass.const_expr(n > 0):
            pair = cute.make_rmem_tensor((2,), Float32)
            pair[0], pair[1] = self.score(src, n, q)
            total = self.spread(pair, lane, 1)
            if lane % 16 == 0:
                index = (rank * self.warps + warp) * self.values + n + (lane // 16) * (n + 1)
                self.share(sums, index, total, bars)
            if cutlass.const_expr(C > 1):
                cu.wait_cluster(bars, 0)
            else:
                cute.arch.sync_threads()
            part = cute.make_rmem_tensor((4,), Float32)
            part.fill(0.0)
            column = cutlass.min(lane, self.values - 1)
            for w in cutlass.range_constexpr(self.parts):
                part[w % 4] = part[w % 4] + sums[w * self.values + column]
            total = (part[0] + part[1]) + (part[2] + part[3])
            dot = cute.arch.shuffle_sync(total, (lane + n + 1) % 32)
            logit = dot * cu.rsqrt_approx(total * Float32(1.0 / self.hidden) + Float32(EPS))
            logit = _select(Int32(lane <= n), logit, Float32(-3.0e38))
            top = cute.arch.warp_reduction_max(logit, threads_in_group=16)
            e = cu.ex2_approx((logit - top) * Float32(cu.LOG2E))
            e = e * cu.rcp_approx(cute.arch.warp_reduction_sum(e, threads_in_group=16))
            for b in cutlass.range_constexpr(n + 1):
                prob[b] = cute.arch.shuffle_sync(e, b)

        if cutlass.const_expr(self.s.trigger == "end"):
            cu.pdl_trigger()

        # ---- mixture and norm
        mix = cute.make_rmem_tensor(cute.make_layout((V, 8), stride=(8, 1)), Float32)
        mix.fill(0.0)
        for b in cutlass.range_constexpr(n + 1):
            for v in cutlass.range_constexpr(V):
                for c in cutlass.range_constexpr(4):
                    lo, hi = cu.unpack_bf16(_opaque(src[b, v, c]))
                    mix[v, 2 * c] = _fma(prob[b], lo, mix[v, 2 * c])
                    mix[v, 2 * c + 1] = _fma(prob[b], hi, mix[v, 2 * c + 1])
        total = Float32(0)
        for v in cutlass.range_constexpr(V):
            for c in cutlass.range_constexpr(4):
                if cutlass.const_expr(self.final):
                    mix[v, 2 * c], mix[v, 2 * c + 1] = cu.unpack_bf16(cu.pack_bf16(mix[v, 2 * c], mix[v, 2 * c + 1]))
                total = _fma(mix[v, 2 * c], mix[v, 2 * c], total)
                total = _fma(mix[v, 2 * c + 1], mix[v, 2 * c + 1], total)
        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(C > 1):
            if lane < C:
                at_part = squares.iterator + (rank * self.warps + warp)
                cute.arch.store_async_dsmem(at_part, cu.f2i(total), bars + 1, lane)
            cu.wait_cluster(bars + 1, 0)
        else:
            squares[warp] = total
            cute.arch.sync_threads()
        total = squares[cutlass.min(lane, self.parts - 1)]
        total = cute.arch.warp_reduction_sum(_select(Int32(lane < self.parts), total, Float32(0)))
        rstd = cu.rsqrt_approx(total * Float32(1.0 / self.hidden) + Float32(EPS))
        for v in cutlass.range_constexpr(V):
            for c in cutlass.range_constexpr(4):
                lo, hi = cu.unpack_bf16(scale[v, c])
                scale[v, c] = cu.pack_bf16(mix[v, 2 * c] * rstd * lo, mix[v, 2 * c + 1] * rstd * hi)
            cu.stg4(out.toint() + at + Int64(v * step * 2), [scale[v, c] for c in range(4)])

    @cute.jit
    def take(self, src, b: cutlass.Constexpr, v: cutlass.Constexpr, words):
        for c in cutlass.range_constexpr(4):
            src[b, v, c] = words[c]

    @cute.jit
    def score(self, src, b: cutlass.Constexpr, q):
        """This thread's part of (sum s^2, sum s query) of source ``b``."""
        squares, dot = Float32(0), Float32(0)
        for v in cutlass.range_constexpr(self.s.vectors):
            for c in cutlass.range_constexpr(4):
                lo, hi = cu.unpack_bf16(src[b, v, c])
                squares = _fma(lo, lo, squares)
                squares = _fma(hi, hi, squares)
                dot = _fma(lo, q[v, 2 * c], dot)
                dot = _fma(hi, q[v, 2 * c + 1], dot)
        return squares, dot

    @cute.jit
    def spread(self, values, lane, bits: cutlass.Constexpr):
        """Warp sums of 2**bits values; lane l gets the sum of value l >> (5 - bits)."""
        for step in cutlass.range_constexpr(bits):
            half: cutlass.Constexpr = (1 << bits) >> (step + 1)
            mask: cutlass.Constexpr = 16 >> step
            for i in cutlass.range_constexpr(half):
                send = _select(lane & mask, values[i], values[half + i])
                keep = _select(lane & mask, values[half + i], values[i])
                values[i] = keep + cute.arch.shuffle_sync_bfly(send, offset=mask)
        total = values[0]
        for b in cutlass.range_constexpr(5 - bits):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << b)
        return total

    @cute.jit
    def share(self, sums, index, value, bars):
        """Put a warp's sum where every block of the cluster finds it."""
        if cutlass.const_expr(self.s.cluster > 1):
            for peer in cutlass.range_constexpr(self.s.cluster):
                cute.arch.store_async_dsmem(sums.iterator + index, cu.f2i(value), bars, Int32(peer))
        else:
            sums[index] = value


AttnRes.kernel.set_name_prefix("k3_attn_res", keep_mangled_name=False)


def compile_cases() -> dict[str, CompileCase]:
    """Every site of the full model and of the small one, with the prepared settings."""
    from kimi_k3.kernels.attn_res_launch import choose, kernel_args

    sites: list[tuple[str, dict[str, Any]]] = [("embedding", {"stored": 0, "update": "none", "opens": True})]
    sites += [(f"stored{n}", {"stored": n}) for n in range(1, 9)]
    sites += [(f"opens{n}", {"stored": n, "opens": True}) for n in range(1, 8)]
    sites += [(f"tap{n}", {"stored": n, "tap": True}) for n in (1, 2, 4, 6, 8)]
    sites += [("replace1", {"stored": 1, "update": "replace"}), ("replace8", {"stored": 8, "update": "replace"})]
    sites += [("final8", {"stored": 8, "final": True})]
    cases = {}
    for hidden in (7168, 256):
        for name, kw in sites:
            kernel = AttnRes(hidden, pitch=8, settings=choose(hidden, 1), early=kw.get("update") != "none", **kw)
            kind = f"h{hidden}-{name.rstrip('12345678')}"
            cases[f"h{hidden}-{name}"] = CompileCase(kernel, kernel_args(), kernel.threads, kernel.smem, CONTRACT, kind)
    return cases
