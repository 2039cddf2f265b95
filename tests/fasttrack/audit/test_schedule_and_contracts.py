"""Declared schedules, contract tables and exceptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from audit_fragments import module

from fasttrack.audit.contracts import load_table
from fasttrack.audit.run import audit_folder
from fasttrack.audit.schedule import check, simulate
from fasttrack.errors import UsageError
from fasttrack.target import OTHER_LAUNCH, KernelContract, KernelParameter


def kernel(name: str, reads: str = "", writes: str = "", early: str = "", **options: object) -> KernelContract:
    parameters = [KernelParameter(r, "activation") for r in reads.split()]
    parameters += [KernelParameter(e, "activation", True, "said so") for e in early.split()]
    parameters += [KernelParameter(w, "output") for w in writes.split()]
    return KernelContract(name, tuple(parameters), **options)  # type: ignore[arg-type]


def found(*chain: KernelContract) -> list[tuple[str, str, str]]:
    contracts = {c.kernel: c for c in chain}
    return [(f.rule, f.kernel, f.parameter) for f in check({"s": [c.kernel for c in chain]}, contracts)]


def test_guarantees_along_a_chain() -> None:
    chain = simulate([kernel("a"), kernel("b", trigger="entry"), kernel("c"), kernel("d", pdl=False), kernel("e")])
    assert [sorted(s.start) for s in chain] == [[], [], [], [0, 1, 2], [0, 1, 2]]
    assert [sorted(s.after_wait) for s in chain] == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_waiting_everywhere_is_clean() -> None:
    assert found(kernel("a", "h", "x"), kernel("b", "x", "y"), kernel("c", "x y", "h")) == []


def test_early_read_of_the_kernel_before() -> None:
    assert found(kernel("a", "", "x"), kernel("b", early="x")) == [("exposed-dependent", "b", "x")]


def test_early_read_two_kernels_back_needs_a_late_trigger_between() -> None:
    a, b, c = kernel("a", "", "x"), kernel("b", "", "z"), kernel("c", early="x")
    assert found(a, b, c) == []
    assert found(a, replace(b, trigger="entry"), c) == [("exposed-dependent", "c", "x")]
    assert found(a, replace(b, trigger="end"), c) == []


def test_a_launch_that_is_not_audited_is_in_stream_order() -> None:
    a, b = kernel("a", "", "x", trigger="entry"), kernel("b", early="x", trigger="entry")
    contracts = {"a": a, "b": b}
    assert [f.parameter for f in check({"s": ("a", "b", OTHER_LAUNCH)}, contracts)] == ["x"]
    assert check({"s": ("a", OTHER_LAUNCH, "b", OTHER_LAUNCH)}, contracts) == []


def test_kernel_that_never_waits_loses_the_guarantee_for_those_behind() -> None:
    a, b, c = kernel("a", "", "x"), kernel("b", "", "z", wait="none"), kernel("c", "x")
    assert ("exposed-dependent", "c", "x") in found(a, b, c)
    assert found(a, b, replace(c, pdl=False)) == []


def test_overwriting_what_is_still_read() -> None:
    a, b, c = kernel("a", "x", "p"), kernel("b", "", "q", wait="none", trigger="entry"), kernel("c", "", "x")
    assert ("exposed-dependent", "c", "x") in found(a, b, c)


def test_layer_repeats() -> None:
    """The first kernel reads early what the last kernel of the layer before wrote."""
    assert ("exposed-dependent", "a", "h") in found(kernel("a", early="h"), kernel("b", "", "h"))


def test_shared_buffer_under_two_names() -> None:
    a = KernelContract("a", (KernelParameter("out", "output", buffer="hidden"),))
    b = KernelContract("b", (KernelParameter("x", "activation", True, "said so", buffer="hidden"),))
    assert found(a, b) == [("exposed-dependent", "b", "x")]


def test_early_read_that_nothing_vouches_for() -> None:
    assert found(kernel("a", early="mystery")) == [("unlinked-early-read", "a", "mystery")]


TABLE = """
kernels:
  - kernel: k
    parameters: [{name: x, role: activation}, {name: y, role: output}, {name: n, role: scalar}]
    exceptions: %s
"""
EARLY = "ld.param.u64 %rd1, [x]; ld.global.f32 %f1, [%rd1];\ngriddepcontrol.wait;\nret;"


@pytest.mark.parametrize(
    ("exceptions", "accepted", "unused"),
    [
        ("[]", 0, 0),
        ("[{rule: early-load, parameter: x, reason: measured}]", 1, 0),
        ("[{rule: early-load, parameter: y, reason: measured}]", 0, 1),
        ("[{rule: early-load, parameter: x, reason: a}, {rule: nc-load, parameter: x, reason: b}]", 1, 1),
    ],
)
def test_exceptions_are_checked_again(tmp_path: Path, exceptions: str, accepted: int, unused: int) -> None:
    (tmp_path / "k.ptx").write_text(module(EARLY))
    (tmp_path / "contracts.yaml").write_text(TABLE % exceptions)
    report, problems = audit_folder(tmp_path)
    assert not problems
    assert sum(f.excepted is not None for f in report.findings) == accepted
    assert sum(f.rule == "unused-exception" for f in report.findings) == unused
    assert len(report.open("error")) == (1 - accepted) + unused


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("kernels: 3", "kernels: "),
        ("[", "cannot be read"),
        ("kernels: [{kernel: k, waits: first}]", "waits"),
        ("kernels: [{kernel: k, wait: sometimes}]", "wait 'sometimes' is none of first, late, none"),
        ("kernels: [{kernel: k, parameters: [{name: x, role: wait}]}]", "unknown role 'wait'"),
        ("kernels: [{kernel: k, parameters: [{name: x, role: state, early: true}]}]", "early without a reason"),
        ("kernels: [{kernel: k, exceptions: [{rule: made-up, reason: r}]}]", "unknown rule 'made-up'"),
        ("kernels: [{kernel: k}]\nschedules: {s: [k, j]}", "unknown kernel 'j'"),
    ],
)
def test_bad_tables_give_one_line(tmp_path: Path, table: str, expected: str) -> None:
    path = tmp_path / "contracts.yaml"
    path.write_text(table)
    with pytest.raises(UsageError) as error:
        load_table(path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_longest_prefix_wins(tmp_path: Path) -> None:
    path = tmp_path / "contracts.yaml"
    path.write_text("kernels: [{kernel: gemm}, {kernel: gemm_small}]")
    table = load_table(path)
    assert [table.of(n).kernel for n in ("gemm_small_8", "gemm_s")] == ["gemm_small", "gemm"]  # type: ignore[union-attr]
    assert table.of("other") is None
