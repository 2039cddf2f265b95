"""Faults that act only in a part of the claimed scope, and what a gate says about a run that carries one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planted_target import PlantedTarget
from unit_run import run_units

from fasttrack.checks.base import Unit
from fasttrack.gates import GATES, GateResult, Scope
from fasttrack.manifest.model import Manifest
from kimi_k3.decode.ops import OpContext
from kimi_k3.faults import wrap
from kimi_k3.reference.engine import EmbeddedEngine
from kimi_k3.target import TARGET

Plant = Callable[[EmbeddedEngine], None]


def only_at(rows: int) -> Plant:
    """One rank's partial sums of every attention output are lost, in steps of ``rows`` rows."""

    def plant(engine: EmbeddedEngine) -> None:
        def wrapper(real: Any, context: OpContext, x: torch.Tensor, *rest: Any) -> None:
            if x.shape[1] == rows:
                x = x.clone()
                x[0] = 0
            real(context, x, *rest)

        wrap(engine, "oproj_publish", wrapper)

    return plant


def only_beyond(position: int) -> Plant:
    """Attention over more than ``position`` tokens is 2 % too small."""

    def plant(engine: EmbeddedEngine) -> None:
        def wrapper(real: Any, context: OpContext, *args: Any) -> None:
            real(context, *args)
            lens, partial = args[3], args[4]
            far = (lens > position).nonzero().flatten()
            partial[:, :, far] *= 0.98

        wrap(engine, "mla_core", wrapper)

    return plant


def stale_slots(engine: EmbeddedEngine) -> None:
    """The table of state slots is copied in when a prepared step first runs, and never again."""
    executor = engine.executor
    real, kept = executor.prepare, dict[int, torch.Tensor]()  # type: ignore[union-attr]

    def prepare(plan: Any, aux_layers: tuple[int, ...] = ()) -> Any:
        step = real(plan, aux_layers)
        inputs = step.inputs
        if id(step) not in kept:
            load = inputs.load

            def stale(batch: Any) -> None:
                load(batch)
                kept.setdefault(id(step), inputs.slots.clone())
                inputs.slots.copy_(kept[id(step)])

            inputs.load = stale
            kept.pop(id(step), None)
        return step

    executor.prepare = prepare  # type: ignore[union-attr]


def stray_write(engine: EmbeddedEngine) -> None:
    """A padding row writes into the null slot: no token of any request ever depends on it."""

    def wrapper(real: Any, context: OpContext, *args: Any) -> None:
        real(context, *args)
        args[7][0] += 1

    wrap(engine, "kda_core", wrapper)


def manifest(gate: str, row: dict[str, Any], **tier: Any) -> Manifest:
    """TINY-A with the embedded manifest's context bucket; ``tier`` changes knobs of its only tier."""
    return Manifest.model_validate(
        {
            "schema_version": 1,
            "name": "tiny",
            "target": "kimi_k3",
            "engine": {"kind": "embedded", "options": {"checkpoint": "tiny-a"}, "exact_options": {"precision": "fp32"}},
            "contexts": {"short": {"min": 1, "max": 256}},
            "scope": [{"name": "plain", "tp": [8], **row}],
            "gates": {"required": [gate]},
            "tiers": {"smoke": {"minutes": 1, "decode_steps": 3, "profiled_steps": 1, **tier}},
        }
    )


def gate_says(
    plant: Plant | None, gate: str, claims: Manifest, folder: Path, keep: Callable[[Unit], bool]
) -> tuple[GateResult, list[Any]]:
    """The verdict on the units that ``keep`` accepts, and their records."""
    scope = Scope(claims, "smoke", TARGET.describe())
    on_engine = None if plant is None else lambda built: plant(built.engine)
    records = run_units(scope, folder, keep, check=gate.partition(".")[0], target=PlantedTarget(TARGET, on_engine))
    return GATES[gate](scope, records), records
