"""Times of single kernels at one rank's sizes, beside the read floor of the same run and a library's kernel."""

from __future__ import annotations

from fasttrack.checks.base import Context, Unit
from fasttrack.errors import EvidenceError
from fasttrack.records import Evidence, PerformanceRecord
from fasttrack.target import KernelBenchmark, KernelBenchmarkTarget, KernelTiming

PARTS = 4  #: units per tensor-parallel size: a run that is cut off and continued repeats one of them at most


def run(unit: Unit, ctx: Context) -> None:
    """Measure the unit's part of the benchmarks of its ``tp``, and of those that are the same on every rank.

    Raises :class:`EvidenceError` for a target that offers none.
    """
    target = ctx.target
    if not isinstance(target, KernelBenchmarkTarget):
        raise EvidenceError(
            f"target {ctx.description.name} offers no kernel benchmarks; performance.kernels needs them"
        )
    tp, first = unit.params["tp"], unit.params["first"]
    wanted = [
        b
        for b in target.kernel_benchmarks(ctx.scope.tier, ctx.scope.manifest.engine.options)
        if b.tp == tp or (first and b.tp == 0)
    ][unit.params["part"] :: PARTS]
    for done, benchmark in enumerate(wanted):
        ctx.progress(done, len(wanted), benchmark.name)
        found = benchmark.run()
        _record(ctx, benchmark, found.kernel, "optimized", found.floor_s, found.device, tp)
        if found.reference is not None:
            _record(ctx, benchmark, found.reference, "stock", found.floor_s, found.device, tp)


def _record(
    ctx: Context, benchmark: KernelBenchmark, timing: KernelTiming, arm: str, floor_s: float, device: str, tp: int
) -> None:
    ctx.record(
        PerformanceRecord,
        arm=arm,
        evidence=Evidence(kind="shard", device=device, rank=0, ranks=tp),
        metric="kernel_time",
        unit_of_measure="s",
        value=timing.seconds,
        per="launch",
        tokens=0,
        prefill_included=False,
        step_kinds={},
        acceptance="none",
        clock=timing.clock,
        samples=timing.samples,
        details={
            "kernel": benchmark.name,
            "measured": timing.what,
            "op": benchmark.op,
            "shape": benchmark.shape,
            "rows": benchmark.rows,
            "tp": benchmark.tp,
            "bytes": benchmark.bytes,
            "floor_s": floor_s,
            "goal_fraction": benchmark.goal_fraction,
            "goal_s": benchmark.goal_s,
            "p10_s": timing.p10,
            "p90_s": timing.p90,
        },
    )
