"""``fasttrack isolate``: what a change touches, against the paths it declares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttrack.errors import UsageError
from fasttrack.isolate import dependencies, layout
from fasttrack.isolate.diff import FileChange, parse
from fasttrack.isolate.facts import REQUIRED
from fasttrack.isolate.python import Change, changed_facts, module_of, parses
from fasttrack.isolate.report import File, Finding, Radius
from fasttrack.isolate.source import DiffSource, GitSource, Text


def from_git(repo: Path, base: str, head: str, allowed: Sequence[str]) -> Radius:
    """The change from the merge base of ``base`` and ``head`` to ``head``."""
    source = GitSource(repo, base, head)
    return analyse(source, Radius(source.base[:12], source.head[:12], tuple(allowed)))


def from_diff(path: Path, allowed: Sequence[str]) -> Radius:
    """The change a unified diff describes. Files are seen as far as the diff shows them."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), expected="a unified diff") from None
    changes = parse(text, str(path))
    if not changes:
        raise UsageError("empty diff", where=str(path), expected="at least one changed file")
    return analyse(DiffSource(changes), Radius("", str(path), tuple(allowed)))


def analyse(source: DiffSource, radius: Radius) -> Radius:
    own = {p.split("/")[0] for c in source.changes for p in c.paths} | {
        module_of(p).split(".")[0] for c in source.changes for p in c.paths if p.endswith(".py")
    }
    packages = tuple(module_of(a.rstrip("/").removesuffix("/**").removesuffix("/*")) for a in radius.allowed)
    for change in source.changes:
        before, after = source.before(change), source.after(change)
        inside = all(any(layout.matches(p, a) for a in radius.allowed) for p in change.paths)
        component = next((c for p in change.paths if (c := layout.component(p))), "")
        radius.files.append(
            File(
                change.path,
                change.old,
                change.status,
                inside,
                component,
                len(change.added),
                len(change.removed),
            )
        )
        report = _Reporter(radius, change, component)
        if not inside:
            report.add("outside-scope", change.first_line, f"{change.status}, outside the declared paths")
        if component:
            report.add("shared-component", change.first_line, f"touches the {component}")
        _content(report, change, before, after)
        if change.path.endswith(".py") and not change.binary and not layout.quiet(change.path):
            _python(report, source, change, before, after, own, packages)
    return radius


class _Reporter:
    def __init__(self, radius: Radius, change: FileChange, component: str) -> None:
        self.radius, self.change, self.component = radius, change, component

    def add(self, kind: str, line: int, message: str) -> None:
        self.radius.findings.append(Finding(kind, self.change.path, line, message, self.component))


def _content(report: _Reporter, change: FileChange, before: Text | None, after: Text | None) -> None:
    if change.submodule:
        commits = [t.removeprefix("Subproject commit ")[:12] for _, t in (*change.removed, *change.added)]
        report.add("submodule", change.first_line, f"submodule {change.status}: {' -> '.join(commits)}")
        return
    if change.binary:
        report.add("binary", 0, f"binary file {change.status}")
        return
    if change.mode:
        report.add("mode", 0, f"file mode {change.mode}")
    head = "\n".join((after or before).text.splitlines()[:15]) if (after or before) else ""  # type: ignore[union-attr]
    if layout.is_generated(change.path, head):
        report.add("generated", change.first_line, f"generated file {change.status}")
    if layout.is_dependency_file(change.path) and change.status != "deleted":
        for d in dependencies.changed(change, before, after):
            was = f" (was {d.before})" if d.before else " (new)"
            report.add("dependency", d.line, f"{d.requirement}{was}")


def _python(
    report: _Reporter,
    source: DiffSource,
    change: FileChange,
    before: Text | None,
    after: Text | None,
    own: set[str],
    packages: tuple[str, ...],
) -> None:
    if after is not None and after.complete and not parses(after.text):
        report.add("not-analysed", 0, "cannot be parsed as Python")
    for c in changed_facts(change, before, after):
        _fact(report, source, change, c, own, packages)


def _fact(
    report: _Reporter, source: DiffSource, change: FileChange, c: Change, own: set[str], packages: tuple[str, ...]
) -> None:
    f = c.fact
    if f.kind == "effect":
        report.add("import-effect", f.line, f.text)
    elif f.kind == "patch":
        itself = module_of(change.new)
        if not any(p and (f.key == p or f.key.startswith((p + ".", p + "["))) for p in (*packages, itself)):
            report.add("monkey-patch", f.line, f.text)
    elif f.kind == "env":
        if not source.known_elsewhere(f.key):
            report.add("environment-variable", f.line, f.text)
    elif f.kind == "default":
        was, now = ("no default" if v == REQUIRED else v for v in (c.before, f.value))
        report.add("changed-default", f.line, f"{f.key}: {_short(was)} -> {_short(now)}")
    elif f.kind == "import" and dependencies.is_foreign(f.key, own) and not source.known_elsewhere(f.key):
        report.add("new-import", f.line, f"imports {f.key}")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
