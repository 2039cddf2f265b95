"""A finished run of the toy target, written by hand: the smallest run folder that can be sealed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fake_target import TARGET

from fasttrack.bundle.content import load_records, load_run, parse_manifest, reader
from fasttrack.bundle.files import sha256
from fasttrack.bundle.journal import Journal
from fasttrack.bundle.planned import planned_units
from fasttrack.bundle.verdicts import evaluate_all, gates_document, scope_of
from fasttrack.records import (
    CellKey,
    EngineRecord,
    Evidence,
    NumericsRecord,
    PerformanceRecord,
    StepRecord,
)
from fasttrack.records.digest import unit_digest
from fasttrack.records.seeds import root_seed

MANIFEST = """\
schema_version: 1
name: toy
title: A toy | with a pipe
target: toy
engine: {kind: embedded}
trained_checkpoint: false
scope:
  - {name: plain, tp: [2], requests: [1, 2, 4]}
named_cells:
  - name: published-b1
    tp: 2
    requests: 1
    input_tokens: 1
    output_tokens: 8
    published: [{metric: decode_throughput, unit: tokens/s, value: 193.3, source: "an article"}]
probes:
  - {name: above, step: decode, tp: 2, requests: 17, reason: too_many_rows}
gates:
  required: [numerics.error, numerics.poison, isolation.scope_coverage, isolation.probes]
  optional: [performance.speedup]
tiers:
  smoke: {minutes: 1, cells: {requests: [1, 2], named: false}}
cannot_show: ["Speed: this is a toy."]
"""
HEAD = "c" * 40
DIFF = b"--- a/x\n+++ b/x\n"
EMULATED = Evidence(kind="emulated", device="cpu")
FAMILIES = ("normal", "outliers", "denormals", "negative_zero", "coded")


def cell(requests: int) -> CellKey:
    return CellKey(step="decode", tp=2, requests=requests)


def step(unit: str, requests: int, index: int, path: str = "specialized", **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "unit": unit,
        "arm": "optimized",
        "cell": cell(requests),
        "evidence": EMULATED,
        "run": unit,
        "index": index,
        "kind": "decode",
        "requests": requests,
        "rows": requests,
        "padded_rows": 0,
        "draft_length": 0,
        "tp": 2,
        "dcp": 1,
        "context_max": 9,
        "path": path,
        "reason": None if path == "specialized" else "too_many_rows",
        "ops": {"toy::head": 1},
    }
    return StepRecord(**{**fields, **changes})


def numerics(op: str, family: str, **changes: Any) -> NumericsRecord:
    fields: dict[str, Any] = {
        "unit": "numerics/normal",
        "evidence": EMULATED,
        "op": op,
        "provider": "torch",
        "case": "small",
        "family": family,
        "output": "out",
        "dtype": "float32",
        "elements": 64,
        "worst": 0.25,
        "failing": 0,
        "max_abs_error": 1e-7,
        "bound": "eps x terms",
        "nan_outputs": 0,
        "changed_untouched": 0,
        "rerun_identical": True,
    }
    return NumericsRecord(**{**fields, **changes})


def engine(requests: int, arm: str, switch: str) -> EngineRecord:
    return EngineRecord(
        unit=f"isolation/cell/decode/tp2/r{requests}/dl0/dcp1/short",
        arm=arm,
        cell=cell(requests),
        evidence=EMULATED,
        engine="embedded",
        switch={"toy_backend": switch},
        devices=["cpu"],
        checkpoint=hashlib.sha256(b"weights").hexdigest(),
        config={"toy_backend": switch, "tp": 2},
    )


def performance(arm: str, value: float) -> PerformanceRecord:
    return PerformanceRecord(
        unit="performance/decode/tp2/r1/dl0/dcp1/short",
        arm=arm,
        cell=cell(1),
        evidence=EMULATED,
        metric="decode_throughput",
        unit_of_measure="tokens/s",
        value=value,
        per="aggregate",
        tokens=8,
        prefill_included=False,
        step_kinds={"decode": 8},
        acceptance="none",
        clock="perf_counter",
    )


def default_records() -> dict[str, list[Any]]:
    """Unit -> records of a run whose required gates all pass."""
    cells = {
        f"isolation/cell/decode/tp2/r{n}/dl0/dcp1/short": [
            engine(n, "stock", "auto"),
            engine(n, "optimized", "fast"),
            *(step(f"isolation/cell/decode/tp2/r{n}/dl0/dcp1/short", n, i) for i in range(3)),
        ]
        for n in (1, 2)
    }
    return {
        "numerics/normal": [numerics(op, family) for op in ("toy::update", "toy::head") for family in FAMILIES],
        **cells,
        "isolation/probe/above": [step("isolation/probe/above", 17, 0, "stock", cell=None)],
        "performance/decode/tp2/r1/dl0/dcp1/short": [performance("stock", 90.0), performance("optimized", 110.5)],
    }


def write_run(
    folder: Path,
    records: dict[str, list[Any]] | None = None,
    *,
    head: str | None = HEAD,
    manifest: str = MANIFEST,
    edit_journal: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]] = lambda events: events,
    gates: bool = True,
) -> Path:
    """Write a run folder as the runner would."""
    records = default_records() if records is None else records
    checks = ["numerics", "isolation", "performance"]
    # The units that this toy has nothing to say about come first, finished without a record.
    planned = planned_units(parse_manifest(manifest.encode()), "smoke", checks)
    records = {**{name: [] for name in planned if name not in records}, **records}
    folder.mkdir(parents=True)
    (folder / "manifest.yaml").write_text(manifest, encoding="utf-8", newline="\n")
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    seeds = {"head": head, "manifest_sha256": digest, "nonce": None}
    seeds["root"] = root_seed(head=head, manifest_sha256=digest, nonce=None)
    write_json(
        folder / "run.json",
        {
            "schema_version": 1,
            "name": "toy",
            "tier": "smoke",
            "checks": checks,
            "seeds": seeds,
            "target": asdict(TARGET.describe()),
            "plan": [{"name": name, "check": name.split("/")[0], "cell": None, "arms": []} for name in records],
            "argv": ["validate", "toy.yaml"],
            "identity": "0" * 64,
            "started": "2026-01-02T03:04:05.000Z",
            "finished": "2026-01-02T03:05:05.000Z",
        },
    )
    write_json(
        folder / "environment.json",
        {
            "fasttrack": "0.1.0",
            "machine": {"cpu": "a cpu", "cores": 2, "architecture": "x86_64", "system": "Linux", "accelerators": []},
            "python": "3.11.9",
            "packages": {"numpy": "2.0", "scipy": "1.14"},
            "source": {"commit": HEAD, "branch": "main", "dirty": True, "diff_sha256": sha256(DIFF), "untracked": []},
            "variables": {},
        },
    )
    (folder / "dirty.diff").write_bytes(DIFF)
    events: list[dict[str, Any]] = []
    (folder / "records").mkdir()
    for unit, own in records.items():
        lines = [record.model_dump_json() for record in own]
        with (folder / "records" / f"{unit.split('/')[0]}.jsonl").open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)
        events.append(event("started", unit))
        events.append(event("finished", unit, records=len(lines), sha256=unit_digest(lines)))
    lines = [json.dumps(line, sort_keys=True) + "\n" for line in edit_journal(events)]
    (folder / "journal.jsonl").write_text("".join(lines), newline="\n")
    (folder / "samples").mkdir()
    (folder / "samples" / "answers.txt").write_text("forty-two ✓\n", encoding="utf-8", newline="\n")
    (folder / "engine-cache").mkdir()
    (folder / "engine-cache" / "weights.bin").write_bytes(b"scratch")
    if gates:
        judge(folder)
    return folder


def event(kind: str, unit: str, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"time": "2026-01-02T03:04:06.000Z", "event": kind, "unit": unit, "attempt": attempt, "pid": 7, **more}


def judge(folder: Path) -> None:
    """Write ``gates.json`` from the records, as the runner does at the end."""
    read = reader(folder)
    run = load_run(read)
    names = [f"records/{path.name}" for path in (folder / "records").glob("*.jsonl")]
    results, verdict = evaluate_all(scope_of(run), load_records(names, read, run.journal).records)
    (folder / "gates.json").write_bytes(gates_document(results, verdict))


def journal_of(folder: Path) -> Journal:
    return load_run(reader(folder)).journal


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", newline="\n")
