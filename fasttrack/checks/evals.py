"""Evals: teacher-forced error to the oracle, then task scores through lm-eval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fasttrack.checks import fidelity
from fasttrack.checks.base import Context, Unit, cells_of, deployment_of
from fasttrack.records import CellKey
from fasttrack.target import DeploymentRefused
from fasttrack.tasks.data import check_source

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

MAX_BATCH = 16  #: teacher-forced sequences per batch: the cost of a step hardly grows with its rows, its noise falls


class EvalsCheck:
    name = "evals"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        """Raises :class:`fasttrack.errors.UsageError` for a task whose data cannot be used."""
        knobs = manifest.tier(tier)
        cells = [cell for cell in cells_of(manifest, tier) if cell.step == "decode"]
        forced: dict[tuple[int, int, str], CellKey] = {}
        for cell in cells:
            key = (cell.tp, cell.dcp, cell.context)
            if key not in forced or forced[key].requests < cell.requests <= MAX_BATCH:
                forced[key] = cell
        cost = 0.01 * knobs.fidelity_sequences * knobs.fidelity_tokens
        units = [
            Unit(f"evals/fidelity/{cell}", self.name, cell, ("oracle", "stock", "optimized"), cost)
            for cell in forced.values()
        ]
        for task in manifest.tasks:
            check_source(task)
            cost = 1.5 + 0.01 * knobs.task_items * knobs.task_repeats * knobs.task_tokens
            units += [
                Unit(
                    f"evals/task/{task.name}/{arm}",
                    self.name,
                    cells[0] if cells else None,
                    (arm,),
                    cost,
                    {"task": task.name},
                )
                for arm in ("stock", "optimized")
            ]
        return units

    def run(self, unit: Unit, ctx: Context) -> None:
        try:
            if unit.name.startswith("evals/fidelity/"):
                fidelity.run(unit, ctx)
            else:
                from fasttrack.checks import task_scores  # loads lm-eval, which takes seconds

                task_scores.run(unit, ctx)
        except DeploymentRefused as refusal:  # a record, not a crash: the gates say what is missing
            ctx.write_refusal(deployment_of(unit.cell) if unit.cell else {}, refusal.reasons)
