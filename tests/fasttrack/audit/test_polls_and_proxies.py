"""Loops that are no polls, polls that are right, and fences in the right place: nothing to report."""

from __future__ import annotations

import pytest
from audit_fragments import contract, rules, subject

START = (
    "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r9, [n]; mov.u32 %r1, %tid.x;\n"
    "griddepcontrol.wait;\n"
)
END = "\nst.global.u32 [%rd2], %r5;\nret;"
BOX = contract("x:mailbox y:output n:scalar")
XY = contract("x:activation y:output n:scalar")

LOOPS = {
    "length read again every turn": (
        "mov.u32 %r3, 0;\nL: add.s32 %r3, %r3, 1; ld.global.u32 %r5, [%rd1]; setp.lt.s32 %p1, %r3, %r5; @%p1 bra L;",
        XY,
        set(),
    ),
    "search": (
        "L: add.s64 %rd1, %rd1, 4; ld.global.u32 %r5, [%rd1]; setp.ne.s32 %p1, %r5, 0; @%p1 bra L;",
        XY,
        set(),
    ),
    "poll of a flag": (
        "L: ld.acquire.gpu.global.u32 %r5, [%rd1]; setp.eq.s32 %p1, %r5, 0; @%p1 bra L;",
        XY,
        {("unbounded-poll", "x")},
    ),
    "weak poll of a flag": (
        "L: ld.global.u32 %r5, [%rd1]; setp.eq.s32 %p1, %r5, 0; @%p1 bra L;",
        XY,
        {("unbounded-poll", "x"), ("weak-poll", "x")},
    ),
    "poll with a clock": (
        "mov.u64 %rd5, %clock64;\nL: ld.volatile.global.u32 %r5, [%rd1];\n"
        "mov.u64 %rd6, %clock64; sub.s64 %rd7, %rd6, %rd5;\n"
        "setp.gt.s64 %p2, %rd7, 99; @%p2 bra D; setp.eq.s32 %p1, %r5, 0; @%p1 bra L;\nD:",
        XY,
        set(),
    ),
    "poll of several words with a mask of what is missing": (
        "mov.u32 %r3, 3;\nL: ld.relaxed.sys.global.u32 %r5, [%rd1]; setp.ne.s32 %p1, %r5, 0; and.b32 %r4, %r3, 2;\n"
        "selp.b32 %r3, %r4, %r3, %p1; ld.relaxed.sys.global.u32 %r6, [%rd1+4]; setp.ne.s32 %p2, %r6, 0;\n"
        "and.b32 %r4, %r3, 1;\n"
        "selp.b32 %r3, %r4, %r3, %p2; setp.ne.s32 %p3, %r3, 0; @%p3 bra L;",
        BOX,
        {("unbounded-poll", "x")},
    ),
    "compare-and-swap lock": (
        "L: atom.global.cas.b32 %r5, [%rd1], 0, 1; setp.ne.s32 %p1, %r5, 0; @%p1 bra L;",
        XY,
        {("unbounded-poll", "x")},
    ),
    "mailbox polled for this device only": (
        "L: ld.relaxed.gpu.global.u32 %r5, [%rd1]; setp.eq.s32 %p1, %r5, 0; @%p1 bra L;",
        BOX,
        {("unbounded-poll", "x"), ("weak-poll", "x")},
    ),
    "mailbox read once": ("ld.relaxed.sys.global.u32 %r5, [%rd1];", BOX, {("collapsed-poll", "x")}),
    "condition taken out of the loop": (
        "ld.relaxed.sys.global.u32 %r5, [%rd1]; setp.eq.s32 %p1, %r5, 0;\nL: @%p1 bra L;",
        XY,
        {("collapsed-poll", "x")},
    ),
    "wait for a barrier in shared memory": (
        "mov.u32 %r2, smem;\nL: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0; @!%p1 bra L;\n"
        "ld.global.u32 %r5, [%rd1];",
        XY,
        set(),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    code, declared, expected = LOOPS[name]
    assert rules(subject(START + code + END, contract=declared)) == expected


PUSH = (
    "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x;\n"
    "griddepcontrol.wait;\nld.global.u64 %rd3, [%rd1];\n"
)


@pytest.mark.parametrize(
    ("store", "found"),
    [
        ("st.relaxed.sys.global.u32 [%rd3], 1;", False),
        ("st.release.sys.global.u32 [%rd3], 1;", False),
        ("st.volatile.global.u32 [%rd3], 1;", False),
        ("multimem.st.relaxed.sys.global.u32 [%rd3], %r1;", False),
        ("red.relaxed.sys.global.add.u32 [%rd3], 1;", False),
        ("st.global.u32 [%rd3], 1;", True),
        ("st.global.cg.v4.b32 [%rd3], {%r1, %r1, %r1, %r1};", True),
        ("st.relaxed.gpu.global.u32 [%rd3], 1;", True),
        ("red.global.add.u32 [%rd3], 1;", True),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r1], 64;", True),
    ],
)
def test_mailbox_store_through_a_table_of_peers(store: str, found: bool) -> None:
    s = subject(PUSH + store + "\nret;", contract=contract("x:mailbox y:output n:scalar"))
    assert any(f.rule == "weak-mailbox-store" and f.parameter == "x" for f in s.findings) == found


COPY = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r2+4096];\n"
    "F: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2+4096], %r7; @!%p3 bra F;\n"
)
LOOP = "mov.u32 %r2, smem; mov.u32 %r3, 0;\nL:\n" + COPY + "{read}\n{fence}\nbar.sync 0;\n"
AGAIN = "add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, %r9; @%p2 bra L;\n"


@pytest.mark.parametrize(
    ("read", "fence", "again", "found"),
    [
        ("ld.shared.u32 %r5, [%r2+64];", "", AGAIN, True),
        ("ld.shared.u32 %r5, [%r2+64];", "fence.proxy.async.shared::cta;", AGAIN, False),
        ("ld.shared.u32 %r5, [%r2+64];", "fence.proxy.async;", AGAIN, False),
        ("ld.shared.u32 %r5, [%r2+64];", "membar.cta;", AGAIN, True),
        ("ld.shared.u32 %r5, [%r2+64];", "", "", False),  # filled once
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r2];", "", AGAIN, True),
        ("st.shared.u32 [%r2+8192], %r1; ld.shared.u32 %r5, [%r2+8192];", "", AGAIN, False),  # another object
    ],
)
def test_refill_by_the_same_block(read: str, fence: str, again: str, found: bool) -> None:
    s = subject(START + LOOP.format(read=read, fence=fence) + again + END, contract=XY)
    assert (("missing-proxy-fence", "") in rules(s)) == found


@pytest.mark.parametrize(("fence", "found"), [("", True), ("fence.proxy.async.shared::cta;", False)])
def test_bulk_copy_out_of_written_shared_memory(fence: str, found: bool) -> None:
    code = (
        "mov.u32 %r2, smem; ld.global.u32 %r5, [%rd1]; st.shared.u32 [%r2], %r5;\n" + fence + "\nbar.sync 0;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 1024;"
    )
    assert (("missing-proxy-fence", "") in rules(subject(START + code + END, contract=XY))) == found
