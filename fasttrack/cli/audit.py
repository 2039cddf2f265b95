"""``fasttrack audit``: look for synchronisation faults in compiled kernels. Needs no GPU."""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from fasttrack.errors import EXIT_EVIDENCE, EXIT_FAIL, EXIT_PASS, EXIT_USAGE, UsageError


class AuditFormat(StrEnum):
    text = "text"
    json = "json"
    sarif = "sarif"


def audit(
    subject: Annotated[
        str, typer.Argument(metavar="TARGET|FOLDER", help="A registered target, or .ptx and .cubin files.")
    ],
    contracts: Annotated[
        Path | None, typer.Option(help="Contract table of a folder; default: contracts.yaml in it.")
    ] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Architectures of a target: sm_90a, sm_100a, sm_103a.")] = None,
    form: Annotated[AuditFormat, typer.Option("--format", help="text, json or sarif.")] = AuditFormat.text,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the report to a file; totals still go to the terminal.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep PTX, cubins and contracts in this folder.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
) -> int:
    """Audit PTX and SASS: accesses before the dependency wait, triggers, polls, mailboxes, proxy fences.

    Exit 0: no open error. 1: open errors. 2: input that cannot be used. 3: nothing wrong found, but SASS not audited.
    """
    from fasttrack.audit import output as outputs
    from fasttrack.audit.run import ARCHES, audit_folder, audit_target
    from fasttrack.target import ENTRY_POINT_GROUP

    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise UsageError("cannot be written", where=f"--output {output}", expected="a file in a writable folder")
    path = Path(subject)
    registered = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if path.exists() and subject not in registered:  # a target is often called like its folder; ./name is the folder
        if arch or keep:
            raise UsageError("--arch and --keep belong to targets", where=subject, expected="a folder alone")
        report, problems = audit_folder(path, contracts, jobs)
    elif "/" in subject or path.suffix in (".ptx", ".cubin"):
        raise UsageError("no such file or folder", where=subject, expected=".ptx and .cubin files")
    else:
        unknown = [a for a in arch or () if a not in ARCHES]
        if unknown:
            raise UsageError(f"unknown architecture {unknown[0]!r}", expected=f"one of {', '.join(ARCHES)}")
        report, problems = audit_target(subject, arch or ARCHES, jobs, keep)
    kind = AuditFormat.json if as_json else form
    text = {"text": outputs.as_text, "json": outputs.as_json, "sarif": outputs.as_sarif}[kind.value](report)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
        text = outputs.as_text(report).splitlines()[-1]
    typer.echo(text)
    for line in problems:
        typer.echo(f"fasttrack: {line}", err=True)
    if problems:
        return EXIT_USAGE
    if report.open("error"):
        return EXIT_FAIL
    return EXIT_PASS if report.sass else EXIT_EVIDENCE
