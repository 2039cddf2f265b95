"""The report's tables, computed from records and the run's documents; pure, and sorted where order has no meaning."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fasttrack.records import EngineRecord, PerformanceRecord, PublishedRecord
from fasttrack.report.text import number, show

if TYPE_CHECKING:
    from fasttrack.bundle.content import Run
    from fasttrack.gates import GateResult, Scope

#: Packages named in the report; ``environment.json`` lists all.
PACKAGES = ("fasttrack-kimi-k3", "torch", "triton", "nvidia-cutlass-dsl", "vllm", "lm-eval", "numpy", "scipy")


@dataclass(frozen=True)
class GateRow:
    gate: str
    required: bool
    verdict: str
    reason: str
    numbers: tuple[Any, ...]


def gate_rows(scope: Scope, results: Sequence[GateResult]) -> list[GateRow]:
    """One row per result, as given: required gates first, in manifest order."""
    required = set(scope.manifest.gates.required)
    return [GateRow(r.gate, r.gate in required, r.verdict, r.reason, tuple(r.numbers)) for r in results]


def evidence_stamps(records: Iterable[Any]) -> list[tuple[str, str, int, str]]:
    """(stamp, device, records, record types with counts) per kind of evidence."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        proof = record.evidence
        stamp = f"shard({proof.rank}/{proof.ranks})" if proof.kind == "shard" else proof.kind
        found.setdefault((stamp, proof.device or proof.source), Counter())[record.type] += 1
    return [
        (stamp, device, sum(types.values()), ", ".join(f"{types[name]} {name}" for name in sorted(types)))
        for (stamp, device), types in sorted(found.items())
    ]


@dataclass(frozen=True)
class ArmDifference:
    key: str
    stock: str
    other: str
    arm: str
    engines: int  #: pairs of engines that differ in this way


def arm_differences(records: Iterable[Any]) -> tuple[list[ArmDifference], int]:
    """What the arms' resolved configurations do not share, and how many engine pairs were compared.

    An engine of each other arm is held against the stock engine of the same cell. The switch counts as a
    key of its own, so a row for it is expected and any other row is a second factor.
    """
    engines: dict[str, dict[str, EngineRecord]] = {}
    for record in records:
        if isinstance(record, EngineRecord):
            engines.setdefault(str(record.cell), {}).setdefault(record.arm, record)
    found: Counter[tuple[str, str, str, str]] = Counter()
    compared = 0
    for arms in engines.values():
        stock = arms.get("stock")
        for arm in sorted(set(arms) - {"stock", "oracle"}) if stock else ():
            compared += 1
            one, other = _resolved(arms["stock"]), _resolved(arms[arm])
            for key in sorted(set(one) | set(other)):
                if one.get(key) != other.get(key):
                    found[(key, show(one.get(key)), show(other.get(key)), arm)] += 1
    rows = [ArmDifference(key, stock, other, arm, n) for (key, stock, other, arm), n in sorted(found.items())]
    return rows, compared


def _resolved(record: EngineRecord) -> dict[str, Any]:
    switch = {f"switch {name}": value for name, value in record.switch.items()}
    config = {key: value for key, value in record.config.items() if key not in record.switch}
    return {**config, **switch, "devices": record.devices, "checkpoint": record.checkpoint}


@dataclass(frozen=True)
class PerformanceRow:
    cell: str
    arm: str
    acceptance: str
    stamp: str
    values: tuple[str, ...]  #: one per column


@dataclass(frozen=True)
class PerformanceTable:
    columns: tuple[str, ...]  #: "metric per basis, unit, prefill in or out"
    rows: tuple[PerformanceRow, ...]


def performance_table(records: Iterable[Any]) -> PerformanceTable:
    """Medians: a row per cell, arm and evidence stamp, a column per metric and basis. Nothing is combined."""
    found: dict[tuple[str, str, str, str], dict[str, list[float]]] = {}
    columns: dict[str, None] = {}
    for record in records:
        if isinstance(record, PerformanceRecord) and record.metric != "kernel_time":  # they have a table of their own
            prefill = "in" if record.prefill_included else "out"
            column = f"{record.metric} per {record.per}, {record.unit_of_measure}, prefill {prefill}"
            row = (str(record.cell) if record.cell else "-", record.arm, record.acceptance, record.evidence.kind)
            columns.setdefault(column)
            found.setdefault(row, {}).setdefault(column, []).append(record.value)
    rows = [
        PerformanceRow(*row, tuple(_median(values[c]) if c in values else "" for c in columns))
        for row, values in found.items()
    ]
    return PerformanceTable(tuple(columns), tuple(rows))


def _median(values: list[float]) -> str:
    return f"{number(statistics.median(values), 4)}" + (f" (n={len(values)})" if len(values) > 1 else "")


@dataclass(frozen=True)
class PublishedRow:
    name: str
    figures: str  #: every figure of the experiment, digit for digit
    source: str


def published_rows(scope: Scope, records: Iterable[Any]) -> list[PublishedRow]:
    """Figures quoted from publications, a row per experiment and source: two sources are two experiments."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for cell in scope.manifest.named_cells:
        for figure in cell.published:
            base = "" if figure.baseline is None else f" (stock {_quoted(figure.baseline)})"
            text = f"{figure.metric} {_quoted(figure.value)} {figure.unit}{base}"
            found.setdefault((cell.name, figure.source), {}).setdefault(text)
    for record in records:
        if isinstance(record, PublishedRecord):
            text = f"{record.metric} {_quoted(record.value)} {record.unit_of_measure}"
            found.setdefault((record.name, record.evidence.source or record.setup), {}).setdefault(text)
    return [PublishedRow(name, "; ".join(figures), source) for (name, source), figures in found.items()]


def _quoted(value: float) -> str:
    """A published number with all its digits."""
    return repr(int(value)) if value == int(value) else repr(value)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) lines; tolerant of documents that lack parts."""

    def part(name: str) -> Mapping[str, Any]:
        value = environment.get(name)
        return value if isinstance(value, Mapping) else {}

    machine, source, packages = part("machine"), part("source"), part("packages")
    rows = [
        ("processor", f"{show(machine.get('cpu'))}, {show(machine.get('cores'))} cores, "
                      f"{show(machine.get('architecture'))}"),
        ("accelerators", _accelerators(machine.get("accelerators"))),
        ("system", show(machine.get("system"))),
        ("Python", show(environment.get("python"))),
        ("packages", ", ".join(f"{name} {show(packages[name])}" for name in PACKAGES if name in packages)
                     + f" ({len(packages)} in environment.json)"),
        ("commit", show(source.get("commit"))),
        ("uncommitted changes", _dirty(source)),
        ("variables", show(part("variables")) if part("variables") else "none that change results"),
    ]  # fmt: skip
    return rows


def _accelerators(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "none"
    names = Counter(
        f"{show(item.get('name'))}, driver {show(item.get('driver'))}, {show(item.get('memory_mib'))} MiB"
        for item in value
        if isinstance(item, Mapping)
    )
    return "; ".join(f"{count} x {name}" for name, count in names.items())


def _dirty(source: Mapping[str, Any]) -> str:
    if not source.get("dirty"):
        return "none"
    untracked = source.get("untracked")
    files = f", {len(untracked)} untracked files" if isinstance(untracked, list) and untracked else ""
    return f"yes: dirty.diff, where it was kept, sha256 {show(source.get('diff_sha256'))}{files}"


def command_line(run: Run) -> str:
    return " ".join(["fasttrack", *run.info.argv])
