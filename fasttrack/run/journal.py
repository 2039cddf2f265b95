"""The journal: one line per event of every attempt at every work unit, also the failed and killed ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fasttrack.errors import UsageError

Event = Literal["started", "finished", "failed", "interrupted"]
EVENTS = ("started", "finished", "failed", "interrupted")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class History:
    """What a journal says: last attempt of each unit, and which attempt finished it."""

    attempts: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Attempts that failed, were interrupted, or were started and never heard of again."""
        closed = {(e["unit"], e["attempt"]) for e in self.events if e["event"] != "started"}
        lost = [
            {**e, "event": "killed"}
            for e in self.events
            if e["event"] == "started" and (e["unit"], e["attempt"]) not in closed
        ]
        return [e for e in self.events if e["event"] in ("failed", "interrupted")] + lost


def read_journal(path: Path) -> History:
    """Parse a journal. A torn last line (a kill while writing) is ignored; anything else malformed is an error."""
    history = History()
    if not path.exists():
        return history
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n") or not line.strip():
            continue
        try:
            event = json.loads(line)
            unit, attempt, kind = event["unit"], int(event["attempt"]), event["event"]
        except (ValueError, KeyError, TypeError):
            if "\0" in line or not line.startswith("{") or not line.rstrip().endswith("}"):
                continue  # a torn line that a later attempt ended with a newline
            raise UsageError("malformed journal entry", where=f"{path.name}:{number}") from None
        if kind not in EVENTS:
            raise UsageError(f"unknown event {kind!r}", where=f"{path.name}:{number}", expected=", ".join(EVENTS))
        history.events.append(event)
        history.attempts[unit] = max(history.attempts.get(unit, 0), attempt)
        if kind == "finished":
            history.finished[unit] = attempt
    return history


class Journal:
    """Appends events; every line is synced to disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        if self.path.exists() and (data := self.path.read_bytes()) and not data.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")

    def add(self, event: Event, unit: str, attempt: int, **details: Any) -> None:
        line = {"time": now(), "event": event, "unit": unit, "attempt": attempt, "pid": os.getpid(), **details}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
