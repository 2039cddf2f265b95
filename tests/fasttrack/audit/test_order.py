"""What counts as before the wait: paths, divergent waits, barriers, early exits."""

from __future__ import annotations

import pytest
from audit_fragments import contract, rules, subject

START = (
    "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r9, [n];\n"
    "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n"
)
READ = "ld.global.f32 %f1, [%rd1];\n"
END = "st.global.f32 [%rd2], %f1;\nret;"
WAIT = "griddepcontrol.wait;\n"
XY = contract("x:activation y:output n:scalar")

CASES = {
    "wait dominates": (WAIT + READ + END, set()),
    "thread-dependent exit before the wait": (
        "setp.ge.s32 %p1, %r1, %r9; @%p1 bra OUT;\n" + WAIT + READ + END + "\nOUT: ret;",
        set(),
    ),
    "load first": (READ + WAIT + END, {("early-load", "x")}),
    "wait in one arm": (
        "setp.eq.s32 %p1, %r9, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP:\n" + READ + END,
        {("early-load", "x"), ("early-store", "y"), ("missing-wait", "")},
    ),
    "one thread waits, no barrier": (
        "setp.ne.s32 %p1, %r1, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP:\n" + READ + END,
        {("early-load", "x"), ("early-store", "y")},
    ),
    "one thread waits, barrier": (
        "setp.ne.s32 %p1, %r1, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP: bar.sync 0;\n" + READ + END,
        set(),
    ),
    "one thread waits, barrier of some warps only": (
        "setp.ne.s32 %p1, %r1, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP: bar.sync 1, 64;\n" + READ + END,
        {("early-load", "x"), ("early-store", "y")},
    ),
    "guarded wait and barrier": (
        "setp.eq.s32 %p1, %r1, 0;\n@%p1 griddepcontrol.wait;\nbar.sync 0;\n" + READ + END,
        set(),
    ),
    "some blocks wait, barrier": (
        "setp.ne.s32 %p1, %r2, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP: bar.sync 0;\n" + READ + END,
        {("early-load", "x"), ("early-store", "y")},
    ),
    "first turn of a loop": (
        "mov.u32 %r3, 0;\nL: setp.ne.s32 %p1, %r3, 0; @%p1 bra SKIP;\n" + WAIT + "SKIP:\n" + READ
        + "add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, %r9; @%p2 bra L;\n" + END,
        {("early-load", "x"), ("early-store", "y"), ("missing-wait", "")},
    ),
    "prefetch into L2": ("prefetch.global.L2 [%rd1];\n" + WAIT + READ + END, set()),
    "prefetch into L1": ("prefetch.global.L1 [%rd1];\n" + WAIT + READ + END, {("early-load", "x")}),
    "non-coherent load": (WAIT + READ.replace("global", "global.nc") + END, {("nc-load", "x")}),
    "atomic before the wait": ("atom.global.add.u32 %r5, [%rd1], 1;\n" + WAIT + END, {("early-load", "x")}),
    "store before the wait": ("st.global.u32 [%rd2], 0;\n" + WAIT + READ + END, {("early-store", "y")}),
    "no wait": (READ + END, {("missing-wait", "")}),
    "unreachable wait": (READ + END + "\n" + WAIT, {("missing-wait", "")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_accesses(name: str) -> None:
    code, expected = CASES[name]
    assert rules(subject(START + code, contract=XY)) == expected


TRIGGER = "griddepcontrol.launch_dependents;\n"


@pytest.mark.parametrize(
    ("code", "declared", "found"),
    [
        (WAIT + TRIGGER + READ + END, "after_wait", False),
        (TRIGGER + WAIT + READ + END, "after_wait", True),
        (TRIGGER + WAIT + READ + END, "entry", False),
        (WAIT + TRIGGER + READ + END, "end", True),
        (WAIT + READ + END.replace("ret", TRIGGER + "ret"), "end", False),
        (WAIT + TRIGGER + READ + END, "none", True),
        ("setp.eq.s32 %p1, %r1, 0;\n" + WAIT + READ + "@%p1 griddepcontrol.launch_dependents;\n" + END, "end", True),
        ("setp.ne.s32 %p1, %r1, 0;\n" + WAIT + READ + "@%p1 bra S;\n" + TRIGGER + "ret;\nS:\n" + END, "end", True),
    ],
)
def test_trigger_position(code: str, declared: str, found: bool) -> None:
    s = subject(START + code, contract=contract("x:activation y:output n:scalar", trigger=declared))
    assert any(f.rule == "early-trigger" for f in s.findings) == found


def test_declared_early_read_needs_no_finding() -> None:
    from dataclasses import replace

    parameters = (replace(XY.parameters[0], early=True, reason="written a step ago"), *XY.parameters[1:])
    assert rules(subject(START + READ + WAIT + END, contract=replace(XY, parameters=parameters))) == set()


def test_struct_member_may_be_a_weight() -> None:
    from fasttrack.target import KernelContract, KernelParameter

    code = "ld.param.u64 %rd1, [a+8]; ld.global.f32 %f1, [%rd1];\n" + WAIT + "ret;"
    member = KernelParameter("a.w", "weight", offset=8)
    whole = KernelContract("k", (KernelParameter("a", "activation"),))
    split = KernelContract("k", (KernelParameter("a", "activation", fields=(member,)),))
    assert rules(subject(code, "a:16", whole)) == {("early-load", "a")}
    assert rules(subject(code, "a:16", split)) == set()


def test_contract_of_another_shape() -> None:
    code = START + WAIT + READ + END
    assert rules(subject(code, contract=contract("x:activation y:output"))) == {("contract-mismatch", "")}
    assert ("contract-mismatch", "") in rules(subject(code, contract=contract("x:activation y:output n:weight")))
    assert ("contract-mismatch", "y") in rules(subject(code, contract=contract("x:activation y:weight n:scalar")))
    assert ("contract-mismatch", "x") in rules(subject(code, contract=contract("x:scalar y:output n:scalar")))


def test_without_a_contract_a_kernel_that_does_not_use_pdl_is_left_alone() -> None:
    assert rules(subject(START + READ.replace("global", "global.nc") + END)) == set()
    assert rules(subject(START + READ + TRIGGER + END)) == {("missing-wait", "")}
    found = subject(START + READ + WAIT + END).findings
    assert [(f.rule, f.severity, f.parameter) for f in found] == [("early-load", "error", "x")]
