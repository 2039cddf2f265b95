"""What the harness may ask of the toy target. The optimised path is :mod:`fake_target.fast`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fasttrack.target import DeploymentRefused, Engine, EngineSpec, Limits, NumericsCase, TargetDescription

LIMITS = Limits(tensor_parallel=(1, 2, 4), max_rows=16, draft_lengths=(0,), max_context=512)


class ToyTarget:
    def describe(self) -> TargetDescription:
        return TargetDescription(
            name="toy",
            version="1",
            model="toy linear recurrence",
            switch="toy_backend",
            on="fast",
            off="auto",
            source_paths=("fake_target/",),
            optimized_modules=("fake_target.fast",),
            ops=("toy::update", "toy::head"),
            kernels=("toy_",),
            fallback_reasons=("switched_off", "not_pure_decode", "too_many_rows"),
            limits=LIMITS,
            providers=("torch",),
            faults=("refuse_all", "false_ledger", "drop_partial"),
        )

    def engine(self, spec: EngineSpec) -> Engine:
        from fake_target.engine import ToyEngine

        reasons = []
        if spec.tp not in LIMITS.tensor_parallel:
            reasons.append(f"tp {spec.tp}: one of {LIMITS.tensor_parallel}")
        if spec.dcp != 1:
            reasons.append(f"dcp {spec.dcp}: 1")
        if spec.draft_length not in LIMITS.draft_lengths:
            reasons.append(f"draft length {spec.draft_length}: one of {LIMITS.draft_lengths}")
        if reasons and spec.switch_value == "fast":
            raise DeploymentRefused(reasons)
        return ToyEngine(spec)

    def numerics_cases(self, tier: str, options: Mapping[str, Any]) -> Iterable[NumericsCase]:
        from fake_target.fast import numerics_cases

        return numerics_cases()

    def profile(self, engine: Engine) -> AbstractContextManager[None]:
        return nullcontext()


TARGET = ToyTarget()


def write_entry_point(folder: Path) -> Path:
    """Register the toy target for every process that has ``folder`` and this package's parent on its path."""
    info = folder / "fasttrack_toy-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fasttrack-toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fasttrack.targets]\ntoy = fake_target.target:TARGET\n")
    return folder
