"""Findings, exceptions and the report of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fasttrack.audit.rules import RULES
from fasttrack.target import KernelContract


@dataclass(frozen=True)
class Finding:
    """One place that breaks one rule. ``line`` belongs to ``file``: source when the code carries ``.loc``, else the
    code file, where ``stage`` sass counts bytes. ``excepted``: the declared reason when a contract accepts it."""

    rule: str
    message: str
    kernel: str  #: symbol
    variant: str  #: name the target or the folder gives it
    arch: str
    stage: str  #: ptx, sass, schedule, contract
    file: str
    line: int
    parameter: str = ""
    role: str = ""
    instruction: str = ""
    code_line: int = 0  #: line of the PTX text, or byte offset in SASS
    contract: str = ""  #: kernel prefix of the contract that judged it
    excepted: str | None = None
    stronger: bool = True  #: False: reported below the rule's own severity (no contract says the code is wrong)

    @property
    def severity(self) -> str:
        severity = RULES[self.rule].severity
        return severity if self.stronger or severity != "error" else "warning"


@dataclass
class Audited:
    """What was looked at in one kernel, one architecture, one stage."""

    kernel: str
    variant: str
    arch: str
    stage: str
    instructions: int
    accesses: int  #: to global memory
    traced: int  #: of those, with a known base
    waits: int
    triggers: int
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    audited: list[Audited] = field(default_factory=list)
    sass: bool = True  #: False: some or all SASS was not audited
    sass_reason: str = ""
    seconds: float = 0.0

    def open(self, severity: str) -> list[Finding]:
        """Findings of a severity that no exception accepts."""
        return [f for f in self.findings if f.excepted is None and f.severity == severity]


def apply_exceptions(findings: Iterable[Finding], contracts: Iterable[tuple[KernelContract, str]]) -> list[Finding]:
    """Mark accepted findings, and add one ``unused-exception`` for every exception that accepted nothing.

    ``contracts``: each contract that was used, with the file it was declared in.
    """
    unique: dict[str, tuple[KernelContract, str]] = {c.kernel: (c, file) for c, file in contracts}
    used: set[tuple[str, str, str]] = set()
    out = []
    for f in findings:
        declared = unique.get(f.contract)
        for e in declared[0].exceptions if declared else ():
            if e.rule == f.rule and e.parameter == f.parameter:
                used.add((f.contract, e.rule, e.parameter))
                f = replace(f, excepted=e.reason)
                break
        out.append(f)
    for kernel, (contract, file) in unique.items():
        for e in contract.exceptions:
            if (kernel, e.rule, e.parameter) in used:
                continue
            known = "" if e.rule in RULES else f"; there is no rule {e.rule!r}"
            out.append(
                Finding(
                    "unused-exception",
                    f"exception for {e.rule} on {e.parameter or 'the kernel'} matches no finding{known}",
                    kernel,
                    kernel,
                    "",
                    "contract",
                    file,
                    0,
                    parameter=e.parameter,
                    contract=kernel,
                )
            )
    return out
