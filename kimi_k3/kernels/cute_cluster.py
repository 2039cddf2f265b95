"""Helpers for clusters and, on sm_90a, warpgroup MMA. Import them through :mod:`cute_util`, whose rules apply."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined"
from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kimi_k3.kernels.cute_asm import asm, struct

# ------------------------------------------------------------------------------------------ cluster shared memory


@dsl_user_op
def mapa(addr, rank, *, loc=None, ip=None):
    """The cluster-window address of the 32-bit shared address ``addr`` in block ``rank`` of the cluster."""
    ops = [Int32(addr).ir_value(loc=loc, ip=ip), Int32(rank).ir_value(loc=loc, ip=ip)]
    return Int32(asm(T.i32(), ops, "mapa.shared::cluster.u32 $0,$1,$2;", "=r,r,r", False, loc, ip))


@dsl_user_op
def arrive_peer(bar, *, loc=None, ip=None):
    """Arrive on the mbarrier at a cluster-window address: "this block has read its copy of a slot", no data goes along.

    Release at CTA scope, as CuTe DSL's own remote arrive: at cluster scope it is a MEMBAR.GPU, 1 us per stage (H200).
    """
    ops = [Int32(bar).ir_value(loc=loc, ip=ip)]
    asm(None, ops, "mbarrier.arrive.release.cta.shared::cluster.b64 _,[$0];", "r", True, loc, ip)


@dsl_user_op
def st_async4(addr, words, bar, *, loc=None, ip=None):
    """Asynchronous 16-byte store (16-byte aligned) to a cluster-window address; completes 16 bytes on ``bar``."""
    ops = [Int32(v).ir_value(loc=loc, ip=ip) for v in (addr, *words, bar)]
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0],{$1,$2,$3,$4},[$5];"
    asm(None, ops, code, "r,r,r,r,r,r", True, loc, ip)


# ------------------------------------------------------------------------- warpgroup MMA (sm_90a only; an arch leaf)


@cute.jit
def wgmma_descriptor(addr):
    """Shared-memory matrix descriptor of a K-major tile in 128-byte swizzle: 8-row groups 1024 bytes apart."""
    return Int64((Uint32(addr) & 0x3FFFF) >> 4) | Int64((1 << 16) | (64 << 32) | (1 << 62))


@dsl_user_op
def wgmma_bf16(a, b, c, *, loc=None, ip=None):
    """D[64 x 2 len(c)] = A[64 x 16] B^T + C, both operands by descriptor; ``c``: 4 floats per 8 columns.

    The layout of D is :func:`mma_bf16`'s, warp w of the warpgroup holding rows 16 w to 16 w + 15. Asynchronous: issue
    between wgmma_fence and wgmma_commit, and use the result after wgmma_wait.
    """
    n = len(c)
    regs = ",".join(f"${i}" for i in range(n))
    code = (
        "{ .reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n"
        f"{2 * n}k16.f32.bf16.bf16 {{{regs}}},${2 * n},${2 * n + 1},p,1,1,0,0; }}"
    )
    ops = [Float32(v).ir_value(loc=loc, ip=ip) for v in c]
    ops += [Int64(v).ir_value(loc=loc, ip=ip) for v in (a, b)]
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + ["l", "l"])
    v = asm(struct(T.f32(), n), ops, code, constraints, True, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), v, [i], loc=loc, ip=ip)) for i in range(n)]


@dsl_user_op
def wgmma_fence(*, loc=None, ip=None):
    asm(None, [], "wgmma.fence.sync.aligned;", "", True, loc, ip)


@dsl_user_op
def wgmma_commit(*, loc=None, ip=None):
    asm(None, [], "wgmma.commit_group.sync.aligned;", "", True, loc, ip)


@dsl_user_op
def wgmma_wait(pending, *, loc=None, ip=None):
    """Wait until at most ``pending`` (a Python int) committed groups are running."""
    asm(None, [], f"wgmma.wait_group.sync.aligned {pending};", "", True, loc, ip)


@dsl_user_op
def bulk_to_block(dst, src, size, bar, *, loc=None, ip=None):
    """Bulk copy of ``size`` bytes (multiple of 16) from shared address ``src`` to another block of the cluster.

    ``dst`` and ``bar`` (completed by ``size`` bytes) are cluster-window addresses of that block. Writers of the source
    need fence_async_shared and a barrier first, and this block must live until the copy has been seen to arrive.
    """
    ops = [Int32(v).ir_value(loc=loc, ip=ip) for v in (dst, src, size, bar)]
    code = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0],[$1],$2,[$3];"
    asm(None, ops, code, "r,r,r,r", True, loc, ip)
