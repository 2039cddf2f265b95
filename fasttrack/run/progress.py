"""Progress of a run: bars on a terminal, one plain line per finished unit elsewhere. Goes to standard error."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from fasttrack.checks.base import Unit


class Reporter(Protocol):
    """Told about the units of a run in order."""

    def begin(self, units: int, cost_s: float) -> None: ...

    def unit(self, unit: Unit) -> None: ...

    def step(self, done: int, total: int, text: str) -> None: ...

    def done(self, unit: Unit, outcome: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    def begin(self, units: int, cost_s: float) -> None: ...

    def unit(self, unit: Unit) -> None: ...

    def step(self, done: int, total: int, text: str) -> None: ...

    def done(self, unit: Unit, outcome: str) -> None: ...

    def end(self) -> None: ...


class Lines:
    """One line per unit, with its number, outcome and seconds."""

    def __init__(self) -> None:
        self.number = self.units = 0
        self.started = 0.0

    def begin(self, units: int, cost_s: float) -> None:
        self.units = units

    def unit(self, unit: Unit) -> None:
        self.started = time.monotonic()

    def step(self, done: int, total: int, text: str) -> None: ...

    def done(self, unit: Unit, outcome: str) -> None:
        self.number += 1
        seconds = time.monotonic() - self.started
        print(f"[{self.number}/{self.units}] {unit.name}: {outcome}, {seconds:.1f} s", file=sys.stderr, flush=True)

    def end(self) -> None: ...


class Bars:
    """An overall bar weighted by planned cost, and the current unit's own bar."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )

    def begin(self, units: int, cost_s: float) -> None:
        self.progress.start()
        self.overall = self.progress.add_task("run", total=max(cost_s, 0.001), text="")
        self.current = self.progress.add_task("unit", total=1, text="")

    def unit(self, unit: Unit) -> None:
        self.progress.reset(self.current, total=1, description=unit.check, text=unit.name)

    def step(self, done: int, total: int, text: str) -> None:
        self.progress.update(self.current, completed=done, total=total, text=text)

    def done(self, unit: Unit, outcome: str) -> None:
        self.progress.advance(self.overall, max(unit.cost_s, 0.001))

    def end(self) -> None:
        self.progress.stop()


def reporter(quiet: bool = False) -> Reporter:
    if quiet:
        return Silent()
    return Bars() if sys.stderr.isatty() else Lines()
