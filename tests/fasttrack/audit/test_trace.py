"""Addresses are traced to the right parameter through every way compilers pass pointers around."""

from __future__ import annotations

import pytest
from audit_fragments import subject

LOAD = "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x;\n"

CASES = {
    "plain": ("mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3;", {(0, False)}),
    "index first": ("mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd3, %rd1;", {(0, False)}),
    "mad": ("cvt.u64.u32 %rd3, %r1; mad.lo.s64 %rd4, %rd3, 4, %rd2;", {(1, False)}),
    "cvta": ("cvta.to.global.u64 %rd3, %rd1; add.s64 %rd4, %rd3, 64;", {(0, False)}),
    "either of two": ("setp.eq.s32 %p1, %r1, 0; selp.b64 %rd4, %rd1, %rd2, %p1;", {(0, False), (1, False)}),
    "halves": (
        "mov.b64 {%r2, %r3}, %rd2; shfl.sync.idx.b32 %r4, %r2, 0, 31, -1; mov.b64 %rd4, {%r4, %r3};",
        {(1, False)},
    ),
    "table of pointers": (
        "mul.wide.u32 %rd3, %r1, 8; add.s64 %rd5, %rd1, %rd3; ld.global.u64 %rd4, [%rd5];",
        {(0, True)},
    ),
    "index from memory": (
        "ld.global.u64 %rd5, [%rd2]; add.s64 %rd6, %rd5, 8; add.s64 %rd4, %rd1, %rd6;",
        {(0, False)},
    ),
    "pointer chased in a loop": (
        "mov.u64 %rd4, %rd1;\nL: ld.global.u64 %rd4, [%rd4+8]; setp.ne.s64 %p1, %rd4, 0; @%p1 bra L;",
        {(0, True)},
    ),
    "through shared memory": (
        "mov.u32 %r2, smem; st.shared.u64 [%r2+8], %rd2; st.shared.u64 [%r2], %rd1; bar.sync 0;\n"
        "ld.shared.u64 %rd4, [%r2+8];",
        {(1, False)},
    ),
    "loop-carried": (
        "mov.u64 %rd4, %rd2;\nL: add.s64 %rd4, %rd4, 128; setp.lt.s32 %p1, %r1, 9; @%p1 bra L;",
        {(1, False)},
    ),
    "guarded definitions": (
        "setp.eq.s32 %p1, %r1, 0; mov.u64 %rd4, %rd2; @%p1 mov.u64 %rd4, %rd1; @!%p1 mov.u64 %rd4, %rd1;",
        {(0, False)},
    ),
    "scaled pointer is no pointer": ("mul.lo.s64 %rd3, %rd2, 4; add.s64 %rd4, %rd1, %rd3;", {(0, False)}),
}


@pytest.mark.parametrize("name", CASES)
def test_origin(name: str) -> None:
    code, expected = CASES[name]
    s = subject(LOAD + code + "\nld.global.f32 %f1, [%rd4];\nret;")
    site = next(x for x in s.sites if x.instruction.text == "ld.global.f32 %f1, [%rd4]")
    assert {(o.index, o.indirect) for o in site.origins} == expected


def test_struct_members() -> None:
    s = subject(
        "ld.param.v2.u64 {%rd1, %rd2}, [a+8]; ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd2];\n"
        "mov.b64 %rd3, a; mul.wide.u32 %rd4, %r1, 8; add.s64 %rd5, %rd3, %rd4; ld.param.u64 %rd6, [%rd5];\n"
        "ld.global.f32 %f3, [%rd6];\nret;",
        "a:32",
    )
    assert [sorted((o.index, o.offset) for o in x.origins) for x in s.sites] == [[(0, 8)], [(0, 16)], [(0, None)]]


def test_descriptor_is_the_parameter_itself() -> None:
    s = subject(
        "mov.b64 %rd1, map; cvta.param.u64 %rd2, %rd1; mov.u32 %r2, smem;\n"
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r2], [%rd2, {%r1, %r1}], [%r2+4096];\n"
        "ret;",
        "n:u32 map:128",
    )
    assert [(x.access.space, [(o.kind, o.index) for o in x.origins]) for x in s.sites] == [
        ("tensor", [("paramaddr", 1)])
    ]


def test_shared_memory_is_not_global() -> None:
    s = subject(
        "mov.u32 %r2, smem; cvt.u64.u32 %rd1, %r2; cvta.shared.u64 %rd2, %rd1; mapa.u64 %rd3, %rd2, 1;\n"
        "ld.f32 %f1, [%rd2]; ld.f32 %f2, [%rd3+4]; st.f32 [%rd2], %f1;\nret;"
    )
    assert s.sites == []


def test_stack_of_a_debug_build() -> None:
    """Unoptimised code keeps pointers in a local frame that is addressed generically."""
    s = subject(
        ".local .align 8 .b8 __local_depot0[16]; mov.u64 %rd8, __local_depot0; cvta.local.u64 %rd9, %rd8;\n"
        "ld.param.u64 %rd1, [x]; st.u64 [%rd9+8], %rd1; ld.u64 %rd2, [%rd9+8]; ld.f32 %f1, [%rd2];\nret;"
    )
    assert [(x.instruction.text, [o.index for o in x.origins]) for x in s.sites] == [("ld.f32 %f1, [%rd2]", [0])]


def test_unknown_base_is_reported_as_unknown() -> None:
    s = subject("griddepcontrol.wait;\nld.global.f32 %f1, [%rd9];\nret;")
    assert [x.traced for x in s.sites] == [False]
