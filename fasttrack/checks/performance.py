"""Performance: five metrics per cell and arm, recorded apart and never combined; pure decode apart from the rest."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fasttrack.checks import kernel_times
from fasttrack.checks.base import Context, Unit, cells_of, deployment_of, evidence
from fasttrack.checks.schedule import together
from fasttrack.manifest.model import Context as Bucket
from fasttrack.records import CellKey, PerformanceRecord
from fasttrack.target import Completion, DeploymentRefused, Engine, EngineInfo, LedgerStep

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

KERNELS = "performance.kernels"
CLOCK = "harness time.perf_counter, read after each step"
ENGINE_CLOCK = "engine, one reading per emitted token"
#: Arm order of a measurement; counterbalanced, so that a drift of the machine favours neither arm.
ABBA = ("stock", "optimized", "optimized", "stock")


class PerformanceCheck:
    name = "performance"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        knobs = manifest.tier(tier)
        gates = {*manifest.gates.required, *manifest.gates.optional}
        units = []
        if KERNELS in gates:
            sizes = list(dict.fromkeys(cell.tp for cell in cells_of(manifest, tier)))
            units = [
                Unit(
                    f"performance/kernels/tp{tp}/{part + 1}of{kernel_times.PARTS}",
                    self.name,
                    arms=("optimized",),
                    cost_s=120.0 / kernel_times.PARTS,
                    params={"tp": tp, "first": not i, "part": part},
                    engine=False,
                )
                for i, tp in enumerate(sizes)
                for part in range(kernel_times.PARTS)
            ]
            if not any(gate.startswith("performance.") and gate != KERNELS for gate in gates):
                return units  # one rank's shard: there is no engine to time
        for cell in manifest.cells(tier):
            name = f"performance/named/{cell.name}" if cell.named else f"performance/{cell.key}"
            steps = knobs.performance_tokens
            if cell.named:
                steps = -(-cell.named.tokens(knobs.named_steps) // int(cell.named.acceptance_length or 1))
            cost = 0.3 + steps * (0.02 + 0.002 * cell.key.rows)
            units.append(
                Unit(
                    name, self.name, cell.key, ("stock", "optimized"), cost, {"named": cell.name} if cell.named else {}
                )
            )
        return units

    def run(self, unit: Unit, ctx: Context) -> None:
        if unit.name.startswith("performance/kernels/"):
            kernel_times.run(unit, ctx)
            return
        cell = unit.cell
        assert cell is not None
        named = next((c for c in ctx.scope.manifest.named_cells if c.name == unit.params.get("named")), None)
        tokens, bucket = ctx.scope.knobs.performance_tokens, ctx.scope.bucket(cell.context)
        acceptance, prompt_tokens = "measured" if cell.draft_length else "none", None
        if named is not None:
            tokens = named.tokens(ctx.scope.knobs.named_steps)
            acceptance, prompt_tokens = named.acceptance, named.input_tokens
        measured = ctx.engine_for("stock", cell, acceptance)[1].evidence != "emulated"
        order = ABBA if measured else ABBA[:2]  # emulated runs are about counts: one run of each arm tells them all
        for position, arm in enumerate(order):
            ctx.progress(position, len(order), arm)
            repeat = order[:position].count(arm)
            try:
                engine, info = ctx.engine_for(arm, cell, acceptance)
            except DeploymentRefused as refusal:
                ctx.write_refusal(deployment_of(cell), refusal.reasons)
                return
            _measure(ctx, engine, info, arm, cell, bucket, prompt_tokens, tokens, acceptance, repeat)


def _measure(
    ctx: Context,
    engine: Engine,
    info: EngineInfo,
    arm: str,
    cell: CellKey,
    bucket: Bucket,
    prompt_tokens: int | None,
    tokens: int,
    acceptance: str,
    repeat: int,
) -> None:
    requests = together(cell.requests, tokens, bucket, info, ctx.seed(ctx.unit.name), prompt_tokens=prompt_tokens)
    run = f"{ctx.unit.name}/{arm}/{repeat}"
    times: dict[int, float] = {}
    start = time.perf_counter()

    def ended(index: int) -> None:
        times[index] = time.perf_counter()

    completions = engine.generate(requests, run=run, on_step=ended)
    steps = engine.drain_ledger()
    ctx.write_steps(steps, arm=arm, cell=cell, info=info)
    for request, completion in zip(requests, completions, strict=True):
        ctx.write_generation(request, completion, run=run, arm=arm, cell=cell, info=info)
    for fields in metrics(steps, times, start, completions, cell):
        fields["details"] = {"run": run, "repeat": repeat, **fields.get("details", {})}
        ctx.record(PerformanceRecord, arm=arm, cell=cell, evidence=evidence(info), acceptance=acceptance, **fields)


def metrics(
    steps: list[LedgerStep], times: dict[int, float], start: float, completions: list[Completion], cell: CellKey
) -> list[dict[str, Any]]:
    """The fields of every metric of one run. ``times[i]`` is when step ``i`` ended, on the clock of ``start``.

    Decode throughput covers the longest stretch of steps of the cell's kind at its full batch; the stretch
    begins when the step before it ended. Requests are timed by the engine's own clock.
    """
    if not steps:
        return []
    found: list[dict[str, Any]] = []
    first, last = steps[0].index, steps[-1].index

    def window(begin: int, end: int, **fields: Any) -> dict[str, Any]:
        kinds = Counter(s.kind for s in steps if begin <= s.index <= end)
        details = {"first_step": begin, "last_step": end, **fields.pop("details", {})}
        return {"step_kinds": dict(kinds), "details": details, "clock": CLOCK, **fields}

    pure = _longest(steps, cell)
    before = [s.index for s in steps if pure and s.index < pure[0].index]
    if pure and before:
        seconds = times[pure[-1].index] - times[before[-1]]
        emitted = sum(s.emitted for s in pure)
        for per, share in (("aggregate", 1), ("user", cell.requests)):
            found.append(
                window(
                    pure[0].index,
                    pure[-1].index,
                    metric="decode_throughput",
                    unit_of_measure="tokens/s",
                    value=emitted / share / seconds,
                    per=per,
                    tokens=emitted // share,
                    prefill_included=False,
                )
            )
    prefill = [s.index for s in steps if s.kind in ("prefill", "mixed")]
    if prefill:
        seconds = times[prefill[-1]] - start
        common = {"unit_of_measure": "s", "prefill_included": True}
        found.append(
            window(first, prefill[-1], metric="prefill_time", value=seconds, per="aggregate", tokens=0, **common)
        )
    tokens = sum(len(c.token_ids) for c in completions)
    found.append(
        window(
            first,
            last,
            metric="output_throughput",
            unit_of_measure="tokens/s",
            value=tokens / (times[last] - start),
            per="aggregate",
            tokens=tokens,
            prefill_included=True,
        )
    )
    for done in completions:
        request = {"request": done.id, "per": "request", "unit_of_measure": "s", "prefill_included": True}
        ends = prefill[-1] if prefill else last
        first_token = done.token_times[0] - done.arrival_time
        latency = done.token_times[-1] - done.arrival_time
        found.append(
            {**window(first, ends, metric="ttft", value=first_token, tokens=0, **request), "clock": ENGINE_CLOCK}
        )
        found.append(
            {
                **window(first, last, metric="request_latency", value=latency, tokens=len(done.token_ids), **request),
                "clock": ENGINE_CLOCK,
            }
        )
    return found


def _longest(steps: list[LedgerStep], cell: CellKey) -> list[LedgerStep]:
    """The longest run of consecutive steps of the cell's kind at its full batch."""
    best: list[LedgerStep] = []
    current: list[LedgerStep] = []
    for step in steps:
        current = [*current, step] if (step.kind, step.requests) == (cell.step, cell.requests) else []
        if len(current) > len(best):
            best = current
    return best
