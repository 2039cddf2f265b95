"""The second witness: the harness's own profiler, and which engine step each of its events belongs to.

An engine opens a range ``fasttrack.step/<run>/<index>`` around each step. CPU events belong to the
step whose range contains their start. GPU kernels run later than the call that launched them, so a
kernel belongs to the step that contains its launch (same correlation id), be it a kernel or a graph launch.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fasttrack.target import STEP_RANGE, TargetDescription


@dataclass(frozen=True)
class Event:
    """One profiler event. ``correlation`` links a launch on the CPU with its kernels; 0 = none. Times in ns."""

    name: str
    start: int
    end: int
    on_device: bool
    correlation: int = 0


@dataclass
class StepTrace:
    """What the profiler saw inside one step: target ops (CPU) or kernels (GPU) by name, and how many others."""

    run: str
    index: int
    source: str
    ops: Counter[str] = field(default_factory=Counter)
    other_ops: int = 0


def attribute(events: Iterable[Event], description: TargetDescription) -> list[StepTrace]:
    """One trace per step range and source, in step order. Steps without GPU events get no GPU trace."""
    events = list(events)
    ranges = sorted((e for e in events if _is_step(e.name) and not e.on_device), key=lambda e: e.start)
    starts = [e.start for e in ranges]

    def step_at(moment: int) -> Event | None:
        position = bisect.bisect_right(starts, moment) - 1
        return ranges[position] if position >= 0 and moment < ranges[position].end else None

    traces = {_key(r, "cpu"): StepTrace(*_run_index(r.name), "torch.profiler/cpu") for r in ranges}
    launches = {e.correlation: e.start for e in events if not e.on_device and e.correlation and _is_launch(e.name)}
    for event in events:
        if _is_step(event.name):
            continue
        moment: int | None = event.start
        if event.on_device:
            moment = launches.get(event.correlation)
        step = step_at(moment) if moment is not None else None
        if step is None:
            continue
        source = "cuda" if event.on_device else "cpu"
        trace = traces.setdefault(_key(step, source), StepTrace(*_run_index(step.name), f"torch.profiler/{source}"))
        name = _kernel_name(event.name, description) if event.on_device else _op_name(event.name, description)
        if name:
            trace.ops[name] += 1
        else:
            trace.other_ops += 1
    return list(traces.values())


def _key(step: Event, source: str) -> tuple[str, str]:
    return step.name, source


def _is_step(name: str) -> bool:
    return name.startswith(STEP_RANGE + "/")


def _run_index(name: str) -> tuple[str, int]:
    run, _, index = name.removeprefix(STEP_RANGE + "/").rpartition("/")
    return run, int(index)


def _is_launch(name: str) -> bool:
    return name.startswith(("cuda", "cu", "hip")) and "Launch" in name


def _op_name(name: str, description: TargetDescription) -> str | None:
    return name if name in description.ops else None


def _kernel_name(name: str, description: TargetDescription) -> str | None:
    """The declared prefix that ``name`` starts with, so that variants of one kernel count together."""
    fitting = [prefix for prefix in description.kernels if name.startswith(prefix)]
    return max(fitting, key=len) if fitting else None


class StepProfiler:
    """A torch profiler that can be switched on between two steps and off after some more."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._events: list[Event] = []

    @property
    def running(self) -> bool:
        return self._profiler is not None

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs every start and stop to stderr, over our bars
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        self._events += _read(self._profiler)
        self._profiler = None

    def traces(self, description: TargetDescription) -> list[StepTrace]:
        return attribute(self._events, description)


def _read(profiler: Any) -> Sequence[Event]:
    """Raw events. ``profiler.events()`` builds a call tree, which costs seconds on the traces of a large step."""
    import torch

    cpu = torch.autograd.DeviceType.CPU
    return [
        Event(
            e.name(),
            e.start_ns(),
            e.start_ns() + e.duration_ns(),
            e.device_type() != cpu,
            e.correlation_id(),
        )
        for e in profiler.profiler.kineto_results.events()
    ]
