"""Mutants of a kernel: one load hoisted above the dependency wait, or one wait deleted.

A hoisted load takes along what its address needs: every instruction of the address slice that is not above the wait
already is copied there under fresh register names, one definition per register. The load's old place keeps moves from
the fresh registers, as a compiler would leave it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from audit_oracle import Oracle

from fasttrack.audit import ptx_lower, ptx_text
from fasttrack.audit.contracts import ContractTable
from fasttrack.audit.findings import Finding
from fasttrack.audit.ir import Sync
from fasttrack.audit.ptx_text import Body, Module, Statement
from fasttrack.audit.subject import Subject
from fasttrack.audit.unit import audit_subject
from fasttrack.target import KernelContract, KernelException, KernelParameter


@dataclass
class Mutant:
    """``parameter``: name that a finding must carry; None for a deleted wait. ``harmless``: without the wait nothing
    but static weights is touched any earlier, and the kernel still waits elsewhere."""

    kind: str
    kernel: str
    line: int
    text: str
    parameter: str | None
    findings: list[Finding]
    harmless: bool = False

    @property
    def flagged(self) -> bool:
        if self.parameter is None:
            return any(f.severity == "error" for f in self.findings)
        names = (self.parameter, self.parameter.split("+")[0])  # the oracle knows the parameter, not the field
        return any(f.rule == "early-load" and f.parameter.split("+")[0] in names for f in self.findings)


def audited(module: Module, entry: Body, origin: str, contract: KernelContract | None) -> Subject:
    s = Subject(ptx_lower.lower(module, entry, origin), origin, "", contract)
    audit_subject(s)
    return s


def contract_from_code(module: Module, entry: Body, origin: str) -> KernelContract:
    """For foreign kernels: what is read early counts as weight, what is stored as output, the rest as activation.

    Non-coherent reads become declared exceptions: C++ code that promises ``const __restrict__`` gets them everywhere.
    """
    s = Subject(ptx_lower.lower(module, entry, origin), origin, "", None)
    parameters = []
    for p in s.function.parameters:
        offsets = sorted({o.offset or 0 for x in s.sites for o in x.origins if o.index == p.index})
        fields = [replace(_role(s, p.index, at), name=f"p{p.index}+{at}", offset=at) for at in offsets]
        if len(fields) == 1:
            parameters.append(replace(fields[0], name=f"p{p.index}", offset=0))
        else:
            role = "activation" if fields else "scalar"
            parameters.append(KernelParameter(f"p{p.index}", role, fields=tuple(fields)))
    trigger = "entry" if any(s.order.early(t) for t in s.order.triggers) else "after_wait"
    contract = KernelContract(entry.name, tuple(parameters), wait="late", trigger=trigger)
    again = audited(module, entry, origin, contract)
    nc = sorted({f.parameter for f in again.findings if f.rule == "nc-load"})
    return replace(contract, exceptions=tuple(KernelException("nc-load", n, "read-only in the source") for n in nc))


def _role(s: Subject, index: int, offset: int) -> KernelParameter:
    here = [x for x in s.sites if any(o.index == index and (o.offset or 0) == offset for o in x.origins)]
    early = any(s.order.early(x.index) and x.access.what == "load" for x in here)
    stored = any(x.access.what in ("store", "reduction") and not x.indirect for x in here)
    if early and stored:
        return KernelParameter("", "state", True, "read before the wait, as written")
    return KernelParameter("", "weight" if early else "output" if stored else "activation")


def mutants(text: str, origin: str, table: ContractTable | None) -> Iterator[tuple[Subject, list[Mutant]]]:
    """Per kernel that waits: the unmutated subject and its mutants. ``table`` None: contracts come from the code."""
    module = ptx_text.parse(text, origin)
    for entry in module.entries:
        contract = table.of(entry.name) if table is not None else contract_from_code(module, entry, origin)
        base = audited(module, entry, origin, contract)
        if not base.order.waits or any(s.opcode.startswith("call") for s in entry.statements):
            continue  # with calls expanded, instructions and statements no longer correspond
        found = [*_hoists(module, entry, base), *_deletions(module, entry, base)]
        yield base, found


def _hoists(module: Module, entry: Body, base: Subject) -> Iterator[Mutant]:
    oracle = Oracle(entry, base.flow)
    assert base.contract is not None
    for site in base.sites:
        if site.access.what not in ("load", "atomic") or base.order.early(site.index):
            continue
        position = oracle.parameter_of(site.index)
        declared = base.contract.parameters[position] if position is not None else None
        if declared is None or declared.role in ("weight", "scalar") or declared.early:
            continue
        if declared.fields and any(r.early for r in site.roles):
            continue  # a static member of a struct
        wait = _wait_before(base, site.index)
        body = hoist(entry, base, site.index, wait)
        mutant = audited(module, body, base.function.origin, base.contract)
        s = entry.statements[site.index]
        yield Mutant("hoist", entry.name, s.line, s.text, declared.name, mutant.findings)


def _deletions(module: Module, entry: Body, base: Subject) -> Iterator[Mutant]:
    for w in base.order.waits:
        body = copy.copy(entry)
        body.statements = list(entry.statements)
        body.statements[w] = _nop(entry.statements[w])
        mutant = audited(module, body, base.function.origin, base.contract)
        new = [f for f in mutant.findings if f.severity == "error" and f not in base.findings]
        s = entry.statements[w]
        harmless = bool(mutant.order.waits) and _exposed(mutant) == _exposed(base)
        yield Mutant("no-wait", entry.name, s.line, s.text, None, new, harmless)


def _exposed(s: Subject) -> set[int]:
    """Early accesses to anything but weights, and early triggers."""
    touched = {x.index for x in s.sites if s.order.early(x.index) and any(r.role != "weight" for r in x.roles)}
    late = s.contract is None or s.contract.trigger != "entry"
    return touched | {t for t in s.order.triggers if s.order.early(t) and late}


def _wait_before(base: Subject, index: int) -> int:
    """The first wait, in code order, from which the load can be reached."""
    return next(w for w in base.order.waits if index in base.flow.after(w))


def _nop(s: Statement) -> Statement:
    return Statement("nanosleep.u32", ["0"], None, s.line, s.loc, s.scope, "nanosleep.u32 0")


def hoist(entry: Body, base: Subject, load: int, wait: int) -> Body:
    """A copy of ``entry`` with the load at ``load``, and what its address needs, in front of ``wait``."""
    code, flow = base.function.instructions, base.flow
    moved: list[Statement] = []
    fresh: dict[tuple[int, str], str] = {}
    count = 0

    def usable(d: int) -> bool:
        above = d < wait and flow.dominates(flow.block_of[d], flow.block_of[wait])
        return above and code[d].guard is None and code[d].sync is not Sync.WAIT

    def clone(d: int) -> None:
        nonlocal count
        s = entry.statements[d]
        names: dict[str, str] = {}
        for reg in dict.fromkeys(code[d].registers()):
            if s.guard and reg == code[d].guard[0] and reg not in code[d].args:  # type: ignore[index]
                continue  # the hoisted copy runs unconditionally
            places = flow.defs_of(d, reg)
            best = sorted(places, key=lambda p: (not usable(p), p >= d, -p))
            if not best or usable(best[0]):
                continue
            key = (best[0], reg)
            if key not in fresh:
                fresh[key] = f"%mutant{count}"
                count += 1
                clone(best[0])
            names[reg] = fresh[key]
        results = {}
        for reg in code[d].defs:
            results[reg] = fresh.setdefault((d, reg), f"%mutant{count}")
            count += 1
        operands = list(s.operands)
        first = 1 if code[d].defs else 0
        operands = [_rename(o, results if k < first else names, s, entry) for k, o in enumerate(operands)]
        moved.append(Statement(s.opcode, operands, None, s.line, s.loc, s.scope, "hoisted " + s.text))

    clone(load)
    body = copy.copy(entry)
    s = entry.statements[load]
    moves = [
        Statement("mov.b32", [reg.split("@")[0], fresh[load, reg]], s.guard, s.line, s.loc, s.scope, "move")
        for reg in code[load].defs
    ] or [_nop(s)]
    new: list[Statement] = []
    place: dict[int, int] = {}
    for i, old in enumerate(entry.statements):
        place[i] = len(new)
        if i == wait:
            new += moved
        new += moves if i == load else [old]
    place[len(entry.statements)] = len(new)
    body.statements = new
    body.labels = {k: place[i] for k, i in entry.labels.items()}
    return body


def _rename(operand: str, names: dict[str, str], s: Statement, entry: Body) -> str:
    for old, new in names.items():
        plain = old.split("@")[0]
        operand = re.sub(rf"(?<![\w$%]){re.escape(plain)}(?![\w$])", new, operand)
    return operand


def unmutated_errors(subject: Subject) -> list[Finding]:
    accepted = {(e.rule, e.parameter) for e in subject.contract.exceptions} if subject.contract else set()
    return [f for f in subject.findings if f.severity == "error" and (f.rule, f.parameter) not in accepted]
