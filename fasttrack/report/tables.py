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
    return {**record.config, **switch, "devices": record.devices, "checkpoint": record.checkpoint}


@dataclass(frozen=True)
class PerformanceRow:
    cell: str
    metric: str
    per: str
    unit: str
    prefill: str
    acceptance: str
    stamp: str
    arms: Mapping[str, str]  #: arm -> "median (n)"


def performance_rows(records: Iterable[Any]) -> list[PerformanceRow]:
    """Medians per cell, metric and arm. Metrics, bases and evidence kinds are never combined."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for record in records:
        if isinstance(record, PerformanceRecord):
            prefill = "in" if record.prefill_included else "out"
            stamp: str = record.evidence.kind
            cell = str(record.cell) if record.cell else "-"
            key: tuple[str, ...]
            key = (cell, record.metric, record.per, record.unit_of_measure, prefill, record.acceptance, stamp)
            found.setdefault(key, {}).setdefault(record.arm, []).append(record.value)
    rows = []
    for (cell, metric, per, unit, prefill, acceptance, stamp), arms in found.items():
        medians = {arm: _median(values) for arm, values in sorted(arms.items())}
        rows.append(PerformanceRow(cell, metric, per, unit, prefill, acceptance, stamp, medians))
    return rows


def _median(values: list[float]) -> str:
    return f"{number(statistics.median(values))} (n={len(values)})"


@dataclass(frozen=True)
class PublishedRow:
    name: str
    metric: str
    value: str
    baseline: str
    source: str


def published_rows(scope: Scope, records: Iterable[Any]) -> list[PublishedRow]:
    """Figures quoted from publications: the manifest's named cells, then published records that add to them."""
    rows = [
        PublishedRow(
            cell.name,
            figure.metric,
            f"{number(figure.value)} {figure.unit}",
            "" if figure.baseline is None else f"{number(figure.baseline)} {figure.unit}",
            figure.source,
        )
        for cell in scope.manifest.named_cells
        for figure in cell.published
    ]
    known = {(row.name, row.metric, row.value) for row in rows}
    for record in records:
        if isinstance(record, PublishedRecord):
            value = f"{number(record.value)} {record.unit_of_measure}"
            row = PublishedRow(record.name, record.metric, value, "", record.evidence.source or record.setup)
            if (row.name, row.metric, row.value) not in known:
                rows.append(row)
    return rows


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
    return f"yes: dirty.diff, sha256 {show(source.get('diff_sha256'))}{files}"


def command_line(run: Run) -> str:
    return " ".join(["fasttrack", *run.info.argv])
