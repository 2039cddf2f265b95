"""PTX text to statements: comments, directives, nested scopes, labels, operands. No meaning is attached here.

Written from the PTX ISA document (https://docs.nvidia.com/cuda/parallel-thread-execution/).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fasttrack.errors import UsageError

#: Larger files are refused: real kernels are below a megabyte, and a wrong file should not cost minutes.
MAX_BYTES = 16 << 20
MAX_DEPTH, MAX_STATEMENTS = 64, 200_000

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_HEAD = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b")
_LABEL = re.compile(r"([$A-Za-z_%][\w$]*)\s*:(?!:)")
_SPACE = re.compile(r"\s*")
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([A-Za-z][\w.:]*)\s*(.*)", re.S)
_PARAM = re.compile(r"\.param\s+(?P<mods>(?:\.\w+\s+(?:\d+\s+)?)*)(?P<name>[\w$%]+)\s*(?:\[\s*(?P<count>\d*)\s*\])?")
_REG = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.\w+\s+(.*)", re.S)
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", re.M)
_LINE = re.compile(r"\.(?:loc|file)\s")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_SYMBOL = re.compile(r"\.(global|shared|const|local)\s+[^;={]*?([$A-Za-z_][\w$]*)\s*(?:\[[^\]]*\])*\s*(?=[;={])")

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def type_bytes(suffix: str) -> int:
    """Bytes of a PTX type suffix such as ``f32`` or ``b8``; 0 when it is none."""
    m = re.fullmatch(r"[usfb](8|16|32|64|128)|f16x2|bf16x2|bf16|pred", suffix)
    if not m:
        return 0
    return _SIZES.get(m.group(1) or {"bf16": "16", "pred": "8"}.get(suffix, "32"), 0)


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int
    pointer: bool


@dataclass(slots=True)
class Statement:
    """One instruction. ``scope`` is the innermost ``{}`` it sits in; names resolve outwards from there."""

    opcode: str
    operands: list[str]
    guard: tuple[str, bool] | None
    line: int
    loc: tuple[int, int] | None
    scope: int
    text: str


@dataclass
class Body:
    """A function: statements in order, labels as (scope, name) -> index of the statement that follows."""

    kind: str
    name: str
    parameters: list[Parameter]
    returns: list[Parameter]
    statements: list[Statement] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  #: ``.branchtargets``
    parents: list[int] = field(default_factory=lambda: [-1])
    registers: list[set[str]] = field(default_factory=lambda: [set()])  #: names declared per scope
    symbols: dict[str, str] = field(default_factory=dict)  #: variable -> space
    line: int = 0


@dataclass
class Module:
    target: str
    bodies: dict[str, Body]
    files: dict[int, str]
    symbols: dict[str, str]

    @property
    def entries(self) -> list[Body]:
        return [b for b in self.bodies.values() if b.kind == "entry"]


def split_operands(text: str) -> list[str]:
    """Split at commas that are outside brackets and braces."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last:
        out.append(last)
    return out


def parse(text: str, origin: str) -> Module:
    """Parse a PTX module. Raises :class:`UsageError` for anything that is not complete PTX."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{len(text) >> 20} MiB of PTX", where=origin, expected=f"at most {MAX_BYTES >> 20} MiB")
    if not text.strip():
        raise UsageError("empty file", where=origin, expected="PTX (.version, .target, .entry)")
    clean = _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)
    head = re.search(r"^\s*\.version\s+\d+\.\d+\s*$", clean[:65536], re.M)
    if head is None:
        raise UsageError("not PTX: no .version line", where=origin, expected="PTX text as a compiler writes it")
    target = re.search(r"^\s*\.target\s+([\w, ]+)", clean, re.M)
    if target is None:
        raise UsageError("PTX without .target line", where=origin, expected="a complete PTX module")
    module = Module(target.group(1).split(",")[0].strip(), {}, {}, {})
    module.files = {int(n): path for n, path in _FILE.findall(clean)}
    at = 0
    while (m := _HEAD.search(clean, at)) is not None:
        module.symbols.update({name: space for space, name in _SYMBOL.findall(clean[at : m.start()])})
        body, at = _function(clean, m, origin)
        if body is not None:
            module.bodies[body.name] = body
    if not module.entries:
        raise UsageError("PTX without a kernel", where=origin, expected="at least one .entry with a body")
    return module


def _closing(text: str, at: int, origin: str) -> int:
    """Index of the ``)`` that matches the ``(`` at ``at``."""
    end = text.find(")", at)
    if end < 0:
        raise _truncated(text, at, origin, "parameter list")
    return end


def _truncated(text: str, at: int, origin: str, what: str) -> UsageError:
    line = text.count("\n", 0, at) + 1
    return UsageError(
        f"file ends inside the {what} that begins here", where=f"{origin}:{line}", expected="complete PTX"
    )


def _parameters(text: str) -> list[Parameter]:
    out = []
    for m in _PARAM.finditer(text):
        mods = m.group("mods").split()
        kinds = [x[1:] for x in mods if x.startswith(".")]
        size = next((type_bytes(k) for k in kinds if type_bytes(k)), 0)
        if m.group("count"):
            size *= int(m.group("count"))
        align = size if not m.group("count") else 1
        if ".align" in mods and ".ptr" not in mods:
            align = int(mods[mods.index(".align") + 1])
        out.append(Parameter(m.group("name"), size, align or 1, ".ptr" in mods))
    return out


def _function(text: str, head: re.Match[str], origin: str) -> tuple[Body | None, int]:
    at = head.end()
    returns: list[Parameter] = []
    at = _skip(text, at)
    if head.group(1) == "func" and text[at : at + 1] == "(":
        end = _closing(text, at, origin)
        returns = _parameters(text[at:end])
        at = _skip(text, end + 1)
    name = re.compile(r"[$A-Za-z_%][\w$]*").match(text, at)
    if name is None:
        raise UsageError("function without a name", where=f"{origin}:{text.count(chr(10), 0, at) + 1}", expected="PTX")
    at = _skip(text, name.end())
    parameters: list[Parameter] = []
    if text[at : at + 1] == "(":
        end = _closing(text, at, origin)
        parameters = _parameters(text[at:end])
        at = end + 1
    brace, semicolon = text.find("{", at), text.find(";", at)
    if semicolon >= 0 and (brace < 0 or semicolon < brace):
        return None, semicolon + 1  # a declaration
    if brace < 0:
        raise _truncated(text, head.start(), origin, f"header of {name.group()[:60]}")
    body = Body(head.group(1), name.group(), parameters, returns, line=text.count("\n", 0, head.start()) + 1)
    return body, _statements(text, brace + 1, body, head, origin)


def _skip(text: str, at: int) -> int:
    m = _SPACE.match(text, at)
    assert m is not None
    return m.end()


def _statements(text: str, at: int, body: Body, head: re.Match[str], origin: str) -> int:
    """Read the statements after the opening brace; returns the position after the closing one."""
    scopes, line, seen, loc = [0], body.line, head.start(), None
    while True:
        at = _skip(text, at)
        if at >= len(text):
            raise _truncated(text, head.start(), origin, f"{body.kind} {body.name[:60]}")
        line += text.count("\n", seen, at)
        seen = at
        c = text[at]
        if c == "}":
            scopes.pop()
            at += 1
            if not scopes:
                return at
            continue
        if c == "{":
            if len(scopes) > MAX_DEPTH:
                raise UsageError(f"scopes nested more than {MAX_DEPTH} deep", where=f"{origin}:{line}", expected="PTX")
            body.parents.append(scopes[-1])
            body.registers.append(set())
            scopes.append(len(body.parents) - 1)
            at += 1
            continue
        if c == ";":
            at += 1
            continue
        label = _LABEL.match(text, at)
        if label is not None:
            at = _skip(text, label.end())
            if text.startswith((".branchtargets", ".callprototype", ".calltargets"), at):
                end = text.find(";", at)
                if end < 0:
                    raise _truncated(text, head.start(), origin, f"{body.kind} {body.name[:60]}")
                if text.startswith(".branchtargets", at):
                    body.tables[label.group(1)] = split_operands(text[at + len(".branchtargets") : end])
                at = end + 1
            else:
                body.labels[scopes[-1], label.group(1)] = len(body.statements)
            continue
        if _LINE.match(text, at):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            m = _LOC.match(text, at)
            if m:
                loc = (int(m.group(1)), int(m.group(2)))
            at = end
            continue
        end = text.find(";", at)
        if end < 0:
            raise _truncated(text, head.start(), origin, f"{body.kind} {body.name[:60]}")
        raw = text[at:end]
        at = end + 1
        if len(body.statements) >= MAX_STATEMENTS:
            what = f"{body.kind} {body.name[:60]} has more than {MAX_STATEMENTS} instructions"
            raise UsageError(what, where=f"{origin}:{line}", expected="a kernel of ordinary size")
        if c == ".":
            _declaration(raw, body, scopes[-1])
            continue
        m = _STATEMENT.match(raw)
        if m is None:
            raise UsageError(
                f"cannot read {raw.strip()[:60]!r}", where=f"{origin}:{line}", expected="a PTX instruction"
            )
        guard = (m.group(2), bool(m.group(1))) if m.group(2) else None
        spaced = " ".join(raw.split())
        body.statements.append(Statement(m.group(3), split_operands(m.group(4)), guard, line, loc, scopes[-1], spaced))


def _declaration(raw: str, body: Body, scope: int) -> None:
    m = _REG.match(raw)
    if m:
        for name in m.group(1).split(","):
            body.registers[scope].add(name.strip())
        return
    for space, name in _SYMBOL.findall(raw + ";"):
        body.symbols[name] = space
    if raw.startswith(".param"):
        for p in _parameters(raw):
            body.symbols[p.name] = "param"
