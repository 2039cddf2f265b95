"""One unit of work: the PTX and the cubin of one kernel variant, audited against its contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fasttrack.audit import check_order, check_poll, check_proxy, cubin, ptx_lower, ptx_text
from fasttrack.audit.contracts import ContractTable, contract_problem
from fasttrack.audit.findings import Audited, Finding
from fasttrack.audit.ir import Function
from fasttrack.audit.sass_lower import SassLowering
from fasttrack.audit.schedule import buffer_of
from fasttrack.audit.subject import Subject, merged
from fasttrack.errors import UsageError
from fasttrack.target import KernelContract


@dataclass
class Unit:
    """``contract`` judges every kernel of the unit; without one, ``table`` is asked by symbol."""

    variant: str
    arch: str
    ptx: str | None
    cubin: bytes | None
    ptx_file: str = ""
    cubin_file: str = ""
    source: str = ""
    contract: KernelContract | None = None
    table: ContractTable = field(default_factory=ContractTable)


@dataclass
class Outcome:
    findings: list[Finding] = field(default_factory=list)
    audited: list[Audited] = field(default_factory=list)
    contracts: list[tuple[KernelContract, str]] = field(default_factory=list)
    late_stores: dict[tuple[str, str], tuple[str, int, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  #: input that cannot be used, one line each
    no_sass: str = ""  #: why the SASS was not audited; '' when it was


def audit_unit(unit: Unit) -> Outcome:
    """Never raises for bad input: it becomes one line in ``problems``."""
    out = Outcome()
    functions: list[Function] = []
    try:
        if unit.ptx is not None:
            functions += ptx_functions(unit.ptx, unit.ptx_file or unit.variant)
    except UsageError as error:
        out.problems.append(str(error))
    if unit.cubin is None:
        out.no_sass = f"{unit.variant} has no cubin"
    elif cubin.find_nvdisasm() is None:
        out.no_sass = "no nvdisasm (pip install nvidia-cuda-nvdisasm, or set NVDISASM)"
    else:
        try:
            functions += sass_functions(unit.cubin, unit.cubin_file or unit.variant)
        except UsageError as error:
            out.problems.append(str(error))
    subjects = [_subject(unit, f, functions) for f in functions]
    for s in subjects:
        audit_subject(s)
        out.audited.append(_summary(s))
        if s.contract is not None:
            out.contracts.append((s.contract, s.source))
            _late_stores(s, out)
    for sass in (s for s in subjects if s.function.stage == "sass"):
        ptx = next((s for s in subjects if s.function.stage == "ptx" and s.function.name == sass.function.name), None)
        if ptx is not None:
            check_poll.lost_in_assembly(ptx, sass)
            _late_weights(ptx, sass)
    out.findings = merged(f for s in subjects for f in s.findings)
    return out


def ptx_functions(text: str, origin: str) -> list[Function]:
    module = ptx_text.parse(text, origin)
    return [ptx_lower.lower(module, entry, origin) for entry in module.entries]


def sass_functions(data: bytes, origin: str) -> list[Function]:
    layouts = cubin.layouts(data, origin)
    raw, files = cubin.disassemble(data, origin)
    return [
        SassLowering(f["function-name"], layouts[f["function-name"]], files, origin).run(f["sass-instructions"])
        for f in raw
        if f["function-name"] in layouts and f["sass-instructions"]
    ]


def audit_subject(s: Subject) -> None:
    """Run every rule that looks at code; findings are in ``s.findings`` afterwards."""
    check_order.check(s)
    check_poll.check(s)
    check_proxy.check(s)


def _subject(unit: Unit, function: Function, functions: Iterable[Function]) -> Subject:
    if function.stage == "sass":  # SASS has no parameter names; the PTX of the same kernel may
        twin = next((f for f in functions if f.stage == "ptx" and f.name == function.name), None)
        if twin is not None and len(twin.parameters) == len(function.parameters):
            named = zip(function.parameters, twin.parameters, strict=True)
            function.parameters = tuple(replace(p, name=q.name) for p, q in named)
    contract = unit.contract or unit.table.of(function.name)
    source = unit.source or (unit.table.file if contract is not None else "")
    s = Subject(function, unit.variant, unit.arch, contract, source)
    problem = contract_problem(contract) if contract is not None else None
    if problem:
        s.report("contract-mismatch", problem)
    return s


def _summary(s: Subject) -> Audited:
    return Audited(
        kernel=s.function.name,
        variant=s.variant,
        arch=s.arch,
        stage=s.function.stage,
        instructions=len(s.code),
        accesses=len(s.sites),
        traced=sum(x.traced for x in s.sites),
        waits=len(s.order.waits),
        triggers=len(s.order.triggers),
        notes=list(s.function.notes),
    )


def _late_stores(s: Subject, out: Outcome) -> None:
    assert s.contract is not None
    for site in s.sites:
        if site.access.what not in ("store", "reduction") or site.index not in s.order.after_trigger:
            continue
        for role in site.roles:
            declared = next((p for p in s.contract.parameters if p.name == role.parameter), None)
            if declared is not None:
                file, line = s.function.where(site.instruction)
                key = (s.contract.kernel, buffer_of(declared))
                out.late_stores.setdefault(key, (file, line, site.instruction.text[:160]))


def _late_weights(ptx: Subject, sass: Subject) -> None:
    """Weight loads that are early in PTX and no longer early in SASS."""
    if not sass.order.waits:
        return
    for name in sorted(_early_weights(ptx) - _early_weights(sass)):
        site = next((x for x in sass.sites if any(r.parameter == name for r in x.roles)), None)
        if site is not None:
            role = next(r for r in site.roles if r.parameter == name)
            text = f"loads of {name} are before griddepcontrol.wait in PTX; the assembler placed all of them behind it"
            sass.report("late-weight", text, site.instruction, role)


def _early_weights(s: Subject) -> set[str]:
    loads = (x for x in s.sites if x.access.what == "load" and s.order.early(x.index))
    return {r.parameter for x in loads for r in x.roles if r.role == "weight"}
