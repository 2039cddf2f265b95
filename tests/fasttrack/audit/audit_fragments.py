"""Builds small kernels for the tests, and audits them."""

from __future__ import annotations

from fasttrack.audit import ptx_lower, ptx_text
from fasttrack.audit.subject import Subject
from fasttrack.audit.unit import audit_subject
from fasttrack.target import KernelContract, KernelParameter

_REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<40>; .reg .f32 %f<20>; .reg .b64 %rd<40>;"


def module(body: str, parameters: str = "x:u64 y:u64 n:u32", before: str = "") -> str:
    """PTX with one entry ``k``; ``parameters``: ``name:type``, ``name:size`` for a struct of bytes."""
    declared = []
    for item in parameters.split():
        name, kind = item.split(":")
        declared.append(f".param .align 8 .b8 {name}[{kind}]" if kind.isdigit() else f".param .{kind} {name}")
    lines = "\n".join(f"\t{line.strip()}" for line in body.strip().splitlines())
    head = f".version 8.8\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n{before}\n"
    return f"{head}.visible .entry k({', '.join(declared)})\n{{\n{_REGISTERS}\n{lines}\n}}\n"


def subject(
    body: str, parameters: str = "x:u64 y:u64 n:u32", contract: KernelContract | None = None, before: str = ""
) -> Subject:
    parsed = ptx_text.parse(module(body, parameters, before), "k.ptx")
    s = Subject(ptx_lower.lower(parsed, parsed.entries[0], "k.ptx"), "k", "sm_90a", contract)
    audit_subject(s)
    return s


def contract(parameters: str, **options: object) -> KernelContract:
    declared = tuple(KernelParameter(*item.split(":")) for item in parameters.split())
    return KernelContract("k", declared, **options)  # type: ignore[arg-type]


def rules(s: Subject) -> set[tuple[str, str]]:
    return {(f.rule, f.parameter) for f in s.findings}
