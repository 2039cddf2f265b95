"""PTX statements to the audit's instructions: names resolved, calls expanded, memory and ordering made explicit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fasttrack.audit import ptx_text
from fasttrack.audit.ir import Access, Function, Instruction, Leaf, Operand, Parameter
from fasttrack.audit.ptx_memory import accesses_of, address_of, sync_of
from fasttrack.audit.ptx_text import Body, Module, Statement
from fasttrack.errors import UsageError

#: Calls are expanded at most this deep, and a kernel to at most this many instructions.
MAX_DEPTH, MAX_INSTRUCTIONS = 8, 200_000

_TOKEN = re.compile(
    r"(?<![\w.$%])(?:[%$A-Za-z_][\w$]*(?:\.[xyzw](?!\w))?|[-+]?(?:0[xX][0-9a-fA-F]+|\d+)[uU]?(?![\w.]))"
)
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|laneid|n?warpid|n?smid|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?|gridid|cluster_\w+|is_explicit_cluster"
    r"|n?clusterid|lanemask_\w+|envreg\d+|pm\d+\w*|dynamic_smem_size|total_smem_size|aggr_smem_size|current_graph_exec"
    r"|reserved_smem_\w+)(?:\.[xyzw])?$"
)
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)[uU]?$")

_OPS = {
    "mov": "copy",
    "cvta": "copy",
    "shfl": "copy",
    "mapa": "copy",
    "add": "add",
    "addc": "add",
    "sub": "sub",
    "subc": "sub",
    "mul": "mul",
    "mul24": "mul",
    "mad": "mad",
    "madc": "mad",
    "mad24": "mad",
    "fma": "mad",
    "shl": "shl",
    "and": "mask",
    "xor": "mask",
    "lop3": "mask",
    "not": "mask",
    "or": "or",
    "selp": "select",
    "slct": "select",
    "min": "select",
    "max": "select",
    "setp": "compare",
    "set": "compare",
    "prmt": "pack",
    "shf": "pack",
    "bfi": "pack",
}
_FLOAT = re.compile(r"b?f(16|32|64|16x2|32x2)$|e\dm\d\w*$|tf32$")


@dataclass(frozen=True)
class _Frame:
    """One function being expanded. ``suffix`` keeps its registers apart; ``cells`` maps parameter names to cells."""

    body: Body
    suffix: str
    cells: dict[str, str]
    depth: int
    stack: tuple[str, ...]


def lower(module: Module, entry: Body, origin: str) -> Function:
    """The kernel ``entry`` as a :class:`Function`; raises :class:`UsageError` on an undefined label."""
    return _Lowering(module, entry, origin).run()


def parameters_of(entry: Body) -> tuple[Parameter, ...]:
    out, at = [], 0
    for i, p in enumerate(entry.parameters):
        at = -(-at // p.align) * p.align
        out.append(Parameter(i, p.name, at, p.size, p.pointer))
        at += p.size
    return tuple(out)


class _Lowering:
    def __init__(self, module: Module, entry: Body, origin: str) -> None:
        self.module, self.entry, self.origin = module, entry, origin
        self.parameters = {p.name: p for p in parameters_of(entry)}
        self.out: list[Instruction] = []
        self.jumps: list[tuple[int, list[tuple[str, int, str]]]] = []
        self.labels: dict[tuple[str, int, str], int] = {}
        self.returns: list[tuple[int, str]] = []
        self.ends: dict[str, int] = {}
        self.calls = 0
        self.notes: list[str] = []
        self.reqntid = 0

    def run(self) -> Function:
        self._body(_Frame(self.entry, "", {}, 0, (self.entry.name,)))
        self._emit(Instruction(0, "ret", "ret (implicit)", self.out[-1].line if self.out else 0, ends=True))
        for index, wanted in self.jumps:
            found = []
            for suffix, scope, name in wanted:
                place = self._label(suffix, scope, name)
                if place is None:
                    where = f"{self.origin}:{self.out[index].line}"
                    raise UsageError(f"branch to undefined label {name!r}", where=where, expected="complete PTX")
                found.append(place)
            self.out[index].targets = tuple(found)
        for index, suffix in self.returns:
            self.out[index].targets = (self.ends[suffix],)
        return Function(self.entry.name, "ptx", self.origin, tuple(self.parameters.values()), self.out, self.notes)

    def _label(self, suffix: str, scope: int, name: str) -> int | None:
        parents = self.frames[suffix].parents
        while scope >= 0:
            hit = self.labels.get((suffix, scope, name))
            if hit is not None:
                return hit
            scope = parents[scope]
        return None

    @property
    def frames(self) -> dict[str, Body]:
        if not hasattr(self, "_frames"):
            self._frames: dict[str, Body] = {}
        return self._frames

    def _emit(self, instruction: Instruction) -> None:
        if len(self.out) >= MAX_INSTRUCTIONS:
            raise UsageError(
                f"kernel {self.entry.name[:60]} has more than {MAX_INSTRUCTIONS} instructions with its calls expanded",
                where=self.origin,
                expected="a kernel of ordinary size",
            )
        instruction.index = len(self.out)
        self.out.append(instruction)

    def _body(self, frame: _Frame) -> None:
        body = frame.body
        self.frames[frame.suffix] = body
        starts: dict[int, list[tuple[int, str]]] = {}
        for (scope, name), at in body.labels.items():
            starts.setdefault(at, []).append((scope, name))
        nested = any(body.registers[1:])
        for i, s in enumerate(body.statements):
            for scope, name in starts.get(i, ()):
                self.labels[frame.suffix, scope, name] = len(self.out)
            self._statement(s, frame, nested)
        for scope, name in starts.get(len(body.statements), ()):
            self.labels[frame.suffix, scope, name] = len(self.out)
        self.ends[frame.suffix] = len(self.out)

    def _name(self, token: str, scope: int, frame: _Frame, nested: bool) -> str:
        """The unique name of a register, given where it is used."""
        if nested:
            while scope > 0:
                for declared in frame.body.registers[scope]:
                    stem, _, many = declared.partition("<")
                    if token == declared or (many and re.fullmatch(re.escape(stem) + r"\d+", token)):
                        return f"{token}@{scope}{frame.suffix}"
                scope = frame.body.parents[scope]
        return token + frame.suffix

    def operand(self, text: str, s: Statement, frame: _Frame, nested: bool) -> list[Operand]:
        """Registers, integers and symbols in an operand; everything else (floats, ``_``) gives nothing."""
        out: list[Operand] = []
        for m in _TOKEN.finditer(text):
            token = m.group()
            if _INTEGER.match(token):
                out.append(int(token.rstrip("uU"), 0))
            elif token == "_":
                continue
            elif _SPECIAL.match(token):
                out.append(Leaf("special", token[1:].split(".")[0]))
            elif token[0] == "%" or self._declared(token, s.scope, frame):
                out.append(self._name(token, s.scope, frame, nested))
            elif token in frame.cells:
                out.append(Leaf("cell", frame.cells[token]))
            elif token in self.parameters and not frame.suffix:
                out.append(Leaf("paramaddr", token, self.parameters[token].index))
            else:
                space = frame.body.symbols.get(token) or self.module.symbols.get(token, "")
                if space == "param":
                    out.append(Leaf("cell", token + frame.suffix))
                elif space:
                    kind = "symbol" if space == "global" else space
                    out.append(Leaf(kind, token + frame.suffix * (space == "local")))
                elif re.match(r"[0-9]|WARP_SZ", token) is None and re.fullmatch(r"[$A-Za-z_][\w$]*", token):
                    out.append(Leaf("symbol", token))
        return out

    @staticmethod
    def _declared(token: str, scope: int, frame: _Frame) -> bool:
        while scope >= 0:
            for declared in frame.body.registers[scope]:
                stem, _, many = declared.partition("<")
                if token == declared or (many and re.fullmatch(re.escape(stem) + r"\d+", token)):
                    return True
            scope = frame.body.parents[scope]
        return False

    def _statement(self, s: Statement, frame: _Frame, nested: bool) -> None:
        base = s.opcode.split(".", 1)[0]
        loc = None
        if s.loc is not None and s.loc[0] in self.module.files:
            loc = (self.module.files[s.loc[0]], s.loc[1])
        ins = Instruction(0, s.opcode, s.text, s.line, loc)
        if s.guard:
            ins.guard = (self._name(s.guard[0], s.scope, frame, nested), s.guard[1])
        if base == "call":
            self._call(s, ins, frame, nested)
            return
        if base in ("bra", "brx"):
            names = frame.body.tables.get(s.operands[-1], []) if base == "brx" else [s.operands[-1]]
            if base == "brx":
                ins.args = tuple(self.operand(s.operands[0], s, frame, nested))
            ins.ends = True
            self._emit(ins)
            self.jumps.append((ins.index, [(frame.suffix, s.scope, n) for n in names]))
            return
        if base in ("ret", "exit", "trap"):
            ins.ends = True
            self._emit(ins)
            if base == "ret" and frame.suffix:
                self.returns.append((ins.index, frame.suffix))
            return
        parts = [self.operand(o, s, frame, nested) for o in s.operands]
        ins.sync, ins.barrier = sync_of(s, parts)
        ins.accesses = accesses_of(s, parts)
        self._values(ins, s, parts, base)
        self._emit(ins)

    def _values(self, ins: Instruction, s: Statement, parts: list[list[Operand]], base: str) -> None:
        """Definitions, inputs and value semantics."""
        if base in ("st", "red", "prefetch", "prefetchu", "bar", "barrier", "fence", "membar", "griddepcontrol") or (
            not parts or s.operands[0].startswith("[")
        ):
            ins.args = tuple(a for p in parts for a in p if isinstance(a, str))
            if base == "st" and ".param" in s.opcode and isinstance(parts[0][0], Leaf):
                self._cell(ins, parts)
            return
        ins.defs = tuple(a for a in parts[0] if isinstance(a, str))
        rest = [a for p in parts[1:] for a in p]
        last = s.opcode.rsplit(".", 1)[-1]
        if base in ("ld", "ldu") and ".param" in s.opcode:
            self._parameter(ins, s, parts[1])
        elif base in ("ld", "ldu", "atom", "multimem", "tex", "suld", "ldmatrix", "wmma"):
            ins.op, ins.args = "load", tuple(a for a in rest if isinstance(a, str))
        elif base == "cvt":
            kinds = s.opcode.split(".")
            wide = ptx_text.type_bytes(kinds[-2]) == 8 and ptx_text.type_bytes(kinds[-1]) < 8
            real = any(_FLOAT.match(k) for k in kinds)
            ins.op, ins.args = ("other" if real else "widen" if wide else "copy"), tuple(rest)
        elif base == "elect":
            ins.op, ins.args = "other", (Leaf("special", "laneid"),)
        elif base in ("shfl", "mapa"):  # another lane's value; the same place in another block's shared memory
            ins.op, ins.args = "copy", tuple(parts[1])
        elif base == "mov" and "{" in s.operands[0] + s.operands[1]:
            ins.op, ins.args = "pack", tuple(rest)
        else:
            op = _OPS.get(base, "other")
            if op in ("add", "sub", "mul", "mad", "select") and _FLOAT.match(last):
                op = "other"
            ins.op, ins.args = op, tuple(rest)

    def _parameter(self, ins: Instruction, s: Statement, address: list[Operand]) -> None:
        """A read of parameter space: one value per result."""
        offset = sum(a for a in address if isinstance(a, int))
        step = ptx_text.type_bytes(s.opcode.rsplit(".", 1)[-1])
        base = next((a for a in address if isinstance(a, Leaf)), None)
        if base is not None and base.kind == "cell":
            ins.op, ins.args = (
                "parameters",
                tuple(f"cell:{base.name}+{offset + k * step}" for k in range(len(ins.defs))),
            )
        elif base is not None and not any(isinstance(a, str) for a in address):
            ins.op = "parameters"
            ins.args = tuple(Leaf("param", base.name, base.index, offset + k * step) for k in range(len(ins.defs)))
        else:  # through a register that holds the parameter's address
            ins.op = "load"
            ins.accesses = (Access("load", "param", address_of(address), 8),)

    @staticmethod
    def _cell(ins: Instruction, parts: list[list[Operand]]) -> None:
        """``st.param`` into a call's argument: a definition of a pseudo register per element."""
        cell = parts[0][0]
        assert isinstance(cell, Leaf)
        offset = sum(a for a in parts[0] if isinstance(a, int))
        ins.op, ins.defs = "copy", (f"cell:{cell.name}+{offset}",)
        ins.args = tuple(a for p in parts[1:] for a in p)
        ins.accesses = ()

    def _call(self, s: Statement, ins: Instruction, frame: _Frame, nested: bool) -> None:
        groups = [o for o in s.operands if o.startswith("(")]
        callee = next((o for o in s.operands if not o.startswith("(")), "")
        body = self.module.bodies.get(callee)
        if body is None or frame.depth >= MAX_DEPTH or callee in frame.stack:
            name = callee if body is not None or not callee.startswith("%") else "a function pointer"
            if callee not in ("vprintf", "__assertfail", "__assert_fail"):
                self.notes.append(f"line {s.line}: call of {name} is not followed")
            ins.args = tuple(a for o in s.operands for a in self.operand(o, s, frame, nested) if isinstance(a, str))
            self._emit(ins)
            return
        self.calls += 1
        suffix = f"~{self.calls}"
        actual = ptx_text.split_operands(groups[-1].strip("()")) if body.parameters and groups else []
        results = ptx_text.split_operands(groups[0].strip("()")) if body.returns and groups else []
        cells = {}
        for formal, given in zip([*body.parameters, *body.returns], [*actual, *results], strict=False):
            cells[formal.name] = frame.cells.get(given, given + frame.suffix)
        if ins.guard:  # the call may be skipped
            ins.guard, ins.ends = (ins.guard[0], not ins.guard[1]), True
            self._emit(ins)
        self._body(_Frame(body, suffix, cells, frame.depth + 1, (*frame.stack, callee)))
        if ins.guard:
            ins.targets = (len(self.out),)
