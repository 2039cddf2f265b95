"""Reading PTX: what is accepted, and one clear line for everything that is not PTX."""

from __future__ import annotations

import time

import pytest

from fasttrack.audit import ptx_lower, ptx_text
from fasttrack.audit.ir import Sync
from fasttrack.errors import UsageError

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
GOOD = (
    HEAD
    + ".visible .entry k(\n\t.param .u64 k_param_0\n)\n{\n"
    + "\t.reg .b64 %rd<2>;\n\tld.param.u64 %rd1, [k_param_0];\n\tret;\n}\n"
)


def lowered(text: str, index: int = 0):
    module = ptx_text.parse(text, "t.ptx")
    return ptx_lower.lower(module, module.entries[index], "t.ptx")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty file"),
        ("  \n\n", "empty file"),
        ("#!/bin/sh\necho hello\n", "not PTX"),
        ("\x7fELF\x02\x01", "not PTX"),
        (".version 8.8\n", "without .target"),
        (HEAD, "without a kernel"),
        (GOOD[:-3], "ends inside the entry k"),
        (GOOD[: GOOD.index("%rd1")], "ends inside the entry k"),
        (GOOD[: GOOD.index("k_param_0")], "ends inside the parameter list"),
        (GOOD.replace("ret;", "bra NOWHERE;"), "undefined label 'NOWHERE'"),
        (GOOD.replace("ret;", "?? ??;"), "cannot read"),
    ],
)
def test_bad_input_gives_one_line(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as error:
        lowered(text)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("t.ptx")


def test_fifty_megabytes_are_refused_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match="50 MiB of PTX; expected at most 16 MiB"):
        ptx_text.parse(GOOD + "x" * (50 << 20), "big.ptx")
    assert time.monotonic() - started < 1


def test_sixteen_megabytes_of_nonsense_do_not_hang() -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match="nested"):
        lowered(GOOD.replace("ret;", "{ " * (4 << 20)))
    with pytest.raises(UsageError, match="more than"):
        lowered(GOOD.replace("ret;", "ret; " * (3 << 20)))
    assert time.monotonic() - started < 10


def test_names_resolve_in_the_innermost_scope() -> None:
    """Inline assembly declares the same register and label in every copy."""
    block = "{{ .reg .pred p; AGAIN: setp.eq.s32 p, %r1, {0}; @p bra AGAIN; }}\n"
    text = GOOD.replace("\tret;", "\t.reg .b32 %r<4>;\n" + "".join("\t" + block.format(i) for i in (1, 2)) + "\tret;")
    code = lowered(text).instructions
    tests = [i for i in code if i.opcode.startswith("setp")]
    jumps = [i for i in code if i.opcode == "bra"]
    assert len({t.defs for t in tests}) == 2
    assert [j.targets for j in jumps] == [(t.index,) for t in tests]
    assert all(j.guard and j.guard[0] == t.defs[0] for j, t in zip(jumps, tests, strict=True))


def test_branch_tables_and_comments() -> None:
    body = (
        "\t.reg .b32 %r<4>;\n\t/* a\n comment; bra A; */\n\tmov.u32 %r1, 1; // ret;\n"
        "\tT: .branchtargets A, B;\n\tbrx.idx %r1, T;\nA:\n\tret;\nB:\n\tret;"
    )
    code = lowered(GOOD.replace("\tret;", body)).instructions
    jump = next(i for i in code if i.opcode == "brx.idx")
    assert [code[t].opcode for t in jump.targets] == ["ret", "ret"]
    assert len(jump.targets) == 2
    assert jump.line == 15


def test_calls_are_expanded() -> None:
    function = (
        ".func (.param .b32 out) half(.param .b64 p)\n{\n\t.reg .b64 %rd<3>;\n\t.reg .f32 %f<3>;\n"
        "\tld.param.u64 %rd1, [p];\n\tgriddepcontrol.wait;\n\tld.global.f32 %f1, [%rd1];\n"
        "\tst.param.f32 [out+0], %f1;\n\tret;\n}\n"
    )
    call = (
        "\t{\n\t.param .b64 param0;\n\tst.param.b64 [param0+0], %rd1;\n\t.param .b32 retval0;\n"
        "\tcall.uni (retval0), half, (param0);\n\tld.param.f32 %f9, [retval0+0];\n\t}\n\tret;"
    )
    text = GOOD.replace(HEAD, HEAD + function).replace("\tret;\n}\n", "\t.reg .f32 %f<10>;\n" + call + "\n}\n", 2)
    text = text.replace(function.replace("\tret;", "\t.reg .f32 %f<10>;\n" + call), function)
    found = lowered(text)
    assert any(i.sync is Sync.WAIT for i in found.instructions)
    assert not found.notes


def test_unknown_calls_are_noted() -> None:
    text = GOOD.replace("\tret;", "\tcall.uni other, ();\n\tret;")
    assert lowered(text).notes == ["line 10: call of other is not followed"]


def test_source_lines() -> None:
    text = GOOD.replace("\tret;", "\t.loc 1 42 7\n\tret;") + '\t.file 1 "a/kernel.cu"\n'
    code = lowered(text).instructions
    assert code[1].loc == ("a/kernel.cu", 42)
    assert code[0].loc is None
    assert code[0].line == 9
