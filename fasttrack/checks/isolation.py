"""Isolation: the optimised path runs where it was claimed, nowhere else, and not at all with the switch off."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fasttrack.checks import off_state
from fasttrack.checks.base import Context, Unit, cells_of, deployment_of
from fasttrack.checks.schedule import together
from fasttrack.checks.watch import WatchedRun
from fasttrack.records import CellKey
from fasttrack.target import DeploymentRefused, LedgerStep, Limits, Sampling

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

A_A_REQUESTS = 8  #: at most, per deployment; half of them sampled at temperature 1


class IsolationCheck:
    name = "isolation"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        cells = cells_of(manifest, tier)
        units = [
            Unit(f"isolation/cell/{cell}", self.name, cell, ("optimized",), 0.5 + 0.02 * cell.requests)
            for cell in cells
        ]
        units += [
            Unit(f"isolation/probe/{probe.name}", self.name, probe.key, ("optimized",), 1.0, {"probe": probe.name})
            for probe in manifest.probes_for(tier)
        ]
        deployments: dict[tuple[int, int, int, str], CellKey] = {}
        for cell in cells:
            key = (cell.tp, cell.dcp, cell.draft_length, cell.context)
            held = deployments.get(key)
            if held is None or held.requests < cell.requests <= A_A_REQUESTS:
                deployments[key] = cell
        units += [
            Unit(f"isolation/a_a/{cell}", self.name, cell, ("stock", "stock-repeat"), 1.0)
            for cell in deployments.values()
        ]
        units.append(Unit("isolation/off_state", self.name, cells[0], ("stock", "optimized"), 10.0))
        units.append(Unit("isolation/refusals", self.name, None, ("optimized",), 0.5))
        return units

    def run(self, unit: Unit, ctx: Context) -> None:
        kind = unit.name.split("/")[1]
        {"cell": _cell, "probe": _probe, "a_a": _a_a, "off_state": off_state.run, "refusals": _refusals}[kind](
            unit, ctx
        )


def _cell(unit: Unit, ctx: Context) -> None:
    cell = unit.cell
    assert cell is not None
    try:
        engine, info = ctx.engine_for("optimized", cell)
    except DeploymentRefused as refusal:
        ctx.write_refusal(deployment_of(cell), refusal.reasons)
        return
    ledger_rows = cell.requests * (1 + cell.draft_length)

    def wanted(step: LedgerStep) -> bool:
        return (step.kind, step.requests, step.rows) == (cell.step, cell.requests, ledger_rows)

    # One token a step where no draft stands, 1 + DL where all do: at least four steps even then.
    tokens = 1 + max(ctx.scope.knobs.decode_steps, 4 * (1 + cell.draft_length))
    for attempt in range(2):
        requests = together(cell.requests, tokens, ctx.scope.bucket(cell.context), info, ctx.seed(unit.name))
        watched = WatchedRun(engine, wanted=wanted, profiled=ctx.scope.knobs.profiled_steps)
        watched.generate(ctx, requests, run=f"{unit.name}/{attempt}")
        watched.write(ctx, arm="optimized", cell=cell, info=info)
        if any(wanted(step) for step in watched.steps):
            return
        # Prefill was spread over several steps and the first requests finished before the last began to decode.
        tokens += len(watched.steps) * (1 + cell.draft_length)
        engine.reset()


def _probe(unit: Unit, ctx: Context) -> None:
    probe = next(p for p in ctx.scope.probes() if p.name == unit.params["probe"])
    try:
        engine, info = ctx.engine_for("optimized", probe.key)
    except DeploymentRefused as refusal:
        ctx.write_refusal(deployment_of(probe.key), refusal.reasons)
        return
    if probe.expect == "refused":
        ctx.write_refusal(deployment_of(probe.key), [], refused=False)
        return
    steps = ctx.scope.knobs.decode_steps
    late = 1 if probe.step == "mixed" else 0
    requests = together(
        probe.requests,
        1 + (steps + 2 * late) * (1 + probe.draft_length),
        ctx.scope.bucket(probe.context),
        info,
        ctx.seed(unit.name),
        late=late,
        arrival_step=2 * late,
    )
    if probe.drafts == "non-uniform":
        requests = [r if i % 2 else replace(r, max_drafts=probe.draft_length // 2) for i, r in enumerate(requests)]
    watched = WatchedRun(
        engine,
        wanted=lambda step: step.kind == probe.step and step.requests == probe.requests,
        profiled=ctx.scope.knobs.profiled_steps,
        start_at={"prefill": -1, "mixed": 1}.get(probe.step),
    )
    watched.generate(ctx, requests, run=unit.name)
    watched.write(ctx, arm="optimized", cell=probe.key, info=info)


def _a_a(unit: Unit, ctx: Context) -> None:
    """Stock twice on one schedule, with late arrivals and sampling; the profiler watches a step of each."""
    cell = unit.cell
    assert cell is not None
    count = min(cell.requests, A_A_REQUESTS)
    for arm in ("stock", "stock-repeat"):
        engine, info = ctx.engine_for(arm, cell)
        # Sampled text takes few drafts; if all stood, these would still be four steps after the late arrivals.
        tokens = 1 + max(2 * ctx.scope.knobs.decode_steps, 6 * (1 + cell.draft_length))
        requests = together(
            count,
            tokens,
            ctx.scope.bucket(cell.context),
            info,
            ctx.seed(unit.name),
            sampling=Sampling(temperature=1.0, seed=ctx.seed(unit.name), ignore_eos=True, logprobs=1),
            late=count // 2,
            arrival_step=2,
        )
        watched = WatchedRun(engine, wanted=lambda step: True, profiled=1, start_at=3)
        run = f"{unit.name}/{arm}"
        done = watched.generate(ctx, requests, run)
        watched.write(ctx, arm=arm, cell=cell, info=info)
        for request, completion in zip(requests, done, strict=True):
            ctx.write_generation(request, completion, run=run, arm=arm, cell=cell, info=info)


def outside(limits: Limits) -> list[dict[str, int]]:
    """Deployments outside ``limits``, each with how many of them it violates; the last violates all at once."""
    tp = next(n for n in range(3, 1000) if n not in limits.tensor_parallel)
    inside = max(limits.tensor_parallel)
    dcp = next(n for n in range(2, 1000) if n not in (inside, tp))
    draft = next((d for d in limits.draft_lengths if d == 0), limits.draft_lengths[0])
    return [
        {"tp": tp, "dcp": 1, "draft_length": draft, "violations": 1},
        {"tp": inside, "dcp": dcp, "draft_length": draft, "violations": 1},
        {"tp": tp, "dcp": dcp, "draft_length": draft, "violations": 2},
    ]


def _refusals(unit: Unit, ctx: Context) -> None:
    for deployment in outside(ctx.description.limits):
        tp, dcp, draft = (deployment[k] for k in ("tp", "dcp", "draft_length"))
        try:
            ctx.engines.get("optimized", tp=tp, dcp=dcp, draft_length=draft, acceptance="none")
        except DeploymentRefused as refusal:
            ctx.write_refusal(deployment, refusal.reasons)
        else:
            ctx.write_refusal(deployment, [], refused=False)
