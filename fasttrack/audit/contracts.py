"""Which contract judges a kernel, and what it says about each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from fasttrack.audit.ir import Parameter
from fasttrack.audit.rules import FOREIGN_ROLES, ROLES, RULES
from fasttrack.audit.trace import Origin
from fasttrack.errors import UsageError
from fasttrack.target import OTHER_LAUNCH, KernelContract, KernelException, KernelParameter

WAITS, TRIGGERS = ("first", "late", "none"), ("entry", "after_wait", "end", "none")
TABLE_NAMES = ("contracts.yaml", "contracts.yml", "contracts.json")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Parameter(_Strict):
    name: str
    role: str
    early: bool = False
    reason: str = ""
    buffer: str = ""
    offset: int = 0
    fields: list[_Parameter] = []

    def declared(self) -> KernelParameter:
        fields = tuple(f.declared() for f in self.fields)
        return KernelParameter(self.name, self.role, self.early, self.reason, self.buffer, self.offset, fields)


class _Exception(_Strict):
    rule: str
    parameter: str = ""
    reason: str


class _Kernel(_Strict):
    kernel: str
    parameters: list[_Parameter] | None = None
    pdl: bool = True
    wait: str = "first"
    trigger: str = "after_wait"
    exceptions: list[_Exception] = []


class _Table(_Strict):
    kernels: list[_Kernel]
    schedules: dict[str, list[str]] = {}


@dataclass(frozen=True)
class ContractTable:
    """Contracts by symbol prefix, and launch orders over those prefixes. ``file``: where they were declared."""

    contracts: tuple[KernelContract, ...] = ()
    schedules: dict[str, tuple[str, ...]] | None = None
    file: str = ""

    def of(self, symbol: str) -> KernelContract | None:
        """The contract with the longest prefix of the symbol."""
        hits = [c for c in self.contracts if symbol.startswith(c.kernel)]
        return max(hits, key=lambda c: len(c.kernel), default=None)


def load_table(path: Path) -> ContractTable:
    """Read ``contracts.yaml`` or ``.json``; :class:`UsageError` names the field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        raw: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"cannot be read: {str(error).splitlines()[0]}", where=str(path), expected="YAML or JSON"
        ) from None
    try:
        table = _Table.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(x) for x in first["loc"]) or "document"
        raise UsageError(
            f"{field}: {first['msg']}", where=str(path), expected="kernels: [{kernel, parameters, ...}]"
        ) from None
    contracts = []
    for i, k in enumerate(table.kernels):
        contract = KernelContract(
            kernel=k.kernel,
            parameters=tuple(p.declared() for p in k.parameters or ()),
            pdl=k.pdl,
            wait=k.wait,
            trigger=k.trigger,
            exceptions=tuple(KernelException(e.rule, e.parameter, e.reason) for e in k.exceptions),
        )
        problem = contract_problem(contract)
        if problem:
            raise UsageError(f"kernels.{i}: {problem}", where=str(path), expected="a consistent contract")
        contracts.append(contract)
    known = {OTHER_LAUNCH, *(c.kernel for c in contracts)}
    for name, order in table.schedules.items():
        for kernel in order:
            if kernel not in known:
                where = f"{path}: schedules.{name}"
                raise UsageError(
                    f"unknown kernel {kernel!r}", where=where, expected=f"one of {', '.join(sorted(known))}"
                )
    return ContractTable(tuple(contracts), {k: tuple(v) for k, v in table.schedules.items()}, str(path))


def save_table(path: Path, contracts: Iterable[KernelContract], schedules: Mapping[str, Sequence[str]]) -> None:
    """Write a table that :func:`load_table` reads back to the same contracts."""

    def parameter(p: KernelParameter) -> dict[str, Any]:
        given = {k: v for k, v in vars(p).items() if v and k != "fields"}
        return {**given, **({"fields": [parameter(f) for f in p.fields]} if p.fields else {})}

    kernels = [
        {
            "kernel": c.kernel,
            "pdl": c.pdl,
            "wait": c.wait,
            "trigger": c.trigger,
            "parameters": [parameter(p) for p in c.parameters],
            "exceptions": [vars(e) for e in c.exceptions],
        }
        for c in contracts
    ]
    document = {"kernels": kernels, "schedules": {k: list(v) for k, v in schedules.items()}}
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=120), encoding="utf-8")


def contract_problem(contract: KernelContract) -> str | None:
    """What is wrong with a contract on its own, in words; None when nothing is."""
    for p in (*contract.parameters, *(f for q in contract.parameters for f in q.fields)):
        if p.role not in ROLES:
            return f"parameter {p.name!r} has unknown role {p.role!r} (known: {', '.join(ROLES)})"
        if p.early and p.role != "weight" and not p.reason:
            return f"parameter {p.name!r} is early without a reason"
    if contract.wait not in WAITS:
        return f"wait {contract.wait!r} is none of {', '.join(WAITS)}"
    if contract.trigger not in TRIGGERS:
        return f"trigger {contract.trigger!r} is none of {', '.join(TRIGGERS)}"
    for e in contract.exceptions:
        if e.rule not in RULES:
            return f"exception for unknown rule {e.rule!r}"
        if not e.reason:
            return f"exception for {e.rule} without a reason"
    return None


@dataclass(frozen=True)
class Role:
    """What the contract says about the memory behind one origin. ``sure``: a contract said so, not a default."""

    parameter: str
    role: str
    early: bool
    sure: bool


class Roles:
    """Resolves origins of addresses to parameters and their roles, for one kernel."""

    def __init__(self, contract: KernelContract | None, parameters: Sequence[Parameter]) -> None:
        self.contract, self.parameters = contract, parameters
        self.declared = contract.parameters if contract is not None else ()

    def of(self, origin: Origin) -> Role:
        if origin.kind in ("param", "paramaddr"):
            if origin.index < len(self.declared):
                p = self.declared[origin.index]
                p = next((f for f in p.fields if f.offset == origin.offset), p)
                return Role(p.name, p.role, p.early or p.role == "weight", True)
            name = self.parameters[origin.index].name if 0 <= origin.index < len(self.parameters) else ""
            role = _foreign(name)
            return Role(_plain(name, origin.index), role, role == "weight", False)
        if origin.kind == "symbol":
            role = _foreign(origin.name)
            return Role(origin.name, role, role == "weight", False)
        if origin.kind == "const":
            return Role(origin.name, "weight", True, True)
        return Role("?", "activation", False, False)

    def resolve(self, origins: Iterable[Origin]) -> list[Role]:
        """Distinct roles behind an access. A declared scalar is an offset, not a base, unless it is all there is."""
        found = {self.of(o) for o in origins if o.kind not in ("shared", "local")}
        pointers = {r for r in found if r.role != "scalar"}
        return sorted(pointers or found, key=lambda r: r.parameter)


def _foreign(name: str) -> str:
    if re.search(r"_param_\d+$", name):  # the symbol's name says nothing about its parameters
        return "activation"
    for pattern, role in FOREIGN_ROLES:
        if re.search(pattern, name):
            return role
    return "activation"


def _plain(name: str, index: int) -> str:
    """A name a reader can use: compilers call parameters ``<symbol>_param_<n>``, SASS knows the position only."""
    return f"parameter {index}" if not name or re.search(r"_param_\d+$", name) else name
