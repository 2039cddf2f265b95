"""A report as text, JSON and SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasttrack import __version__
from fasttrack.audit.findings import Finding, Report
from fasttrack.audit.rules import RULES

SCHEMA_VERSION = 1


def as_text(report: Report) -> str:
    """One block per distinct finding, then one line of totals. Copies in other variants are counted."""
    lines: list[str] = []
    for group in _groups(report.findings):
        f = group[0]
        mark = "accepted" if f.excepted is not None else f.severity
        lines.append(f"{mark} {f.rule}: {f.message}")
        where = _place(f)
        lines.append(f"  {where}{'  ' if where else ''}{f.instruction}".rstrip())
        names = sorted({f"{x.variant} {x.arch}".strip() for x in group})
        stages = "+".join(sorted({x.stage for x in group}))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"  in {', '.join(names[:3])}{more} ({stages})")
        if f.excepted is not None:
            lines.append(f"  accepted because {f.excepted}")
    for a in report.audited:
        for note in a.notes:
            lines.append(f"note: {a.variant} {a.arch} {a.stage}: {note}")
    lines.append(_totals(report))
    if not report.sass:
        lines.append(f"SASS not audited: {report.sass_reason}")
    return "\n".join(lines)


def _place(f: Finding) -> str:
    if not f.file:
        return ""
    if f.stage == "sass" and f.file.endswith(".cubin"):
        return f"{f.file}+0x{f.line:x}"
    return f"{f.file}:{f.line}" if f.line else f.file


def _groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """The same complaint about the same parameter of one contract (or kernel) is one group."""
    out: dict[tuple[object, ...], list[Finding]] = {}
    for f in findings:
        key = (f.excepted, f.rule, f.contract or f.kernel, f.parameter, f.message)
        out.setdefault(key, []).append(f)
    return list(out.values())


def _totals(report: Report) -> str:
    kernels = len({(a.kernel, a.variant, a.arch) for a in report.audited})
    accesses = sum(a.accesses for a in report.audited)
    traced = sum(a.traced for a in report.audited)
    accepted = sum(f.excepted is not None for f in report.findings)
    counts = ", ".join(f"{len(report.open(s))} {s}s" for s in ("error", "warning", "note"))
    return (
        f"{kernels} kernels, {traced} of {accesses} global accesses traced to their parameter: "
        f"{counts}, {accepted} accepted ({report.seconds:.1f} s)"
    )


def as_json(report: Report) -> str:
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "fasttrack audit", "version": __version__},
        "sass_audited": report.sass,
        "sass_reason": report.sass_reason,
        "seconds": round(report.seconds, 3),
        "findings": [{**_dict(f), "severity": f.severity} for f in report.findings],
        "audited": [asdict(a) for a in report.audited],
    }
    return json.dumps(document, indent=1)


def _dict(f: Finding) -> dict[str, Any]:
    return {k: v for k, v in asdict(f).items() if k != "stronger"}


def as_sarif(report: Report) -> str:
    rules = list(RULES.values())
    index = {r.id: i for i, r in enumerate(rules)}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "fasttrack audit",
                        "version": __version__,
                        "rules": [
                            {
                                "id": r.id,
                                "shortDescription": {"text": r.title},
                                "fullDescription": {"text": r.why},
                                "defaultConfiguration": {"level": r.severity},
                            }
                            for r in rules
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": []
                        if report.sass
                        else [{"level": "warning", "message": {"text": f"SASS not audited: {report.sass_reason}"}}],
                    }
                ],
                "results": [_result(f, index) for f in report.findings],
            }
        ],
    }
    return json.dumps(document, indent=1)


def _result(f: Finding, index: dict[str, int]) -> dict[str, Any]:
    region: dict[str, Any] = {}
    if f.stage == "sass" and f.file.endswith(".cubin"):
        region = {"byteOffset": f.line}
    elif f.line > 0:
        region = {"startLine": f.line}
    physical: dict[str, Any] = {"artifactLocation": {"uri": quote(Path(f.file or f.variant).as_posix())}}
    if region:
        physical["region"] = region
    result: dict[str, Any] = {
        "ruleId": f.rule,
        "ruleIndex": index[f.rule],
        "level": f.severity,
        "message": {"text": f.message},
        "locations": [
            {"physicalLocation": physical, "logicalLocations": [{"name": f.kernel, "kind": "function"}]},
        ],
        "properties": {
            "parameter": f.parameter,
            "role": f.role,
            "arch": f.arch,
            "stage": f.stage,
            "variant": f.variant,
            "instruction": f.instruction,
        },
    }
    if f.excepted is not None:
        result["suppressions"] = [{"kind": "inSource", "status": "accepted", "justification": f.excepted}]
    return result
