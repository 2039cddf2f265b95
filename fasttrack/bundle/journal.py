"""The journal as evidence: every attempt at every planned unit, and whether the records agree with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fasttrack.bundle.files import parse_json, printable
from fasttrack.errors import BundleError
from fasttrack.records.digest import UnitDigest

State = Literal["finished", "failed", "interrupted", "killed"]
_END: tuple[str, ...] = ("finished", "failed", "interrupted")


@dataclass(frozen=True)
class Event:
    """One line of ``journal.jsonl``. ``records`` and ``sha256`` come with ``finished``, ``log`` with a crash."""

    time: str
    event: str
    unit: str
    attempt: int
    error: str = ""
    records: int | None = None
    sha256: str | None = None
    log: str = ""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a unit. ``killed``: started and never heard of again."""

    unit: str
    attempt: int
    state: State
    started: str
    ended: str = ""
    error: str = ""
    records: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Journal:
    events: tuple[Event, ...]
    torn: int = 0  #: half-written lines; a kill leaves at most one

    def attempts(self) -> list[Attempt]:
        """Every attempt in the order of its first event."""
        first: dict[tuple[str, int], Event] = {}
        last: dict[tuple[str, int], Event] = {}
        for event in self.events:
            key = (event.unit, event.attempt)
            first.setdefault(key, event)
            if event.event in _END:
                last[key] = event
        return [_attempt(event, last.get(key)) for key, event in first.items()]

    def finished(self) -> dict[str, int]:
        """unit -> the attempt whose records count."""
        return {event.unit: event.attempt for event in self.events if event.event == "finished"}

    def failed_attempts(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts() if attempt.state != "finished"]

    def unfinished(self, plan: Sequence[str]) -> list[str]:
        """Planned units without a finished attempt, failed ones among them: no such run can pass."""
        done = self.finished()
        return [unit for unit in plan if unit not in done]

    def open_units(self, plan: Sequence[str]) -> list[str]:
        """Planned units that neither finished nor failed: the run is not over."""
        ended = {event.unit for event in self.events if event.event in ("finished", "failed")}
        return [unit for unit in plan if unit not in ended]


def _attempt(first: Event, end: Event | None) -> Attempt:
    if end is None:
        return Attempt(first.unit, first.attempt, "killed", first.time)
    state: State = end.event  # type: ignore[assignment]  # one of _END
    return Attempt(first.unit, first.attempt, state, first.time, end.time, end.error, end.records, end.sha256)


def parse_journal(data: bytes, *, where: str = "journal.jsonl") -> Journal:
    """Read a journal. Raises :class:`BundleError` for a line that is whole and yet no event.

    A line that is not whole JSON object text was torn by a kill; it is counted, not read.
    """
    events: list[Event] = []
    torn = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        if not (line.startswith(b"{") and line.rstrip().endswith(b"}")):
            torn += 1
            continue
        events.append(_event(parse_json(line, where=f"{where}:{number}"), f"{where}:{number}"))
    return Journal(tuple(events), torn)


def _event(value: Any, where: str) -> Event:
    def text(key: str, default: str | None = None) -> str:
        found = value.get(key, default)
        if not isinstance(found, str):
            raise BundleError(f"{where}: {key} is not text")
        return found

    if not isinstance(value, dict):
        raise BundleError(f"{where}: is not an event")
    kind, attempt = text("event"), value.get("attempt")
    if kind not in ("started", *_END):
        raise BundleError(f"{where}: unknown event {printable(kind, 40)!r}")
    if not isinstance(attempt, int) or isinstance(attempt, bool) or attempt < 1:
        raise BundleError(f"{where}: attempt is not a number from 1")
    records, sha = value.get("records"), value.get("sha256")
    if kind == "finished" and not (isinstance(records, int) and isinstance(sha, str)):
        raise BundleError(f"{where}: finished without the number (records) and digest (sha256) of its records")
    return Event(text("time", ""), kind, text("unit"), attempt, text("error", ""), records, sha, text("log", ""))


def plan_problems(journal: Journal, plan: Sequence[str]) -> Iterator[str]:
    """How the journal disagrees with the plan or with itself, one line each."""
    planned = set(plan)
    for unit in sorted({unit for unit in plan if plan.count(unit) > 1} if len(planned) != len(plan) else ()):
        yield f"run.json: unit {printable(unit)} is planned twice"
    started: dict[str, int] = {}
    ended: set[tuple[str, int]] = set()
    finished: set[str] = set()
    for event in journal.events:
        what = f"journal.jsonl: unit {printable(event.unit)} attempt {event.attempt}"
        key = (event.unit, event.attempt)
        if event.unit not in planned:
            yield f"{what}: the unit is not in the plan"
        elif event.event == "started":
            if event.attempt != started.get(event.unit, 0) + 1:
                yield f"{what}: started out of order, attempt {started.get(event.unit, 0) + 1} was next"
            started[event.unit] = event.attempt
        elif started.get(event.unit) != event.attempt:
            yield f"{what}: {event.event} without having been started"
        elif key in ended:
            yield f"{what}: ended twice"
        if event.event == "finished":
            if event.unit in finished:
                yield f"{what}: the unit had finished before; a second result could have been picked"
            finished.add(event.unit)
        if event.event in _END:
            ended.add(key)
    for unit in journal.open_units(plan):
        yield f"journal.jsonl: planned unit {printable(unit)} neither finished nor failed"


@dataclass
class RecordCensus:
    """Record lines per unit and attempt, collected while the record files are read."""

    digests: dict[tuple[str, int], UnitDigest] = field(default_factory=dict)

    def add(self, unit: str, attempt: int, line: bytes) -> None:
        self.digests.setdefault((unit, attempt), UnitDigest()).update(line)

    def problems(self, journal: Journal) -> Iterator[str]:
        """Records nobody wrote, and finished attempts whose records are not those the journal counted."""
        attempts: Mapping[tuple[str, int], Attempt] = {(a.unit, a.attempt): a for a in journal.attempts()}
        for unit, attempt in sorted(self.digests):
            if (unit, attempt) not in attempts:
                yield f"records: unit {printable(unit)} attempt {attempt} is not in the journal"
        for key, found in attempts.items():
            if found.state != "finished":
                continue
            digest = self.digests.get(key, UnitDigest())
            what = f"records: unit {printable(found.unit)} attempt {found.attempt}"
            if digest.records != found.records:
                yield f"{what}: has {digest.records} records, the journal says {found.records}"
            elif digest.hexdigest() != found.sha256:
                yield f"{what}: its records are not the ones the journal saw (digest differs)"


def census(lines: Iterable[tuple[str, int, bytes]]) -> RecordCensus:
    """The census of (unit, attempt, line) triples."""
    found = RecordCensus()
    for unit, attempt, line in lines:
        found.add(unit, attempt, line)
    return found
