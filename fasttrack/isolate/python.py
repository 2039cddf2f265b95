"""Facts of changed Python files: whole files through their syntax tree, hunks statement by statement."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

from fasttrack.isolate.diff import FileChange
from fasttrack.isolate.facts import REQUIRED, Collector, Fact, collect
from fasttrack.isolate.source import Text

#: A statement in a hunk may span this many lines.
_LONGEST = 60
_PARAMETER = re.compile(r"\s+(\w+)\s*:[^=]+?=\s*([^=].*?),\s*(?:#.*)?$")  # annotated, or it may be a call's argument


@dataclass(frozen=True)
class Change:
    """``fact`` is new in the later version; ``before``: the value a default had."""

    fact: Fact
    before: str = ""


def module_of(path: str) -> str:
    """Dotted name of a file: ``src/a/b.py`` is ``a.b``."""
    parts = path.removesuffix(".py").split("/")
    if parts[:1] in (["src"], ["python"], ["lib"]):
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1:] == ["__init__"] else parts)


def parses(text: str) -> bool:
    return _parse(text) is not None


def changed_facts(change: FileChange, before: Text | None, after: Text | None) -> list[Change]:
    """Facts the change brings. Facts whose line the change did not touch are not new, wherever they moved."""
    old = _facts(change.old, before, change, False)
    new = _facts(change.new, after, change, True)
    had = {(f.kind, f.key) for f in old}
    values: dict[str, list[str]] = {}  # overloads and branches give one name several values
    for f in old:
        if f.kind == "default" and f.value != REQUIRED:
            values.setdefault(f.key, []).append(f.value)
    out = []
    for f in new:
        if f.kind == "default":
            was = values.get(f.key, [])
            if was and f.value not in was:
                out.append(Change(f, was[0]))
        elif (f.kind, f.key) not in had:
            out.append(Change(f))
    seen: set[tuple[str, str]] = set()
    unique = []
    for c in out:
        if (c.fact.kind, c.fact.key) not in seen:
            seen.add((c.fact.kind, c.fact.key))
            unique.append(c)
    return unique


def _facts(path: str, text: Text | None, change: FileChange, later: bool) -> list[Fact]:
    if text is None or not path.endswith(".py"):
        return []
    package = path.endswith("__init__.py")
    tree = _parse(text.text) if text.complete else None
    if tree is not None:
        return collect(tree.body, Collector(module_of(path), package))
    return _fragments(path, package, change, later)


def _fragments(path: str, package: bool, change: FileChange, later: bool) -> list[Fact]:
    """Facts of the lines a diff shows. Statements are cut out by trial; nesting is known by indentation only."""
    collector = Collector(module_of(path), package)
    for hunk in change.hunks:
        sign, number = ("-", 2) if later else ("+", 1)
        lines = [(entry[number], entry[3]) for entry in hunk.lines if entry[0] != sign]
        k = 0
        while k < len(lines):
            m = _PARAMETER.match(str(lines[k][1]))
            if m:  # a line of a parameter list whose beginning the diff does not show
                collector.facts.append(Fact("default", f"({m.group(1)})", int(lines[k][0]), m.group(2)))
                k += 1
                continue
            size, nodes = _statement([t for _, t in lines[k : k + _LONGEST]])
            if nodes:
                collector.offset = int(lines[k][0]) - 1
                text = str(lines[k][1])
                depth = len(text) - len(text.lstrip())
                collector.guarded += depth > 0  # not module level: nothing here acts at import for certain
                collect(nodes, collector)
                collector.guarded -= depth > 0
                if 0 < depth <= 4:
                    collector.facts += _members(nodes, int(lines[k][0]))
            k += size
    return collector.facts


def _members(nodes: list[ast.stmt], line: int) -> list[Fact]:
    """Annotated names one level in: members of a class, as far as a hunk can tell."""
    found = [
        n for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is not None
    ]
    return [Fact("default", ast.unparse(n.target), line, ast.unparse(n.value)) for n in found if n.value is not None]


def _statement(lines: list[str]) -> tuple[int, list[ast.stmt]]:
    """The shortest statement at the start of ``lines``: how many lines it takes, and its nodes."""
    if not lines[0].strip() or lines[0].lstrip().startswith("#"):
        return 1, []
    for size in range(1, len(lines) + 1):
        part = textwrap.dedent("\n".join(lines[:size]))
        if lines[size - 1].rstrip().endswith(":"):  # a header alone: give it a body
            part = part.rstrip() + " pass"
            part = f"try: pass\n{part}" if part.startswith(("except", "finally")) else part
            part = f"if 0: pass\n{part}" if part.startswith(("elif", "else")) else part
        part += "\ndef _(): pass" if part.startswith("@") else ""
        tree = _parse(part)
        if tree is not None:
            return size, tree.body
        if size > 1 and lines[size - 1].strip() and _depth("\n".join(lines[:size])) <= 0:
            break  # brackets are closed and it still is no statement
    return 1, []


def _depth(text: str) -> int:
    return sum(text.count(c) for c in "([{") - sum(text.count(c) for c in ")]}")


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of somebody else's code
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
