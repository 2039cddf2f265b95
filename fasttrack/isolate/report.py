"""The blast radius of a change: files, findings, and their text and JSON forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

#: kind -> (what it means, severity). Errors reach outside the declared scope and fail the command.
KINDS: dict[str, tuple[str, str]] = {
    "outside-scope": ("file outside the declared paths", "error"),
    "monkey-patch": ("assigns a name outside the declared paths", "error"),
    "shared-component": ("file of a component every model uses", "warning"),
    "import-effect": ("acts when it is imported", "warning"),
    "environment-variable": ("environment variable the base does not know", "warning"),
    "changed-default": ("default value changed", "warning"),
    "dependency": ("dependency added or changed", "warning"),
    "new-import": ("imports a package the base does not import", "warning"),
    "submodule": ("submodule moved to another commit", "warning"),
    "binary": ("binary file: its content was not analysed", "warning"),
    "mode": ("file mode changed", "note"),
    "generated": ("generated file: compare its generator, not its text", "note"),
    "not-analysed": ("Python that could not be parsed", "warning"),
}


@dataclass(frozen=True)
class Finding:
    kind: str
    file: str
    line: int
    message: str
    component: str = ""

    @property
    def severity(self) -> str:
        return KINDS[self.kind][1]


@dataclass(frozen=True)
class File:
    path: str
    old: str  #: path before a rename
    status: str
    inside: bool
    component: str
    added: int
    removed: int


@dataclass
class Radius:
    base: str
    head: str
    allowed: tuple[str, ...]
    files: list[File] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def outside(self) -> bool:
        return any(f.severity == "error" for f in self.findings)


def as_text(radius: Radius) -> str:
    inside = [f for f in radius.files if f.inside]
    outside = [f for f in radius.files if not f.inside]
    lines = [f"{radius.base} .. {radius.head}" if radius.base else radius.head]
    lines.append(f"declared: {', '.join(radius.allowed)}")
    lines += _files("inside", inside)
    lines += _files("outside", outside)
    for kind, (title, severity) in KINDS.items():
        found = [f for f in radius.findings if f.kind == kind and kind != "outside-scope"]
        if found:
            lines.append(f"{severity} {kind}: {title}")
            lines += [f"  {_place(f)}  {f.message}" for f in found]
    counts = {s: sum(f.severity == s for f in radius.findings) for s in ("error", "warning", "note")}
    verdict = "reaches outside the declared scope" if radius.outside else "stays inside the declared scope"
    lines.append(
        f"{len(radius.files)} files, {len(outside)} outside; "
        f"{counts['error']} errors, {counts['warning']} warnings, {counts['note']} notes: {verdict}"
    )
    return "\n".join(lines)


def _place(f: Finding) -> str:
    return f"{f.file}:{f.line}" if f.line else f.file


def _files(title: str, files: Sequence[File]) -> list[str]:
    out = [f"{title}: {len(files)} files"]
    for f in files:
        moved = f"{f.old} -> " if f.status == "renamed" else ""
        what = f"  [{f.component}]" if f.component else ""
        out.append(f"  {f.status:9s} +{f.added} -{f.removed}  {moved}{f.path}{what}")
    return out


def as_json(radius: Radius) -> str:
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "base": radius.base,
        "head": radius.head,
        "declared": list(radius.allowed),
        "outside_scope": radius.outside,
        "files": [asdict(f) for f in radius.files],
        "findings": [{**asdict(f), "severity": f.severity} for f in radius.findings],
    }
    return json.dumps(document, indent=1)
