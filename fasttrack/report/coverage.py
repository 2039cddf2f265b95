"""The coverage grid: for every claimed cell, how many steps of the optimised arm ran specialised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fasttrack.records import CellKey, RefusalRecord, StepRecord
from fasttrack.report.text import listing

if TYPE_CHECKING:
    from fasttrack.gates import Scope
    from fasttrack.manifest import Probe

OPTIMIZED = "optimized"
PROBE_UNITS = "isolation/probe/"  #: one work unit per probe, named after it


@dataclass
class Count:
    """Steps of one cell or probe in the optimised arm."""

    planned: bool  #: part of the tier that ran
    specialized: int = 0
    total: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def state(self) -> str:
        """``full``, ``partial``, ``none`` (steps, none specialised), ``empty`` (no steps), ``unplanned``."""
        if not self.total:
            return "empty" if self.planned else "unplanned"
        if self.specialized == self.total:
            return "full"
        return "partial" if self.specialized else "none"

    @property
    def text(self) -> str:
        return f"{self.specialized}/{self.total}" if self.total or self.planned else "-"

    def add(self, step: StepRecord) -> None:
        self.total += 1
        if step.path == "specialized":
            self.specialized += 1
        else:
            self.reasons[step.reason or "unnamed"] += 1


@dataclass(frozen=True)
class GridRow:
    label: str
    counts: tuple[Count | None, ...]  #: one per column; None where the cell is not claimed


@dataclass(frozen=True)
class Grid:
    columns: tuple[int, ...]  #: requests
    rows: tuple[GridRow, ...]

    @property
    def totals(self) -> tuple[int, int]:
        """(specialised, total) steps over all cells."""
        counts = [count for row in self.rows for count in row.counts if count]
        return sum(c.specialized for c in counts), sum(c.total for c in counts)


@dataclass(frozen=True)
class ProbeRow:
    probe: Probe
    count: Count
    observed: str  #: in words: fallback reasons, or how the deployment was refused


def _series(key: CellKey) -> tuple[str, int, int, int, str]:
    return key.step, key.tp, key.draft_length, key.dcp, key.context


def _label(key: CellKey) -> str:
    drafts = f", DL {key.draft_length}" if key.draft_length else ""
    dcp = f", DCP {key.dcp}" if key.dcp != 1 else ""
    return f"{key.step}, TP {key.tp}{drafts}{dcp}, {key.context}"


def coverage_grid(scope: Scope, records: Iterable[Any]) -> Grid:
    """Rows are step kind x TP x draft length x DCP x context, columns are requests.

    Steps that belong to a probe's unit are left out; they must run stock and have their own table.
    """
    planned = set(scope.cells())
    counts = {key: Count(key in planned) for key in scope.manifest.all_cells()}
    by_shape: dict[tuple[Any, ...], list[CellKey]] = {}
    for key in counts:
        by_shape.setdefault((key.step, key.tp, key.dcp, key.requests, key.draft_length), []).append(key)
    for step in optimized_steps(records):
        shape = (step.kind, step.tp, step.dcp, step.requests, step.draft_length)
        if not step.unit.startswith(PROBE_UNITS):
            for key in by_shape.get(shape, ()):
                if scope.is_step_of(step, key):
                    counts[key].add(step)
    columns = tuple(sorted({key.requests for key in counts}))
    series: dict[tuple[Any, ...], dict[int, Count]] = {}
    labels: dict[tuple[Any, ...], str] = {}
    for key, found in counts.items():
        series.setdefault(_series(key), {})[key.requests] = found
        labels.setdefault(_series(key), _label(key))
    rows = tuple(GridRow(labels[s], tuple(cells.get(c) for c in columns)) for s, cells in series.items())
    return Grid(columns, rows)


def optimized_steps(records: Iterable[Any]) -> Iterator[StepRecord]:
    return (record for record in records if isinstance(record, StepRecord) and record.arm == OPTIMIZED)


def probe_rows(scope: Scope, records: Iterable[Any]) -> list[ProbeRow]:
    """One row per probe of the tier: the steps of its kind in its own work unit, or the refusal."""
    steps: dict[str, list[StepRecord]] = {}
    refusals: dict[str, list[RefusalRecord]] = {}
    for record in records:
        if record.unit.startswith(PROBE_UNITS):
            name = record.unit.removeprefix(PROBE_UNITS)
            if isinstance(record, StepRecord) and record.arm == OPTIMIZED:
                steps.setdefault(name, []).append(record)
            elif isinstance(record, RefusalRecord):
                refusals.setdefault(name, []).append(record)
    return [_probe_row(probe, steps.get(probe.name, []), refusals.get(probe.name, [])) for probe in scope.probes()]


def _probe_row(probe: Probe, steps: list[StepRecord], refusals: list[RefusalRecord]) -> ProbeRow:
    found = Count(planned=True)
    for step in steps:
        uniform = step.rows == step.requests * (1 + step.draft_length)
        if (step.kind, step.requests) == (probe.step, probe.requests) and (probe.drafts == "uniform" or not uniform):
            found.add(step)
    refused = [refusal for refusal in refusals if refusal.refused]
    if refused:
        observed = "refused at start: " + listing(
            dict.fromkeys(r for refusal in refused for r in refusal.reasons), 3, "; "
        )
    elif found.total:
        observed = ", ".join(f"{name} {n}" for name, n in sorted(found.reasons.items())) or "no fallback"
    else:
        observed = "started, not refused" if refusals else "nothing recorded"
    return ProbeRow(probe, found, observed)
