"""``report.md`` and its figures from scope, run, records and gate results: pure, and byte for byte repeatable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fasttrack.report.coverage import coverage_grid, probe_rows
from fasttrack.report.evidence import fidelity_rows, provider_groups
from fasttrack.report.kernels import kernel_grid, kernel_layout
from fasttrack.report.svg import layout
from fasttrack.report.tables import (
    arm_differences,
    command_line,
    environment_rows,
    evidence_stamps,
    gate_rows,
    performance_table,
    published_rows,
)
from fasttrack.report.text import cell, code, count, listing, number

if TYPE_CHECKING:
    from fasttrack.bundle.binding import Binding
    from fasttrack.bundle.content import Run
    from fasttrack.gates import GateResult, Scope

MAX_PERFORMANCE_ROWS = 60
UNTRAINED = (
    "Task scores are optional in this manifest because no trained checkpoint exists: "
    "the weights are random and the scores say nothing about answer quality."
)
_WORDS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "NOT ENOUGH EVIDENCE"}


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("fasttrack.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
        autoescape=False,  # Markdown: every value goes through `cell` or `code`; the SVG escapes with `e`
    )
    environment.filters.update(cell=cell, code=code, count=count, number=number)
    return environment.get_template(name)


def render(
    scope: Scope, run: Run, records: Sequence[Any], results: Sequence[GateResult], binding: Binding | None = None
) -> str:
    """The report as Markdown. Nothing but the arguments goes in: no clock, no path, no locale."""
    grid = coverage_grid(scope, records)
    counts = [found for row in grid.rows for found in row.counts if found]
    reasons = sum((found.reasons for found in counts), Counter[str]())
    differences, compared = arm_differences(records)
    stamps = evidence_stamps(records)
    return _template("report.md.j2").render(
        scope=scope,
        run=run,
        target=scope.description,
        switch=f"{code(scope.description.switch)} = {code(scope.description.on)}",
        sentence=verdict_sentence(scope, results, stamps, binding, run.unfinished),
        bound=binding.sentence if binding else "nothing yet: not sealed",
        command=command_line(run),
        gates=gate_rows(scope, results),
        grid=grid,
        unplanned=sum(found.state == "unplanned" for found in counts),
        fallbacks=", ".join(f"{name} {n}" for name, n in sorted(reasons.items())),
        probes=probe_rows(scope, records),
        cannot_show=_cannot_show(scope, stamps, binding, run.environment),
        stamps=stamps,
        failed=run.journal.failed_attempts(),
        emulated=any(stamp == "emulated" for stamp, _, _, _ in stamps),
        selected={result.gate for result in results},
        fidelity=fidelity_rows(scope, records),
        providers=provider_groups(records),
        differences=differences,
        compared=compared,
        kernels=kernel_grid(records),
        performance=performance_table(records),
        limit=MAX_PERFORMANCE_ROWS,
        published=published_rows(scope, records),
        environment=environment_rows(run.environment),
    )


def render_figures(scope: Scope, records: Sequence[Any]) -> dict[str, str]:
    """File name -> SVG text: the coverage grid, and the kernel times if there are any."""
    figures = {"coverage.svg": _template("coverage.svg.j2").render(**layout(coverage_grid(scope, records)))}
    kernels = kernel_grid(records)
    if kernels.rows:
        figures["kernels.svg"] = _template("kernels.svg.j2").render(**kernel_layout(kernels))
    return figures


def verdict_sentence(
    scope: Scope,
    results: Sequence[GateResult],
    stamps: Sequence[tuple[str, str, int, str]],
    binding: Binding | None,
    unfinished: Sequence[str] = (),
) -> str:
    """The report's first line: verdict, what it rests on, and what it does not say."""
    from fasttrack.gates import overall

    verdicts = {result.gate: result.verdict for result in results}
    required = scope.manifest.gates.required
    passed = [name for name in required if verdicts.get(name) == "pass"]
    missed = [name for name in required if verdicts.get(name) != "pass"]
    optional = [name for name in scope.manifest.gates.optional if verdicts.get(name) != "pass"]
    kinds = listing(sorted({stamp for stamp, _, _, _ in stamps if stamp != "published"})) or "no"
    about = [f"{scope.tier} tier", f"{kinds} evidence", *([binding.state] if binding else [])]
    text = f"**{_WORDS[overall(scope, results, unfinished)]}** ({', '.join(cell(part) for part in about)}): "
    text += f"{len(passed)} of {count(len(required), 'required gate')} passed"
    if missed:
        text += "; " + ", ".join(f"{cell(name)} {verdicts.get(name, 'not_run')}" for name in missed)
    if unfinished:
        text += "; " + listing((f"unit {cell(name)} did not finish" for name in unfinished), 3)
    claimed = set(scope.manifest.all_cells())
    run = len(claimed.intersection(scope.cells()))
    text += f". {run} of {count(len(claimed), 'claimed cell')} run in this tier."
    if optional:
        named = ", ".join(f"{cell(name)} {verdicts.get(name, 'not_run')}" for name in optional)
        text += f" Optional gates that did not pass: {named}."
    return text if scope.manifest.trained_checkpoint else f"{text} {UNTRAINED}"


def _cannot_show(
    scope: Scope,
    stamps: Sequence[tuple[str, str, int, str]],
    binding: Binding | None,
    environment: Mapping[str, Any],
) -> list[str]:
    kinds = {stamp.partition("(")[0] for stamp, _, _, _ in stamps}
    found = list(scope.manifest.cannot_show)
    if "measured" not in kinds:
        found.append("No record was measured on the claimed hardware.")
    if binding is not None and binding.state != "bound":
        found.append(f"The seeds do not derive from the pull request's head commit ({binding.state}).")
    source = environment.get("source")
    ran, dirty = (source.get("commit"), source.get("dirty")) if isinstance(source, dict) else (None, None)
    if binding is not None and binding.head is not None and not binding.ran(environment):
        found.append(
            f"The code that ran is that of commit {ran}{' with uncommitted changes' if dirty else ''}, not a clean "
            f"checkout of the head commit {binding.head}."
        )
    found.append("That the machine which recorded this was honest: a bundle proves what was recorded.")
    return found
