"""Where addresses and conditions come from: backward walks over definitions.

*Pointer walks* follow only operations that keep a pointer a pointer: an index that was multiplied or shifted is not
a base address. *Affine forms* write an address as constant + sum of coefficient x unknown, to tell equal addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fasttrack.audit.flow import Flow, Loop
from fasttrack.audit.ir import Access, Address, Instruction, Leaf, Operand

_KEEPS = {"copy", "add", "or", "mask", "select", "pack"}


@dataclass(frozen=True)
class Origin:
    """Base of an address. ``kind``: param (the parameter's value), paramaddr (its own bytes: a descriptor or struct),
    symbol (module variable), local, unknown. ``indirect``: the pointer was itself loaded through that parameter."""

    kind: str
    index: int = -1
    offset: int | None = 0
    name: str = ""
    indirect: bool = False


@dataclass(frozen=True)
class Affine:
    """``constant`` + sum of coefficient x atom; an atom is a leaf or the name of an opaque definition."""

    constant: int
    terms: tuple[tuple[object, int], ...]

    @property
    def bases(self) -> tuple[object, ...]:
        return tuple(a for a, c in self.terms if c == 1)


class Tracer:
    """Backward walks over one function, memoised."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.code = flow.function.instructions
        self._origins: dict[tuple[int, str], frozenset[Origin]] = {}
        self._affine: dict[tuple[int, str], Affine] = {}
        self._stores: dict[str, list[tuple[int, Access]]] | None = None

    # --- origins of addresses ----------------------------------------------------------------------------------

    def address_origins(self, at: int, address: Address) -> frozenset[Origin]:
        """Every base the address at instruction ``at`` can have. Direct parameters win over loaded pointers."""
        found: set[Origin] = set()
        for term in address.terms:
            found |= self.origins(at, term)
        direct = {o for o in found if not o.indirect and o.kind != "unknown"}
        return frozenset(direct or found or {Origin("unknown")})

    def origins(self, at: int, operand: Operand) -> frozenset[Origin]:
        if isinstance(operand, int):
            return frozenset()
        if isinstance(operand, Leaf):
            return _leaf(operand)
        key = (at, operand)
        hit = self._origins.get(key)
        if hit is None:
            hit = self._origins[key] = frozenset(self._walk(at, operand))
        return hit

    def _walk(self, at: int, reg: str) -> set[Origin]:
        found: set[Origin] = set()
        seen: set[tuple[int, str]] = set()
        stack: list[tuple[int, str]] = [(at, reg)]
        while stack:
            where, name = stack.pop()
            for d in self.flow.defs_of(where, name):
                if (d, name) in seen:
                    continue
                seen.add((d, name))
                found |= self._step(self.code[d], name, stack)
        return found

    def _step(self, ins: Instruction, name: str, stack: list[tuple[int, str]]) -> set[Origin]:
        """Origins that end at ``ins``; registers to follow go on the stack."""
        args: Iterable[Operand] = ()
        if ins.op in _KEEPS:
            args = ins.args
            first = ins.args[0] if ins.args else None
            if isinstance(first, Leaf) and first.name == "indirect parameter":
                return self._through(ins, first.offset or 0)
        elif ins.op == "sub":
            args = ins.args[:1]
        elif ins.op == "mad":
            args = ins.args[2:3]
        elif ins.op == "load":
            return self._loaded(ins, name)
        found: set[Origin] = set()
        for a in args:
            if isinstance(a, str):
                stack.append((ins.index, a))
            elif isinstance(a, Leaf):
                found |= _leaf(a)
        return found

    def _through(self, ins: Instruction, offset: int) -> set[Origin]:
        """A load from parameter space through a register."""
        out: set[Origin] = set()
        for a in ins.args[1:]:
            for o in self.origins(ins.index, a):
                if o.kind == "paramaddr":
                    fixed = o.offset is not None and self.constant(ins.index, a)
                    out.add(Origin("param", o.index, (o.offset or 0) + offset if fixed else None, o.name))
        return out

    def constant(self, at: int, operand: Operand) -> bool:
        """Is the operand a leaf plus a constant?"""
        form = self.affine(at, operand)
        return all(isinstance(a, Leaf) for a, _ in form.terms)

    def _loaded(self, ins: Instruction, name: str) -> set[Origin]:
        """A value read from memory: what was stored there (shared, local), or a pointer found in a table (global)."""
        if not ins.accesses:
            return set()
        access = ins.accesses[0]
        if access.what == "atomic":
            return set()
        where = self.address_origins(ins.index, access.address)
        if any(o.kind == "paramaddr" for o in where):  # generic load of the parameter block
            at = access.address.offset
            return {
                Origin("param", o.index, None if o.offset is None else o.offset + at, o.name)
                for o in where
                if o.kind == "paramaddr"
            }
        if access.space in ("shared", "local"):
            return self._stored(ins, access)
        if access.width and access.width < 8:
            return set()
        return {
            Origin(o.kind, o.index, o.offset, o.name, True) for o in where if o.kind in ("param", "symbol") and not o.indirect
        } | {o for o in where if o.indirect}

    def _stored(self, ins: Instruction, access: Access) -> set[Origin]:
        """Origins of what the kernel stores to the place this load reads."""
        if self._stores is None:
            self._stores = {}
            for other in self.code:
                for a in other.accesses:
                    if a.what == "store" and a.space in ("shared", "local") and a.values:
                        self._stores.setdefault(a.space, []).append((other.index, a))
        if access.space == "shared" and 0 < access.width < 8:
            return set()
        key = self.address_affine(ins.index, access.address)
        out: set[Origin] = set()
        for i, store in self._stores.get(access.space, ()):
            if access.space == "shared" and 0 < store.width < 8:
                continue
            if not may_alias(key, self.address_affine(i, store.address)):
                continue
            for v in store.values:
                if isinstance(v, str):
                    guard = (i, v)
                    if guard not in self._origins:
                        self._origins[guard] = frozenset()  # a store of what was loaded from the same place
                        self._origins[guard] = frozenset(self._walk(i, v))
                    out |= self._origins[guard]
                elif isinstance(v, Leaf):
                    out |= _leaf(v)
        return out

    # --- affine forms ------------------------------------------------------------------------------------------

    def address_affine(self, at: int, address: Address) -> Affine:
        total, terms = address.offset, dict[object, int]()
        for t in address.terms:
            form = self.affine(at, t)
            total += form.constant
            for a, c in form.terms:
                terms[a] = terms.get(a, 0) + c
        return _affine(total, terms)

    def affine(self, at: int, operand: Operand, depth: int = 0) -> Affine:
        if isinstance(operand, int):
            return Affine(operand, ())
        if isinstance(operand, Leaf):
            offset = operand.offset if operand.kind != "param" else 0
            bare = Leaf(operand.kind, operand.name, operand.index, operand.offset if operand.kind == "param" else 0)
            return Affine(offset or 0, ((bare, 1),))
        places = self.flow.defs_of(at, operand)
        if len(places) != 1 or depth > 60:
            return Affine(0, ((("join", operand, tuple(places)), 1),))
        key = (places[0], operand)
        hit = self._affine.get(key)
        if hit is None:
            self._affine[key] = Affine(0, ((("def", *key), 1),))  # a loop-carried value is its own atom
            hit = self._affine[key] = self._affine_of(self.code[places[0]], operand, depth)
        return hit

    def _affine_of(self, ins: Instruction, reg: str, depth: int) -> Affine:
        opaque = Affine(0, ((("def", ins.index, reg), 1),))
        if ins.guard is not None or len(ins.defs) != 1 and ins.opcode.split(".")[0] != "shfl":
            return opaque
        sub = [self.affine(ins.index, a, depth + 1) for a in ins.args]
        if ins.op in ("copy", "widen") and len(sub) == 1:
            return sub[0]
        if ins.op in ("add", "sub") and len(sub) == 2:
            return _sum(sub[0], sub[1], -1 if ins.op == "sub" else 1)
        if ins.op == "or" and len(sub) == 2 and any(not s.terms for s in sub):  # compilers write disjoint adds as or
            return _sum(sub[0], sub[1], 1)
        if ins.op == "shl" and len(sub) == 2 and not sub[1].terms and 0 <= sub[1].constant < 64:
            return _scale(sub[0], 1 << sub[1].constant)
        if ins.op in ("mul", "mad"):
            for x, y in (sub[:2], sub[1::-1]):
                if not y.terms:
                    product = _scale(x, y.constant)
                    return product if ins.op == "mul" else _sum(product, sub[2], 1)
        return opaque

    # --- slices ------------------------------------------------------------------------------------------------

    def slice(self, at: int, registers: Iterable[str], loop: Loop | None = None) -> set[int]:
        """Indices of all instructions the registers at ``at`` depend on, through every operand; with a loop, only
        the part inside it."""
        seen: set[int] = set()
        stack = [(at, r) for r in registers]
        while stack:
            where, reg = stack.pop()
            for d in self.flow.defs_of(where, reg):
                if d in seen or (loop is not None and d not in loop):
                    continue
                seen.add(d)
                stack.extend((d, r) for r in self.code[d].registers())
        return seen

    def varies(self, at: int, registers: Iterable[str], loop: Loop) -> bool:
        """Do the registers change from one turn of the loop to the next?"""
        inside = self.slice(at, registers, loop)
        stack = [(at, r) for r in registers] + [(d, r) for d in inside for r in self.code[d].registers()]
        for where, reg in stack:
            places = self.flow.defs_of(where, reg)
            within = [d for d in places if d in loop]
            if within and (len(within) < len(places) or any(d >= where for d in within)):
                return True  # carried around the loop
        return any(a.what in ("load", "atomic") for d in inside for a in self.code[d].accesses)


def may_alias(a: Affine, b: Affine) -> bool:
    """Can two addresses be equal? False only for one base with constants that differ."""
    return a.terms != b.terms or a.constant == b.constant


def _leaf(leaf: Leaf) -> frozenset[Origin]:
    if leaf.kind in ("param", "paramaddr"):
        return frozenset({Origin(leaf.kind, leaf.index, leaf.offset, leaf.name)})
    if leaf.kind in ("symbol", "local"):
        return frozenset({Origin(leaf.kind, name=leaf.name)})
    return frozenset()


def _affine(constant: int, terms: dict[object, int]) -> Affine:
    kept = [(a, c) for a, c in terms.items() if c]
    return Affine(constant, tuple(sorted(kept, key=repr)))


def _sum(x: Affine, y: Affine, sign: int) -> Affine:
    terms = dict(x.terms)
    for a, c in y.terms:
        terms[a] = terms.get(a, 0) + sign * c
    return _affine(x.constant + sign * y.constant, terms)


def _scale(x: Affine, factor: int) -> Affine:
    return _affine(x.constant * factor, {a: c * factor for a, c in x.terms})
