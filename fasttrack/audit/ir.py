"""The form both front ends (PTX text, disassembled SASS) lower a kernel to; every analysis works on it.

An *operand* is a register (``str``), an immediate (``int``) or a :class:`Leaf`: a value that comes from outside the
instruction stream, such as a kernel parameter or a special register.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class Leaf:
    """``kind``: param (value of a kernel parameter), paramaddr (its address), symbol, const, shared, local (address of
    a variable in that space; symbol is global), special (``tid`` and friends), cell (argument of a call that is not
    followed) or unknown. ``offset`` in bytes; None: not constant."""

    kind: str
    name: str = ""
    index: int = -1
    offset: int | None = 0


Operand = str | int | Leaf


@dataclass(frozen=True)
class Address:
    """Bytes at the sum of ``terms`` plus ``offset``."""

    terms: tuple[Operand, ...]
    offset: int = 0


class Sync(Enum):
    """What an instruction does to ordering, as far as an audit cares."""

    NONE = "none"
    WAIT = "griddepcontrol.wait"
    TRIGGER = "griddepcontrol.launch_dependents"
    BARRIER = "barrier of the whole block"
    BARRIER_ARRIVE = "arrive at a block or cluster barrier"
    PART_BARRIER = "barrier of some warps"
    MBAR_WAIT = "mbarrier wait"
    MBAR_ARRIVE = "mbarrier arrive"
    MBAR_EXPECT = "mbarrier arrive or expect_tx by a copy's issuer"
    MBAR_INIT = "mbarrier init"
    FENCE_ASYNC = "fence.proxy.async"


@dataclass(frozen=True)
class Access:
    """One memory access. ``what``: load, store, atomic, reduction or prefetch. ``space``: global, generic, shared,
    local, const or tensor (through a TMA descriptor at ``address``). ``order``: weak, nc, volatile, relaxed, acquire,
    release, acq_rel, mmio. ``proxy``: generic or async. ``width`` in bytes per element, 0 unknown."""

    what: str
    space: str
    address: Address
    width: int = 0
    order: str = "weak"
    scope: str = ""
    proxy: str = "generic"
    values: tuple[Operand, ...] = ()
    barrier: Address | None = None  #: mbarrier a bulk copy completes on


@dataclass(slots=True)
class Instruction:
    """``op`` names the value semantics: copy, add, sub, mul, mad, shl, mask, select, compare, pack, load, other."""

    index: int
    opcode: str
    text: str
    line: int  #: line of the PTX file, or byte offset of the SASS instruction
    loc: tuple[str, int] | None = None  #: source file and line (``.loc``)
    op: str = "other"
    defs: tuple[str, ...] = ()
    args: tuple[Operand, ...] = ()
    guard: tuple[str, bool] | None = None  #: predicate register, negated
    accesses: tuple[Access, ...] = ()
    sync: Sync = Sync.NONE
    barrier: Address | None = None  #: of mbarrier operations
    targets: tuple[int, ...] = ()  #: branch targets, instruction indices
    ends: bool = False  #: control does not continue with the next instruction (when not guarded)

    def registers(self) -> list[str]:
        """Every register the instruction reads, the guard included."""
        found = [a for a in self.args if isinstance(a, str)]
        for access in self.accesses:
            found += [a for a in (*access.address.terms, *access.values) if isinstance(a, str)]
            if access.barrier is not None:
                found += [a for a in access.barrier.terms if isinstance(a, str)]
        if self.barrier is not None:
            found += [a for a in self.barrier.terms if isinstance(a, str)]
        if self.guard:
            found.append(self.guard[0])
        return found


@dataclass(frozen=True)
class Parameter:
    """One ``.param``: position, name in the code ('' in SASS), byte offset in the parameter block, size."""

    index: int
    name: str
    offset: int
    size: int
    pointer: bool = False  #: declared ``.ptr``


@dataclass
class Function:
    """One kernel. ``stage``: ptx or sass. ``origin``: the file the code came from, as the user named it."""

    name: str
    stage: str
    origin: str
    parameters: tuple[Parameter, ...]
    instructions: list[Instruction]
    notes: list[str] = field(default_factory=list)  #: what the front end could not model

    def where(self, instruction: Instruction) -> tuple[str, int]:
        """Source file and line when known, else the code file and its line (SASS: byte offset)."""
        return instruction.loc or (self.origin, instruction.line)
