"""``fasttrack show``: print a run folder or a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrack.cli.untrusted import say, say_table
from fasttrack.errors import BundleError, UsageError

if TYPE_CHECKING:
    from fasttrack.bundle.content import Records, Run
    from fasttrack.gates import GateResult


def show(
    path: Annotated[Path, typer.Argument(help="A run folder or a bundle.")],
    gate: Annotated[str | None, typer.Option(help="Down to the records of one gate, or of one check.")] = None,
    unit: Annotated[str | None, typer.Option(help="Down to the attempts and records of one work unit.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Records printed per type.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Print a run or a bundle: verdicts and their numbers, then, on request, the records below them."""
    view = _View(path)
    if gate is not None:
        view.print_gate(gate, limit, as_json)
    elif unit is not None:
        view.print_unit(unit, limit, as_json)
    else:
        view.print_all(as_json)
    return 0


class _View:
    """A run folder or bundle, read without judging it."""

    def __init__(self, path: Path) -> None:
        from fasttrack.bundle.content import load_records, load_run, reader, run_files
        from fasttrack.bundle.hashes import HASHES

        if not path.is_dir():
            what = "is not a folder" if path.exists() else "no such folder"
            raise UsageError(what, where=str(path), expected="a run folder or a bundle")
        self.path = path
        self.is_bundle = (path / HASHES).is_file()
        read = reader(path)
        try:
            self.run: Run = load_run(read)
            self.records: Records = load_records(run_files(path), read, self.run.journal)
            self.results, self.verdict = self._gates(read)
        except BundleError as error:
            raise UsageError(str(error), where=str(path), expected="a run folder or a bundle") from None

    def _gates(self, read: Any) -> tuple[list[GateResult], str | None]:
        from fasttrack.bundle.verdicts import GATES, parse_gates

        return parse_gates(read(GATES)) if (self.path / GATES).is_file() else ([], None)

    def print_all(self, as_json: bool) -> None:
        run, attempts = self.run, self.run.journal.attempts()
        planned, missing = run.info.units, run.unfinished
        still_open = run.journal.open_units(planned)
        lost = [unit for unit in missing if unit not in set(still_open)]  # failed, and never finished after that
        if as_json:
            values = {
                "path": str(self.path),
                "kind": "bundle" if self.is_bundle else "run",
                "name": run.manifest.name,
                "tier": run.info.tier,
                "verdict": self.verdict,
                "gates": [json.loads(result.model_dump_json()) for result in self.results],
                "units": {
                    "planned": len(planned),
                    "finished": len(planned) - len(missing),
                    "failed": lost,
                    "open": still_open,
                },
                "attempts": [vars(attempt) for attempt in attempts],
                "records": len(self.records.records),
                "problems": self.records.problems,
            }
            say(json.dumps(values, indent=1))
            return
        kind = "bundle, not verified here" if self.is_bundle else "run"
        say(f"{run.manifest.name}, tier {run.info.tier} ({kind}: {self.path})")
        failed = [attempt for attempt in attempts if attempt.state != "finished"]
        say(
            f"{len(planned)} units: {len(planned) - len(missing)} finished, {len(lost)} failed,"
            f" {len(still_open)} remaining; {len(self.records.records)} records,"
            f" {len(failed)} attempts did not finish"
        )
        if failed:
            header = ["unit", "attempt", "state", "error"]
            say_table(header, [[a.unit, str(a.attempt), a.state, a.error] for a in failed])
        required = set(run.manifest.gates.required)
        if self.results:
            lines = [
                [r.gate, "required" if r.gate in required else "optional", r.verdict, r.reason] for r in self.results
            ]
            say_table(["gate", "", "verdict", "why"], lines, colour_column=2)
            _say_numbers(self.results)
        say(f"verdict  {self.verdict or 'none yet: the run is not over'}")

    def print_gate(self, gate: str, limit: int, as_json: bool) -> None:
        from fasttrack.report.drill import records_of_gate

        found = [result for result in self.results if result.gate == gate or result.gate.startswith(gate + ".")]
        manifest = self.run.manifest.gates
        known = [*manifest.required, *manifest.optional]
        if not any(name == gate or name.startswith(gate + ".") for name in known):
            raise UsageError(f"no gate {gate!r}", where=str(self.path), expected=f"one of: {', '.join(known)}")
        records = records_of_gate(gate, self.records.records)
        if as_json:
            gates = [json.loads(result.model_dump_json()) for result in found]
            say(json.dumps({"gates": gates, "records": [json.loads(r.model_dump_json()) for r in records]}, indent=1))
            return
        for result in found:
            say(f"{result.gate}: {result.verdict}. {result.reason}")
        _say_numbers(found)
        _say_records(records, limit)

    def print_unit(self, unit: str, limit: int, as_json: bool) -> None:
        attempts = [attempt for attempt in self.run.journal.attempts() if attempt.unit == unit]
        if unit not in self.run.info.units and not attempts:
            near = [name for name in self.run.info.units if unit in name][:3] or self.run.info.units[:3]
            raise UsageError(f"no unit {unit!r}", where=str(self.path), expected=f"e.g. {', '.join(near)}")
        records = [record for record in self.records.records if record.unit == unit]
        if as_json:
            values = {
                "attempts": [vars(a) for a in attempts],
                "records": [json.loads(r.model_dump_json()) for r in records],
            }
            say(json.dumps(values, indent=1))
            return
        if not attempts:
            say(f"{unit}: planned, not started")
        for attempt in attempts:
            say(f"{unit}, attempt {attempt.attempt}: {attempt.state} {attempt.ended} {attempt.error}".rstrip())
        _say_records(records, limit)


def _say_numbers(results: list[GateResult]) -> None:
    from fasttrack.report.text import show as text

    lines = [[r.gate, n.name, f"{text(n.value)} {n.unit}".strip(), n.limit] for r in results for n in r.numbers]
    if lines:
        say_table(["gate", "number", "value", "limit"], lines)


def _say_records(records: list[Any], limit: int) -> None:
    from fasttrack.report.drill import rows

    if not records:
        say("no records")
    for kind, (header, lines) in rows(records).items():
        say(f"{kind} records: {len(lines)}" + (f", first {limit}" if len(lines) > limit else ""))
        say_table(header, lines[:limit])
