"""Device-side helpers shared by the CuTe kernels: memory accesses, MMA, barriers and rounding as inline PTX.

Rules that every helper follows, and that kernels must follow too:

- An instruction that touches memory is volatile and clobbers memory. A "pure" asm load may be merged with another one
  or moved across ``griddepcontrol.wait``; only ALU and MMA instructions are pure here.
- There is no ``ld.global.nc``: ptxas moves it across the dependency wait in both directions.
- A shared-memory region that a bulk copy (async proxy) refills after ordinary loads read it needs
  :func:`fence_async_shared` in every reading lane before the release: otherwise the next box can overwrite what was
  not read yet.

All spellings assemble for sm_90a, sm_100a and sm_103a.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kimi_k3.kernels.cute_asm import asm, struct, words
from kimi_k3.kernels.cute_cluster import (  # noqa: F401 - kernels find every helper here
    arrive_peer,
    bulk_to_block,
    mapa,
    st_async4,
    wgmma_bf16,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)

#: cache hint of weight boxes: read once, do not displace anything
EVICT_FIRST = 0x12F0000000000000
#: cache hint of data that every block reads
EVICT_LAST = 0x14F0000000000000

# ---------------------------------------------------------------------------------------------- loads and stores


@dsl_user_op
def lds4(addr, *, loc=None, ip=None):
    """Four words at the 32-bit shared address ``addr`` (16-byte aligned)."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip)]
    v = asm(struct(T.i32(), 4), ops, "ld.shared.v4.b32 {$0,$1,$2,$3},[$4];", "=r,=r,=r,=r,r", True, loc, ip)
    return words(v, 4, loc, ip)


@dsl_user_op
def sts1(addr, word, *, loc=None, ip=None):
    """Store one word at a 32-bit shared address."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip), Uint32(word).ir_value(loc=loc, ip=ip)]
    asm(None, ops, "st.shared.b32 [$0],$1;", "r,r", True, loc, ip)


@dsl_user_op
def sts4(addr, words, *, loc=None, ip=None):
    """Store four words at the 32-bit shared address ``addr`` (16-byte aligned)."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    asm(None, ops, "st.shared.v4.b32 [$0],{$1,$2,$3,$4};", "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def ldg4(addr, *, loc=None, ip=None):
    """Four words at the global address ``addr`` (16-byte aligned); ordered with the dependency wait."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)]
    v = asm(struct(T.i32(), 4), ops, "ld.global.v4.b32 {$0,$1,$2,$3},[$4];", "=r,=r,=r,=r,l", True, loc, ip)
    return words(v, 4, loc, ip)


@dsl_user_op
def ldg1(addr, *, loc=None, ip=None):
    """One word at the global address ``addr``; ordered with the dependency wait."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)]
    return Uint32(asm(T.i32(), ops, "ld.global.b32 $0,[$1];", "=r,l", True, loc, ip))


@dsl_user_op
def ldg1_64(addr, *, loc=None, ip=None):
    """One 64-bit value at the global address ``addr``; ordered with the dependency wait."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)]
    return Int64(asm(T.i64(), ops, "ld.global.b64 $0,[$1];", "=l,l", True, loc, ip))


@dsl_user_op
def stg4(addr, words, *, loc=None, ip=None):
    """Store four words at the global address ``addr`` (16-byte aligned)."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    asm(None, ops, "st.global.v4.b32 [$0],{$1,$2,$3,$4};", "l,r,r,r,r", True, loc, ip)


@dsl_user_op
def st_relaxed_sys4(addr, words, *, loc=None, ip=None):
    """Publish four words to a (possibly remote) global address, 16-byte aligned."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    asm(None, ops, "st.relaxed.sys.global.v4.b32 [$0],{$1,$2,$3,$4};", "l,r,r,r,r", True, loc, ip)


# ------------------------------------------------------------------------------------------------- tensor cores


@dsl_user_op
def mma_bf16(a, b, c, *, loc=None, ip=None):
    """D[16x8] = A[16x16] B[16x8] + C in BF16 with FP32 accumulation; ``a`` 4 words, ``b`` 2 words, ``c`` 4 floats.

    Lane ``4 g + q`` holds rows g, g+8 of A and column g of B; of D it holds rows g (c[0:2]) and g+8 (c[2:4]),
    columns 2q and 2q+1.
    """
    ops = [Uint32(v).ir_value(loc=loc, ip=ip) for v in (*a, *b)]
    ops += [Float32(v).ir_value(loc=loc, ip=ip) for v in c]
    code = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    v = asm(struct(T.f32(), 4), ops, code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", False, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), v, [i], loc=loc, ip=ip)) for i in range(4)]


# ------------------------------------------------------------------------------------------------ bits and maths


@dsl_user_op
def f2i(v, *, loc=None, ip=None):
    """The bits of a float as an Int32."""
    return Int32(llvm.bitcast(T.i32(), Float32(v).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def i2f(v, *, loc=None, ip=None):
    """The float with the given 32 bits."""
    return Float32(llvm.bitcast(T.f32(), Uint32(v).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def pack_bf16(lo, hi, *, loc=None, ip=None):
    """BF16 pair (``lo`` in the low half) of two floats, round to nearest even."""
    ops = [Float32(hi).ir_value(loc=loc, ip=ip), Float32(lo).ir_value(loc=loc, ip=ip)]
    return Uint32(asm(T.i32(), ops, "cvt.rn.bf16x2.f32 $0,$1,$2;", "=r,f,f", False, loc, ip))


@cute.jit
def unpack_bf16(word):
    """(low, high) halves of a BF16 pair as floats."""
    w = Uint32(word)
    return i2f(w << 16), i2f(w & 0xFFFF0000)


@dsl_user_op
def clean_pair(lo, hi, *, loc=None, ip=None):
    """As :func:`pack_bf16`, with -0 rewritten to +0, so that the mailbox sentinel can never be sent.

    (-0) + (+0) rounds to +0; every other finite value is unchanged and NaNs become canonical.
    """
    ops = [Float32(hi).ir_value(loc=loc, ip=ip), Float32(lo).ir_value(loc=loc, ip=ip)]
    code = "{ .reg .b32 w,z; cvt.rn.bf16x2.f32 w,$1,$2; mov.b32 z,0; add.rn.bf16x2 $0,w,z; }"
    return Uint32(asm(T.i32(), ops, code, "=r,f,f", False, loc, ip))


@dsl_user_op
def ex2_approx(v, *, loc=None, ip=None):
    """2**v, relative error about 2^-22."""
    return Float32(
        asm(T.f32(), [Float32(v).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0,$1;", "=f,f", False, loc, ip)
    )


@dsl_user_op
def rcp_approx(v, *, loc=None, ip=None):
    """1/v, within 1 ulp."""
    return Float32(
        asm(T.f32(), [Float32(v).ir_value(loc=loc, ip=ip)], "rcp.approx.ftz.f32 $0,$1;", "=f,f", False, loc, ip)
    )


@dsl_user_op
def rsqrt_approx(v, *, loc=None, ip=None):
    """v**-0.5, relative error about 2^-22."""
    return Float32(
        asm(T.f32(), [Float32(v).ir_value(loc=loc, ip=ip)], "rsqrt.approx.ftz.f32 $0,$1;", "=f,f", False, loc, ip)
    )


LOG2E = 1.4426950408889634


@cute.jit
def sigmoid(v):
    """1 / (1 + e^-v); saturates to 0 and 1 without NaN (e^-v = inf gives 0)."""
    return rcp_approx(Float32(1.0) + ex2_approx(Float32(v) * Float32(-LOG2E)))


@cute.jit
def tanh_exp(v):
    """tanh within about 2e-6 of its value: an odd polynomial below 1/8, 1 - 2 / (e^2v + 1) above.

    Unlike :func:`tanh_approx`, whose error is a few units of the BF16 result.
    """
    x = Float32(v)
    y = x * x
    out = x + x * y * (Float32(-1.0 / 3.0) + y * Float32(2.0 / 15.0))
    if y > Float32(1.0 / 64.0):
        out = Float32(1.0) - Float32(2.0) * rcp_approx(Float32(1.0) + ex2_approx(x * Float32(2.0 * LOG2E)))
    return out


# ----------------------------------------------------------------------------------------- barriers and ordering


@dsl_user_op
def fence_async_shared(*, loc=None, ip=None):
    """Orders this thread's accesses to shared memory before later async-proxy (bulk, TMA) accesses to it."""
    asm(None, [], "fence.proxy.async.shared::cta;", "", True, loc, ip)


@dsl_user_op
def wait_uniform(bar, phase, *, loc=None, ip=None):
    """Wait on an mbarrier; all 32 lanes leave together, so warp-wide MMAs may follow at once.

    CTA-scope acquire: good for bulk copies and local arrivals, not for data that other CTAs stored.
    """
    code = (
        "{ .reg .pred p,q; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[$0],$1,10000000; "
        "vote.sync.all.pred q,p,0xffffffff; @!q bra.uni AGAIN; }"
    )
    ops = [Int32(bar.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)]
    asm(None, ops, code, "r,r", True, loc, ip)


@dsl_user_op
def try_wait_cluster(bar, phase, *, loc=None, ip=None):
    """One bounded wait with cluster-scope acquire; 1 once the phase completed. For data of st.async."""
    code = "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[$1],$2; selp.u32 $0,1,0,p; }"
    ops = [Int32(bar.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)]
    return Int32(asm(T.i32(), ops, code, "=r,r,r", True, loc, ip))


@cute.jit
def wait_cluster(bar, phase):
    """Wait on an mbarrier that other CTAs of the cluster complete with st.async; any lane, no reconvergence promise."""
    done = try_wait_cluster(bar, phase)
    while done == 0:
        done = try_wait_cluster(bar, phase)


@cute.jit
def pdl_wait():
    """Everything that earlier kernels of the stream wrote is visible after this."""
    cute.arch.griddepcontrol_wait()


@cute.jit
def pdl_trigger():
    """The next kernel of the stream may start once every block has called this (or exited)."""
    cute.arch.griddepcontrol_launch_dependents()


# --------------------------------------------------------------------------------------------- more global stores


@dsl_user_op
def stg2(addr, words, *, loc=None, ip=None):
    """Store two words at the global address ``addr`` (8-byte aligned)."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    asm(None, ops, "st.global.v2.b32 [$0],{$1,$2};", "l,r,r", True, loc, ip)


@dsl_user_op
def st_relaxed_sys2(addr, words, *, loc=None, ip=None):
    """Publish two words to a (possibly remote) global address, 8-byte aligned."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    asm(None, ops, "st.relaxed.sys.global.v2.b32 [$0],{$1,$2};", "l,r,r", True, loc, ip)


@dsl_user_op
def clean_f32(v, *, loc=None, ip=None):
    """The word of a float with -0 rewritten to +0 (and NaN canonical): never the mailbox sentinel."""
    ops = [Float32(v).ir_value(loc=loc, ip=ip)]
    return Uint32(
        asm(T.i32(), ops, "{ .reg .f32 t; add.rn.f32 t,$1,0f00000000; mov.b32 $0,t; }", "=r,f", False, loc, ip)
    )
