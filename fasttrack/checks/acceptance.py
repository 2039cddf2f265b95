"""Acceptance per draft position, counted from the ledger of verify steps. Measured and synthetic runs stay apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fasttrack.checks.base import Context, Unit, evidence
from fasttrack.checks.schedule import together
from fasttrack.records import AcceptanceRecord
from fasttrack.target import LedgerStep, Sampling

ARMS = ("stock", "optimized")


def run(unit: Unit, ctx: Context) -> None:
    """``unit.params``: ``mode`` as :attr:`EngineSpec.acceptance`, ``tokens`` per request, ``rounds`` of batches."""
    cell, mode = unit.cell, str(unit.params["mode"])
    assert cell is not None
    for arm in ARMS:
        engine, info = ctx.engine_for(arm, cell, mode)
        steps: list[LedgerStep] = []
        for turn in range(int(unit.params["rounds"])):
            sampling = Sampling(temperature=1.0, ignore_eos=True, seed=ctx.seed(f"{unit.name}/{turn}/sampling"))
            bucket, seed = ctx.scope.bucket(cell.context), ctx.seed(f"{unit.name}/{turn}")
            requests = together(cell.requests, int(unit.params["tokens"]), bucket, info, seed, sampling=sampling)
            engine.generate(requests, run=f"{unit.name}/{turn}/{arm}")
            steps += engine.drain_ledger()
        ctx.write_steps(steps, arm=arm, cell=cell, info=info)
        for position, (offered, stood) in enumerate(count(steps), start=1):
            ctx.record(
                AcceptanceRecord,
                arm=arm,
                cell=cell,
                evidence=evidence(info),
                mode=mode,
                position=position,
                offered=offered,
                stood=stood,
            )


def count(steps: Iterable[LedgerStep]) -> Sequence[tuple[int, int]]:
    """(offered, stood) per draft position, over pure verify steps: a draft stands when all before it do as well."""
    found: dict[int, list[int]] = {}
    for step in steps:
        if step.kind == "verify":
            for position in range(1, step.draft_length + 1):
                tally = found.setdefault(position, [0, 0])
                tally[0] += len(step.accepted)
                tally[1] += sum(kept >= position for kept in step.accepted)
    return [(tally[0], tally[1]) for _, tally in sorted(found.items())]
