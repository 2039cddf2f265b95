"""The files a bundle adds to a run: binding, statement, report and figure. Sealing writes them, verifying compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fasttrack.bundle.binding import BINDING, Binding
from fasttrack.bundle.statement import STATEMENT, statement

if TYPE_CHECKING:
    from fasttrack.bundle.content import Run
    from fasttrack.gates import GateResult, Scope

REPORT = "report.md"
DERIVED = (BINDING, "coverage.svg", REPORT, STATEMENT)
#: there if the records hold what it shows
OPTIONAL = ("kernels.svg",)


def derived_files(
    scope: Scope,
    run: Run,
    records: Sequence[Any],
    results: Sequence[GateResult],
    binding: Binding,
    files: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Name -> bytes of every derived file. Pure: the same run and binding give the same bytes anywhere.

    ``results`` are those of ``gates.json``, so that the report follows from files of the bundle alone.
    """
    from fasttrack.report import render, render_figures

    return {
        BINDING: binding.to_bytes(),
        **{name: text.encode("utf-8") for name, text in render_figures(scope, records).items()},
        REPORT: render(scope, run, records, results, binding).encode("utf-8"),
        STATEMENT: statement(scope, results, binding, records, files, run.unfinished),
    }
