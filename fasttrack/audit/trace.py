"""Where addresses and conditions come from: backward walks over definitions.

*Pointer walks* follow only operations that keep a pointer a pointer: an index that was multiplied or shifted is not
a base address. *Affine forms* write an address as constant + sum of coefficient x unknown, to tell equal addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fasttrack.audit.flow import Flow, Loop
from fasttrack.audit.ir import Access, Address, Instruction, Leaf, Operand

_KEEPS = {"copy", "add", "or", "mask", "select", "pack"}


@dataclass(frozen=True)
class Origin:
    """Base of an address. ``kind``: param (the parameter's value), paramaddr (its own bytes: a descriptor or struct),
    symbol (global variable), const, shared, local, unknown. ``indirect``: the pointer was itself loaded through it."""

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

    # --- origins of addresses ----------------------------------------------------------------------------------

    def address_origins(self, at: int, address: Address) -> frozenset[Origin]:
        """Every base the address at instruction ``at`` can have."""
        found: set[Origin] = set()
        for term in address.terms:
            found |= self.origins(at, term)
        return frozenset({o for o in found if o.kind != "unknown"} or {Origin("unknown")})

    def origins(self, at: int, operand: Operand) -> frozenset[Origin]:
        if isinstance(operand, int):
            return frozenset()
        if isinstance(operand, Leaf):
            return _leaf(operand)
        key = (at, operand)
        hit = self._origins.get(key)
        if hit is None:
            hit = self._origins[key] = frozenset(self._placed(at, operand, o) for o in self._walk(at, operand))
        return hit

    def _placed(self, at: int, operand: str, origin: Origin) -> Origin:
        """SASS knows one address for all parameters; the constant added to it says which one is meant."""
        if origin.kind != "paramaddr" or origin.index >= 0:
            return origin
        form = self.affine(at, operand)
        if len(form.terms) == 1:
            for p in self.flow.function.parameters:
                if p.offset <= form.constant < p.offset + p.size:
                    return Origin("paramaddr", p.index, form.constant - p.offset)
        return Origin("unknown")

    def _walk(self, at: int, reg: str) -> set[Origin]:
        """Reachable leaves. A state is (instruction, register, loads crossed so far: 0, 1, 2 for more)."""
        found: set[Origin] = set()
        seen: set[tuple[int, str, int]] = set()
        stack: list[tuple[int, str, int]] = [(at, reg, 0)]
        while stack:
            where, name, level = stack.pop()
            for d in self.flow.defs_of(where, name):
                if (d, name, level) in seen:
                    continue
                seen.add((d, name, level))
                for a in self._sources(self.code[d], name, level, found, stack):
                    if isinstance(a, str):
                        stack.append((d, a, level))
                    elif isinstance(a, Leaf):
                        found |= _leaf(a, level)
        return found

    def _sources(
        self, ins: Instruction, name: str, level: int, found: set[Origin], stack: list[tuple[int, str, int]]
    ) -> Iterable[Operand]:
        """Operands a pointer in ``name`` may come from; memory reads add to ``found`` and ``stack`` themselves."""
        if ins.op == "add" and len(ins.args) > 1:  # pointer + index: an index read from memory is no base
            ends = [self._ends_in(ins.index, a) for a in ins.args]
            if "param" in ends:
                return [a for a, end in zip(ins.args, ends, strict=True) if end != "load"]
            return ins.args
        if ins.op in _KEEPS:
            return ins.args
        if ins.op == "parameters":  # one leaf per result
            return (ins.args[ins.defs.index(name)],)
        if ins.op == "sub":
            return ins.args[:1]
        if ins.op == "mad":
            return ins.args[2:3]
        if ins.op == "lea":  # (a << shift) + b
            return ins.args[1:2]
        if ins.op == "widen":  # 32 bits hold an address in shared memory only
            form = self.affine(ins.index, ins.args[0]) if ins.args else Affine(0, ())
            return [a for a, c in form.terms if c == 1 and isinstance(a, Leaf) and a.kind == "shared"]
        if ins.op == "load" and ins.accesses and ins.accesses[0].what != "atomic":
            self._loaded(ins, name, level, found, stack)
        return ()

    def _ends_in(self, at: int, operand: Operand, depth: int = 0) -> str:
        """Where a chain of single definitions ends: param (a parameter's value), load (global memory) or other."""
        for _ in range(64):
            if isinstance(operand, Leaf):
                return "param" if operand.kind == "param" else "other"
            places = self.flow.defs_of(at, operand) if isinstance(operand, str) else []
            if len(places) != 1:
                return "other"
            ins = self.code[places[0]]
            if ins.op == "load" and ins.accesses and ins.accesses[0].space in ("global", "generic"):
                return "load"
            if ins.op == "parameters":
                return "param"
            if ins.op == "add" and depth < 8:
                ends = {self._ends_in(ins.index, a, depth + 1) for a in ins.args if a != operand}
                return "param" if "param" in ends else "load" if "load" in ends else "other"
            if ins.op != "copy" or len(ins.args) != 1:
                return "other"
            at, operand = ins.index, ins.args[0]
        return "other"

    def _loaded(
        self,
        ins: Instruction,
        name: str,
        level: int,
        found: set[Origin],
        stack: list[tuple[int, str, int]],
    ) -> None:
        """A value read from memory: what the kernel stored there (shared, local), or a pointer found in a table."""
        access = ins.accesses[0]
        form = self.address_affine(ins.index, access.address)
        base = form.terms[0][0] if len(form.terms) == 1 else None
        if isinstance(base, Leaf) and base.kind == "paramaddr":  # a generic load of the parameter block
            found |= _leaf(Leaf("param", base.name, base.index, form.constant), level)
        elif (space := self._space(access, form)) in ("shared", "local"):
            for i, value in self._stored(ins, access, space, name, form):
                if isinstance(value, str):
                    stack.append((i, value, level))
                elif isinstance(value, Leaf):
                    found |= _leaf(value, level)
        elif access.width == 0 or access.width >= 8:
            for t in access.address.terms:
                if isinstance(t, str):
                    stack.append((ins.index, t, min(level + 1, 2)))
                elif isinstance(t, Leaf):
                    found |= _leaf(t, level + 1)

    @staticmethod
    def _space(access: Access, form: Affine) -> str:
        """The space of an access; generic ones are resolved when their base is a variable."""
        if access.space == "generic":
            kinds = {a.kind for a, c in form.terms if c == 1 and isinstance(a, Leaf)} & {"shared", "local"}
            return kinds.pop() if kinds else "generic"
        return access.space

    def _stored(
        self, ins: Instruction, access: Access, space: str, name: str, form: Affine
    ) -> Iterator[tuple[int, Operand]]:
        """Values the kernel stores where ``name`` is loaded from, with the index of the store."""
        sass = self.flow.function.stage == "sass"  # operands are 32-bit registers, whatever the access width
        if not sass and 0 < access.width < 8:
            return
        wanted = form.constant + ins.defs.index(name) * (4 if sass else access.width or 8)
        for i, store in self._stores.get(space, ()):
            if not sass and 0 < store.width < 8:
                continue
            there = self.address_affine(i, store.address)
            for k, value in enumerate(store.values):
                at = there.constant + k * (4 if sass else store.width or 8)
                if there.terms != form.terms or at == wanted:
                    yield i, value

    @cached_property
    def _stores(self) -> dict[str, list[tuple[int, Access]]]:
        out: dict[str, list[tuple[int, Access]]] = {}
        for ins in self.code:
            for a in ins.accesses:
                if a.what == "store" and a.space in ("shared", "local", "generic") and a.values:
                    space = self._space(a, self.address_affine(ins.index, a.address))
                    out.setdefault(space, []).append((ins.index, a))
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
        if ins.guard is not None or reg != ins.defs[0]:
            return opaque
        sub = [self.affine(ins.index, a, depth + 1) for a in ins.args]
        if ins.op in ("copy", "widen") and len(sub) == 1:
            return sub[0]
        if ins.op == "parameters":
            return sub[0]
        if ins.op in ("add", "sub") and len(sub) == 2:
            return _sum(sub[0], sub[1], -1 if ins.op == "sub" else 1)
        if ins.op == "add" and len(sub) == 3:
            return _sum(_sum(sub[0], sub[1], 1), sub[2], 1)
        if ins.op == "lea" and len(sub) == 3 and not sub[2].terms:
            return _sum(_scale(sub[0], 1 << (sub[2].constant & 63)), sub[1], 1)
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


def _leaf(leaf: Leaf, level: int = 0) -> frozenset[Origin]:
    """``level``: loads between the leaf and the pointer. One load of a parameter's own bytes is its value."""
    if leaf.kind == "paramaddr" and level:
        return frozenset({Origin("param", leaf.index, None, leaf.name, level > 1)})
    if leaf.kind in ("param", "paramaddr"):
        return frozenset({Origin(leaf.kind, leaf.index, leaf.offset, leaf.name, level > 0)})
    if level and leaf.kind in ("const", "shared", "local"):
        return frozenset({Origin("unknown")})  # a pointer that was read from there points anywhere
    if leaf.kind in ("symbol", "const", "shared", "local"):
        return frozenset({Origin(leaf.kind, name=leaf.name, indirect=level > 0)})
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
