"""Timing of kernels by graph replay, and the read floor that the times are compared with.

What is timed: a CUDA graph of ``launches`` launches, replayed ``replays`` times between two events, no profiler. Give
every launch its own weights, so that nothing is found in L2: :func:`distinct` says how many copies that takes. A time
is the median over replays of (replay time / launches).

Needs a GPU and torch; nothing is imported from either until a function is called.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: total weights of a timed graph, at least: so much more than the 60 MB L2 that what survives in it is 1.5 %
COLD_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch. ``bytes`` per launch; ``floor_us`` at the read bandwidth of the same run."""

    name: str
    us: float
    p10: float
    p90: float
    replays: int
    launches: int
    bytes: int = 0
    floor_us: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """Part of the floor that was reached: 1.0 is reading at full bandwidth and nothing else."""
        return self.floor_us / self.us if self.us else 0.0


def distinct(bytes_per_launch: int, total: int = COLD_BYTES, least: int = 16, most: int = 384) -> int:
    """How many launches with their own weights a timed graph should have."""
    return max(least, min(most, -(-total // max(1, bytes_per_launch))))


def graph_of(launch: Callable[[int], None], launches: int) -> Any:
    """A CUDA graph of ``launch(0) ... launch(launches - 1)`` on one stream. ``launch`` must not allocate or compile."""
    import torch

    for i in range(min(2, launches)):  # module load and lazy initialisation stay outside
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    torch.cuda.synchronize()
    return graph


def time_graph(graph: Any, launches: int, replays: int = 60, warmup: int = 5) -> tuple[float, float, float]:
    """(median, 10th, 90th percentile) of microseconds per launch over ``replays`` replays of an existing graph."""
    import torch

    for _ in range(warmup):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    us = sorted(start.elapsed_time(stop) * 1e3 / launches for start, stop in events)
    return statistics.median(us), us[len(us) // 10], us[len(us) * 9 // 10]


def time_launches(
    name: str,
    launch: Callable[[int], None],
    launches: int,
    *,
    bytes_per_launch: int = 0,
    floor_tbps: float = 0.0,
    replays: int = 60,
    extra: dict[str, Any] | None = None,
) -> Timing:
    """Capture and time ``launches`` launches. ``floor_tbps``: from :func:`read_floor` in the same run."""
    graph = graph_of(launch, launches)
    us, p10, p90 = time_graph(graph, launches, replays)
    del graph
    floor = bytes_per_launch / (floor_tbps * 1e6) if floor_tbps else 0.0
    return Timing(name, us, p10, p90, replays, launches, bytes_per_launch, floor, extra or {})


def read_floor(gigabytes: float = 4.0, replays: int = 20) -> float:
    """Read bandwidth in TB/s (1e12 bytes) of a kernel that only reads, best of a few shapes; random data."""
    import torch

    from kimi_k3.kernels import stream_read
    from kimi_k3.kernels.runtime import address, compiled, current_stream

    chunks = int(gigabytes * 1e9) // stream_read.CHUNK
    data = torch.randint(0, 255, (chunks * stream_read.CHUNK,), dtype=torch.uint8, device="cuda")
    best, where = 0.0, address(data)
    for blocks, stages in ((132, 12), (264, 6), (396, 4)):
        kernel, args = stream_read.build(blocks, stages)
        code = compiled(("stream_read", blocks, stages), kernel, args)

        def launch(_: int, code: Any = code, at: Any = where) -> None:
            code(at, chunks, current_stream())

        us, _, _ = time_graph(graph_of(launch, 1), 1, replays)
        best = max(best, chunks * stream_read.CHUNK / us / 1e6)
    del data
    gc.collect()
    torch.cuda.empty_cache()
    return best


def environment() -> dict[str, Any]:
    """Device, driver, versions, clocks and date: what a result must be read with."""
    import torch

    smi = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    smi += ",clocks_throttle_reasons.active"
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = {}
    for name in ("nvidia-cutlass-dsl", "triton", "vllm", "cuda-bindings"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    p = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": p.name,
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "nvidia_smi": dict(zip(smi.split(","), [s.strip() for s in out.split(",")], strict=False)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **packages,
    }


def table(timings: list[Timing]) -> str:
    lines = [f"{'case':52s} {'us':>8s} {'p10':>8s} {'p90':>8s} {'floor':>8s} {'of floor':>8s} {'n':>4s}"]
    for t in timings:
        part = f"{100 * t.fraction:7.1f}%" if t.floor_us else "       -"
        lines.append(f"{t.name:52s} {t.us:8.2f} {t.p10:8.2f} {t.p90:8.2f} {t.floor_us:8.2f} {part} {t.replays:4d}")
    return "\n".join(lines)


def write(path: Path, timings: list[Timing], floor_tbps: float, what: str, **more: Any) -> None:
    """One JSON document: environment, floor, what was timed and how, every timing."""
    document = {
        "what": what,
        "method": "median over replays of a CUDA graph timed with events, per launch; distinct weights per launch; "
        "no profiler",
        "environment": environment(),
        "read_floor_TBps": round(floor_tbps, 4),
        **more,
        "timings": [{**asdict(t), "fraction": round(t.fraction, 4)} for t in timings],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
