"""One kernel under audit: its code, its analyses, its contract, and a way to report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from fasttrack.audit.contracts import Role, Roles
from fasttrack.audit.findings import Finding
from fasttrack.audit.flow import Flow
from fasttrack.audit.ir import Access, Function, Instruction, Sync
from fasttrack.audit.order import Order
from fasttrack.audit.trace import Origin, Tracer
from fasttrack.target import KernelContract


@dataclass(frozen=True)
class Site:
    """A reachable access to global memory. ``indirect``: through a pointer that was itself loaded."""

    instruction: Instruction
    access: Access
    origins: frozenset[Origin]
    roles: tuple[Role, ...]

    @property
    def index(self) -> int:
        return self.instruction.index

    @property
    def traced(self) -> bool:
        return all(o.kind != "unknown" for o in self.origins)

    @property
    def indirect(self) -> bool:
        return all(o.indirect for o in self.origins)


@dataclass
class Subject:
    function: Function
    variant: str
    arch: str
    contract: KernelContract | None
    source: str = ""  #: file the contract was declared in, for findings without ``.loc``
    findings: list[Finding] = field(default_factory=list)
    polled: set[str] = field(default_factory=set)  #: parameters some loop waits on, once the polls were checked

    def __post_init__(self) -> None:
        self.flow = Flow(self.function)
        self.tracer = Tracer(self.flow)
        self.order = Order(self.flow, self.tracer)
        self.roles = Roles(self.contract, self.function.parameters)
        self.code = self.function.instructions

    @cached_property
    def sites(self) -> list[Site]:
        """Every reachable access to global memory, prefetches into L2 excepted."""
        out = []
        for b in self.flow.order:
            for i in range(self.flow.starts[b], self.flow.ends[b]):
                for access in self.code[i].accesses:
                    site = self._site(self.code[i], access)
                    if site is not None:
                        out.append(site)
        return sorted(out, key=lambda s: s.index)

    def _site(self, ins: Instruction, access: Access) -> Site | None:
        if access.space not in ("global", "generic", "tensor") or (access.what == "prefetch" and access.order != "L1"):
            return None
        origins = self.tracer.address_origins(ins.index, access.address)
        if access.space == "generic":
            if all(o.kind in ("shared", "local", "const", "paramaddr") for o in origins) or self._window(ins, access):
                return None
            origins = frozenset(o for o in origins if o.kind not in ("shared", "local"))
        return Site(ins, access, origins, tuple(self.roles.resolve(origins)))

    def _window(self, ins: Instruction, access: Access) -> bool:
        """SASS: does the high half of a generic address come from the shared or local window?"""
        low = next((t for t in access.address.terms if isinstance(t, str)), "")
        m = re.fullmatch(r"(U?R)(\d+)", low)
        if self.function.stage != "sass" or m is None:
            return False
        high = f"{m.group(1)}{int(m.group(2)) + 1}"
        names = {getattr(a, "name", "") for d in self.tracer.slice(ins.index, [high]) for a in self.code[d].args}
        return bool(names & {"swinhi", "lwinhi"})

    @cached_property
    def uses_pdl(self) -> bool:
        """Launched with programmatic dependent launch: the contract says so, or the code cannot mean anything else."""
        if self.contract is not None:
            return self.contract.pdl
        return any(i.sync in (Sync.WAIT, Sync.TRIGGER) for i in self.code)

    def report(
        self,
        rule: str,
        message: str,
        at: Instruction | None = None,
        role: Role | None = None,
        stronger: bool = True,
    ) -> None:
        """Add a finding, unless the same one was reported for the same source place already."""
        file, line = (self.source or self.function.origin, 0)
        if at is not None:
            if at.loc is not None:
                file, line = at.loc
            elif self.function.stage == "ptx":
                file, line = self.function.origin, at.line
            else:
                file, line = self.function.origin, at.line
        self.findings.append(
            Finding(
                rule=rule,
                message=message,
                kernel=self.function.name,
                variant=self.variant,
                arch=self.arch,
                stage=self.function.stage,
                file=file,
                line=line,
                parameter=role.parameter if role else "",
                role=role.role if role else "",
                instruction=at.text[:160] if at else "",
                code_line=at.line if at else 0,
                contract=self.contract.kernel if self.contract else "",
                stronger=stronger,
            )
        )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding per rule, kernel, parameter and place: unrolled copies of one source line are one finding."""
    seen: dict[tuple[object, ...], Finding] = {}
    for f in findings:
        place = (f.file, f.line) if f.file and f.line else f.code_line
        seen.setdefault((f.rule, f.kernel, f.arch, f.stage, f.variant, f.parameter, place), f)
    return list(seen.values())
