"""Evals, cheap and sharp first: forced logits and routing, free-running text, acceptance, then task scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrack.checks import acceptance, batches, fidelity, free_running
from fasttrack.checks.base import Context, Unit, cells_of, deployment_of
from fasttrack.errors import EvidenceError
from fasttrack.records import CellKey, Evidence, NotMeasuredRecord
from fasttrack.target import DeploymentRefused
from fasttrack.tasks.data import check_source, count_rows
from fasttrack.tasks.sources import scan

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

EXACT_SEQUENCES, EXACT_TOKENS = 8, 8  #: per deployment; where hardly anything rounds, a fault shows at once
STEP_S = 0.015  #: planning figure: one engine step of a tiny model on a CPU


class EvalsCheck:
    name = "evals"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        """One unit per deployment and rung that a gate of the manifest asks for.

        Raises :class:`fasttrack.errors.UsageError` for a task whose local data cannot be used.
        """
        wanted = {*manifest.gates.required, *manifest.gates.optional}
        buckets: dict[tuple[str, str], dict[CellKey, list[int]]] = {}
        for cell in cells_of(manifest, tier):
            deployments = buckets.setdefault((cell.step, cell.context), {})
            deployments.setdefault(cell.model_copy(update={"requests": 1}), []).append(cell.requests)
        units: list[Unit] = []
        for deployments in buckets.values():
            if wanted & {"evals.fidelity", "evals.routing"}:
                units += self._forced(manifest, tier, deployments)
        for deployments in buckets.values():
            if "evals.free_running" in wanted:
                units += self._free(manifest, tier, deployments)
            for cell, sizes in deployments.items():
                if "evals.acceptance" in wanted and cell.draft_length:
                    units += self._acceptance(manifest, tier, cell, sizes)
        if "evals.task_scores" in wanted:
            units += self._tasks(manifest, tier)
        return units

    def _forced(self, manifest: Manifest, tier: str, deployments: dict[CellKey, list[int]]) -> list[Unit]:
        knobs = manifest.tier(tier)
        plans = {"fidelity": batches.forced(deployments, knobs.fidelity_sequences, knobs.fidelity_tokens)}
        if manifest.engine.exact_options:
            sequences = min(EXACT_SEQUENCES * len(deployments), knobs.fidelity_sequences)
            plans["fidelity-exact"] = batches.forced(deployments, sequences, min(EXACT_TOKENS, knobs.fidelity_tokens))
        units = []
        for cell, sizes in deployments.items():
            for kind, plan in plans.items():
                arms = ("oracle", "stock", "optimized")
                cost = 1.0 + STEP_S * len(arms) * sum(b["tokens"] for b in plan[cell])
                params: dict[str, Any] = {"batches": plan[cell], "exact": kind == "fidelity-exact"}
                units.append(Unit(f"evals/{kind}/{_name(cell)}", self.name, _sized(cell, sizes), arms, cost, params))
        return units

    def _free(self, manifest: Manifest, tier: str, deployments: dict[CellKey, list[int]]) -> list[Unit]:
        knobs, arms = manifest.tier(tier), ("oracle", "stock", "optimized")
        plan = batches.free(deployments, knobs.free_running_requests)
        units = []
        for cell, sizes in deployments.items():
            cost = 1.0 + STEP_S * len(arms) * len(plan[cell]) * knobs.free_running_tokens
            params = {"batches": plan[cell], "tokens": knobs.free_running_tokens}
            name = f"evals/free_running/{_name(cell)}"
            units.append(Unit(name, self.name, _sized(cell, sizes), arms, cost, params))
        return units

    def _acceptance(self, manifest: Manifest, tier: str, cell: CellKey, sizes: list[int]) -> list[Unit]:
        knobs, largest = manifest.tier(tier), _sized(cell, sizes)
        synthetic = [c.acceptance for c in manifest.named_cells if c.acceptance.startswith("synthetic(")]
        ours = {c.acceptance for c in manifest.named_cells if c.key.model_copy(update={"requests": 1}) == cell}
        modes = ["measured", *dict.fromkeys(m for m in synthetic if m in ours)]
        params = {"tokens": 2 * knobs.free_running_tokens, "rounds": -(-knobs.free_running_requests // max(sizes))}
        cost = 1.0 + STEP_S * 2 * params["tokens"] * params["rounds"]
        return [
            Unit(
                f"evals/acceptance/{_name(cell)}/{mode}",
                self.name,
                largest,
                ("stock", "optimized"),
                cost,
                {**params, "mode": mode},
            )
            for mode in modes
        ]

    def _tasks(self, manifest: Manifest, tier: str) -> list[Unit]:
        knobs = manifest.tier(tier)
        cells = [cell for cell in cells_of(manifest, tier) if cell.step == "decode"]
        # Answers are written in the company that the scope is about: as many at once as its largest cell has.
        home = max(cells, key=lambda cell: cell.requests, default=None)
        units = []
        for task in manifest.tasks:
            check_source(task)
            plan = manifest.task_run(task, tier)
            items = min(plan.items, count_rows(task) or plan.items)
            tokens = items * plan.repeats * min(plan.max_tokens, task.assumed_tokens or plan.max_tokens)
            cost = 4.0 + tokens / (knobs.tokens_per_s or 100.0)
            units += [
                Unit(f"evals/task/{task.name}/{arm}", self.name, home, (arm,), cost, {"task": task.name})
                for arm in ("stock", "optimized")
            ]
        return units

    def preflight(self, manifest: Manifest, tier: str, folder: Path) -> None:
        """Read every row of every task, the hub's too, before a run folder exists."""
        if "evals.task_scores" in {*manifest.gates.required, *manifest.gates.optional}:
            for task in manifest.tasks:
                if not task.generated:
                    for _ in scan(task):
                        pass

    def run(self, unit: Unit, ctx: Context) -> None:
        rung = unit.name.split("/")[1]
        try:
            if rung.startswith("fidelity"):
                fidelity.run(unit, ctx)
            elif rung == "free_running":
                free_running.run(unit, ctx)
            elif rung == "acceptance":
                acceptance.run(unit, ctx)
            else:
                from fasttrack.checks import task_scores  # loads lm-eval, which takes seconds

                task_scores.run(unit, ctx)
        except DeploymentRefused as refusal:  # a record, not a crash: the gates say what is missing
            ctx.write_refusal(deployment_of(unit.cell) if unit.cell else {}, refusal.reasons)
        except EvidenceError as error:  # this engine cannot do it: say so, and go on with what it can do
            nothing = Evidence(kind="emulated", device="none: not measured")
            ctx.record(NotMeasuredRecord, cell=unit.cell, evidence=nothing, what=rung, reason=str(error))


def _name(cell: CellKey) -> str:
    return f"{cell.step}/tp{cell.tp}/dl{cell.draft_length}/dcp{cell.dcp}/{cell.context}"


def _sized(cell: CellKey, sizes: list[int]) -> CellKey:
    return cell.model_copy(update={"requests": max(sizes)})
