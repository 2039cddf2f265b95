"""``fasttrack audit``: from a target or a folder to a report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from fasttrack.audit import cubin, ptx_text, schedule
from fasttrack.audit.contracts import TABLE_NAMES, ContractTable, load_table, save_table
from fasttrack.audit.findings import Finding, Report, apply_exceptions
from fasttrack.audit.unit import Outcome, Unit, audit_unit
from fasttrack.errors import UsageError
from fasttrack.target import KernelContract, KernelTarget, find_target

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
_ARCH = re.compile(r"sm_\d+[af]?")


def audit_folder(path: Path, contracts: Path | None = None, jobs: int = 0) -> tuple[Report, list[str]]:
    """Audit every ``.ptx`` and ``.cubin`` below ``path`` (or that one file). Returns the report and one line per file
    that cannot be used. Raises :class:`UsageError` when there is nothing to audit."""
    table = ContractTable()
    if contracts is None and path.is_dir():
        contracts = next((path / n for n in TABLE_NAMES if (path / n).is_file()), None)
    if contracts is not None:
        table = load_table(contracts)
    units, problems = folder_units(path, table)
    report, more = audit_units(units, table.schedules or {}, {c.kernel: c for c in table.contracts}, table.file, jobs)
    return report, problems + more


def folder_units(path: Path, table: ContractTable) -> tuple[list[Unit], list[str]]:
    """Pairs of PTX and cubin with one stem, and one line per file that is unusable at first sight."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".ptx", ".cubin"))
    if not files:
        raise UsageError("no .ptx or .cubin file", where=str(path), expected="compiled kernels")
    units: dict[str, Unit] = {}
    problems = []
    base = path.parent if path.is_file() else path
    for file in files:
        limit = ptx_text.MAX_BYTES if file.suffix == ".ptx" else cubin.MAX_BYTES
        size = file.stat().st_size
        if size > limit:
            problems.append(f"{file}: {size >> 20} MiB; expected at most {limit >> 20} MiB of one kernel's code")
            continue
        stem = str(file.relative_to(base).with_suffix(""))
        found = _ARCH.findall(file.stem)
        unit = units.setdefault(stem, Unit(stem, found[-1] if found else "", None, None, table=table))
        if file.suffix == ".cubin":
            unit.cubin, unit.cubin_file = file.read_bytes(), str(file)
            continue
        try:
            unit.ptx, unit.ptx_file = file.read_text(encoding="utf-8"), str(file)
        except UnicodeDecodeError:
            problems.append(f"{file}: not text; expected PTX")
            continue
        target = re.search(r"^\s*\.target\s+(\w+)", unit.ptx, re.M)
        if not unit.arch and target:
            unit.arch = target.group(1)
    return [u for u in units.values() if u.ptx is not None or u.cubin is not None], problems


def audit_target(
    name: str, arches: Sequence[str] = ARCHES, jobs: int = 0, keep: Path | None = None
) -> tuple[Report, list[str]]:
    """Compile every kernel of a registered target and audit it. ``keep``: folder for the PTX and cubins."""
    target = find_target(name)
    if not isinstance(target, KernelTarget):
        raise UsageError(f"target {name!r} offers no kernels", expected="compile_kernels() and schedules()")
    units, contracts, source = [], dict[str, KernelContract](), ""
    for arch in arches:
        for k in target.compile_kernels(arch):
            units.append(Unit(k.name, k.arch, k.ptx, k.cubin, f"{k.name}.ptx", f"{k.name}.cubin", k.source, k.contract))
            if k.contract is not None:
                contracts[k.contract.kernel] = k.contract
                source = source or k.source
            if keep is not None:
                stem = keep / f"{k.name.replace('/', '__')}.{k.arch}"
                keep.mkdir(parents=True, exist_ok=True)
                stem.with_name(stem.name + ".ptx").write_text(k.ptx, encoding="utf-8")
                stem.with_name(stem.name + ".cubin").write_bytes(k.cubin)
    if not units:
        raise UsageError(f"target {name!r} compiled no kernel", expected="at least one kernel variant")
    if keep is not None:
        save_table(keep / TABLE_NAMES[0], contracts.values(), target.schedules())
    return audit_units(units, {k: tuple(v) for k, v in target.schedules().items()}, contracts, source, jobs)


def audit_units(
    units: Sequence[Unit],
    schedules: dict[str, tuple[str, ...]],
    contracts: dict[str, KernelContract],
    contract_file: str = "",
    jobs: int = 0,
) -> tuple[Report, list[str]]:
    started = time.monotonic()
    outcomes = list(_run(units, jobs or os.cpu_count() or 1))
    report = Report()
    findings: list[Finding] = []
    problems: list[str] = []
    late: dict[tuple[str, str], tuple[str, int, str]] = {}
    used: list[tuple[KernelContract, str]] = [(c, contract_file) for c in contracts.values()]
    for o in outcomes:
        findings += o.findings
        report.audited += o.audited
        problems += o.problems
        for key, place in o.late_stores.items():
            late.setdefault(key, place)
        used += o.contracts
        if o.no_sass:
            report.sass, report.sass_reason = False, report.sass_reason or o.no_sass
    findings += schedule.check(schedules, contracts, late, contract_file)
    report.findings = sorted(apply_exceptions(findings, used), key=_order)
    report.seconds = time.monotonic() - started
    return report, problems


def _order(f: Finding) -> tuple[object, ...]:
    rank = ("error", "warning", "note").index(f.severity)
    return (
        f.excepted is not None,
        rank,
        f.contract or f.kernel,
        f.variant,
        f.arch,
        f.stage,
        f.code_line,
        f.rule,
        f.parameter,
    )


def _run(units: Sequence[Unit], jobs: int) -> Iterable[Outcome]:
    if jobs <= 1 or len(units) <= 4:
        return [audit_unit(u) for u in units]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(audit_unit, units, chunksize=4))
