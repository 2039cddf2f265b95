"""New and changed dependencies: requirement files, pyproject.toml, setup.py, submodules, new imports."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass

from fasttrack.isolate.diff import FileChange
from fasttrack.isolate.source import Text

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?\s*((?:[=<>!~]=?|@)\s*[^;#\"']*)?")
_QUOTED = re.compile(
    r"[\"']([A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?\s*[=<>!~]=[^\"']*|[A-Za-z0-9][A-Za-z0-9._-]*)[\"']"
)
_STANDARD = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Dependency:
    """``before``: the requirement it replaces; '' for a new one."""

    name: str
    requirement: str
    line: int
    before: str = ""


def changed(change: FileChange, before: Text | None, after: Text | None) -> list[Dependency]:
    """Requirements a change adds or alters. Removed ones are not reported: they cannot add risk."""
    path = change.path
    if path.endswith("pyproject.toml"):
        old, new = _pyproject(before, change, False), _pyproject(after, change, True)
    elif path.endswith(("setup.py", "setup.cfg", ".yml", ".yaml", "Pipfile")):
        old, new = _quoted(change.removed), _quoted(change.added)
    elif path.endswith((".txt", ".in")):
        old, new = _plain(change.removed), _plain(change.added)
    else:
        return []
    out = []
    for name, (requirement, line) in new.items():
        was = old.get(name)
        if was is None or was[0] != requirement:
            out.append(Dependency(name, requirement, line, was[0] if was else ""))
    return out


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _plain(lines: list[tuple[int, str]]) -> dict[str, tuple[str, int]]:
    out = {}
    for number, text in lines:
        text = text.split("#")[0].strip()
        m = _REQUIREMENT.match(text)
        if m and text and not text.startswith("-"):
            out[_normal(m.group(1))] = (text, number)
        elif text.startswith(("-r ", "-e ", "--")):
            out[text] = (text, number)
    return out


def _quoted(lines: list[tuple[int, str]]) -> dict[str, tuple[str, int]]:
    out = {}
    for number, text in lines:
        versioned = re.search(r"[=<>!~]=", text.split("#")[0])  # a bare name counts beside one with a version
        for m in _QUOTED.finditer(text.split("#")[0]):
            requirement = m.group(1)
            name = _REQUIREMENT.match(requirement)
            if name and versioned:
                out[_normal(name.group(1))] = (requirement, number)
        stripped = text.strip().lstrip("- ")
        m2 = _REQUIREMENT.fullmatch(stripped.strip("\"',"))
        if m2 and m2.group(3):
            out.setdefault(_normal(m2.group(1)), (stripped.strip("\"',"), number))
    return out


def _pyproject(text: Text | None, change: FileChange, later: bool) -> dict[str, tuple[str, int]]:
    lines = change.added if later else change.removed
    if text is None or not text.complete:
        return _quoted(lines)
    try:
        document = tomllib.loads(text.text)
    except tomllib.TOMLDecodeError:
        return _quoted(lines)
    project = document.get("project", {})
    found = [*project.get("dependencies", []), *document.get("build-system", {}).get("requires", [])]
    for group in (project.get("optional-dependencies", {}), document.get("dependency-groups", {})):
        for listed in group.values():
            found += [x for x in listed if isinstance(x, str)]
    poetry = document.get("tool", {}).get("poetry", {}).get("dependencies", {})
    found += [f"{k} {v}" for k, v in poetry.items()]
    out = {}
    rows = text.text.splitlines()
    for requirement in found:
        m = _REQUIREMENT.match(requirement)
        if m:
            line = next((i + 1 for i, row in enumerate(rows) if requirement in row or m.group(1) in row), 1)
            out[_normal(m.group(1))] = (requirement, line)
    return out


def is_foreign(module: str, own: set[str]) -> bool:
    """Is a top-level module neither Python's own nor of the changed repository?"""
    return bool(module) and module not in _STANDARD and module not in own and not module.startswith("_")
