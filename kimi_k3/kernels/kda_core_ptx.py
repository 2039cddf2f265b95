"""Instructions that only the KDA decode core needs, as inline PTX; the rules of ``cute_util`` apply."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kimi_k3.kernels import cute_util as cu


@dsl_user_op
def ldg2(addr, *, loc=None, ip=None):
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)]
    st = llvm.StructType.get_literal([T.i32()] * 2)
    v = cu.asm(st, ops, "ld.global.v2.b32 {$0,$1},[$2];", "=r,=r,l", True, loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), v, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def ldg_bf16(addr, *, loc=None, ip=None):
    """One BF16 value as a float."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)]
    code = "{ .reg .b16 h,z; mov.b16 z,0; ld.global.b16 h,[$1]; mov.b32 $0,{z,h}; }"
    return cu.i2f(Uint32(cu.asm(T.i32(), ops, code, "=r,l", True, loc, ip)))


@dsl_user_op
def lds1(addr, *, loc=None, ip=None):
    """One float at a 32-bit shared address."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip)]
    return Float32(cu.asm(T.f32(), ops, "ld.shared.f32 $0,[$1];", "=f,r", True, loc, ip))


@dsl_user_op
def lds1i(addr, *, loc=None, ip=None):
    """One Int32 at a 32-bit shared address."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip)]
    return Int32(cu.asm(T.i32(), ops, "ld.shared.b32 $0,[$1];", "=r,r", True, loc, ip))


@dsl_user_op
def stg2(addr, words, *, loc=None, ip=None):
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    cu.asm(None, ops, "st.global.v2.b32 [$0],{$1,$2};", "l,r,r", True, loc, ip)


@dsl_user_op
def stg4_hint(addr, words, hint, *, loc=None, ip=None):
    ops = [Int64(addr).ir_value(loc=loc, ip=ip)] + [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    ops.append(Int64(hint).ir_value(loc=loc, ip=ip))
    cu.asm(None, ops, "st.global.L2::cache_hint.v4.b32 [$0],{$1,$2,$3,$4},$5;", "l,r,r,r,r,l", True, loc, ip)


@dsl_user_op
def bulk_load(smem, addr, size, bar, hint: cutlass.Constexpr, *, loc=None, ip=None):
    """Asynchronous copy of ``size`` bytes (multiple of 16) global -> shared, completing on ``bar``."""
    ops = [Int32(smem).ir_value(loc=loc, ip=ip), Int64(addr).ir_value(loc=loc, ip=ip)]
    ops += [Int32(size).ir_value(loc=loc, ip=ip), Int32(bar.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)]
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if hint:
        ops.append(Int64(hint).ir_value(loc=loc, ip=ip))
        cu.asm(None, ops, code + ".L2::cache_hint [$0],[$1],$2,[$3],$4;", "r,l,r,r,l", True, loc, ip)
    else:
        cu.asm(None, ops, code + " [$0],[$1],$2,[$3];", "r,l,r,r", True, loc, ip)


@dsl_user_op
def bulk_store(addr, smem, size, hint: cutlass.Constexpr, *, loc=None, ip=None):
    """Asynchronous copy of ``size`` bytes (multiple of 16) shared -> global, as a bulk group of its own.

    Writers of the source need fence_async_shared and a warp barrier first."""
    ops = [Int64(addr).ir_value(loc=loc, ip=ip), Int32(smem).ir_value(loc=loc, ip=ip)]
    ops += [Int32(size).ir_value(loc=loc, ip=ip)]
    code = "cp.async.bulk.global.shared::cta.bulk_group"
    if hint:
        ops.append(Int64(hint).ir_value(loc=loc, ip=ip))
        cu.asm(
            None, ops, code + ".L2::cache_hint [$0],[$1],$2,$3; cp.async.bulk.commit_group;", "l,r,r,l", True, loc, ip
        )
    else:
        cu.asm(None, ops, code + " [$0],[$1],$2; cp.async.bulk.commit_group;", "l,r,r", True, loc, ip)


@dsl_user_op
def bulk_wait(*, loc=None, ip=None):
    """Wait until every bulk group of this thread is complete: its sources may be reused, its writes are visible."""
    cu.asm(None, [], "cp.async.bulk.wait_group 0;", "", True, loc, ip)


@dsl_user_op
def st_peer(smem, peer, value, *, loc=None, ip=None):
    """Store a float at this block's shared address ``smem``, in block ``peer`` of the cluster."""
    ops = [Int32(v).ir_value(loc=loc, ip=ip) for v in (smem, peer)] + [Float32(value).ir_value(loc=loc, ip=ip)]
    code = "{ .reg .b32 a; mapa.shared::cluster.u32 a,$0,$1; st.shared::cluster.f32 [a],$2; }"
    cu.asm(None, ops, code, "r,r,f", True, loc, ip)


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    ops = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c)]
    return Float32(cu.asm(T.f32(), ops, "fma.rn.f32 $0,$1,$2,$3;", "=f,f,f,f", False, loc, ip))


@dsl_user_op
def select(cond, a, b, *, loc=None, ip=None):
    """a where the Int32 ``cond`` is not zero, else b."""
    ops = [
        Float32(a).ir_value(loc=loc, ip=ip),
        Float32(b).ir_value(loc=loc, ip=ip),
        Int32(cond).ir_value(loc=loc, ip=ip),
    ]
    code = "{ .reg .pred p; setp.ne.s32 p,$3,0; selp.f32 $0,$1,$2,p; }"
    return Float32(cu.asm(T.f32(), ops, code, "=f,f,f,r", False, loc, ip))


def dot4(x, y):
    total = x[0] * y[0]
    for c in range(1, 4):
        total = fma(x[c], y[c], total)
    return total
