"""Records of one feature unit of the toy target, made up the way the features check writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_target import TARGET
from harness import TOY

from fasttrack.gates import GATES, Scope
from fasttrack.gates.feature_units import feature_units
from fasttrack.gates.features import RULES
from fasttrack.manifest.model import Manifest
from fasttrack.records import Evidence, FeatureRecord, GenerationRecord, StepRecord, TraceRecord

EMULATED = Evidence(kind="emulated", device="cpu")
OPS = {"toy::update": 1, "toy::head": 1}


def scope_of(feature: str, drafts: int = 0, **changes: Any) -> Scope:
    row: dict[str, Any] = {"name": "plain", "tp": [2], "requests": [4]}
    if drafts:
        row |= {"step": "verify", "draft_length": [drafts], "requests": [2]}
    manifest = {**TOY, "scope": [row], "probes": [], "gates": {"required": [f"features.{feature}"]}, **changes}
    return Scope(Manifest.model_validate(manifest), "smoke", replace(TARGET.describe(), features=tuple(RULES)))


class Unit:
    """Records of one feature unit, written the way the check writes them."""

    def __init__(self, feature: str, drafts: int = 0, **changes: Any) -> None:
        self.scope = scope_of(feature, drafts, **changes)
        (self.unit,) = feature_units(self.scope.manifest, "smoke")
        self.records: list[Any] = []

    def common(self, arm: str) -> dict[str, Any]:
        return {"unit": self.unit.name, "arm": arm, "cell": self.unit.cell, "evidence": EMULATED}

    def run(self, arm: str, name: str) -> str:
        return f"{self.unit.name}/{arm}/{name}"

    def step(self, name: str = "asked", index: int = 0, kind: str = "", traced: bool = True, **fields: Any) -> None:
        """A step of the optimised arm, specialised unless told otherwise, and what the profiler saw of it."""
        drafts = self.unit.cell.draft_length
        values = {
            "kind": kind or ("verify" if drafts else "decode"),
            "requests": 2,
            "rows": 2 * (1 + drafts),
            "draft_length": drafts,
            "context_max": 9,
            "path": "specialized",
            "reason": None,
            "ops": OPS,
            "emitted": 4 if drafts else 2,
            **fields,
        }
        run = self.run("optimized", name)
        self.records.append(
            StepRecord(**self.common("optimized"), run=run, index=index, padded_rows=0, tp=2, dcp=1, **values)
        )
        if traced:
            self.records.append(
                TraceRecord(
                    **self.common("optimized"),
                    run=run,
                    index=index,
                    ops=values["ops"],
                    other_ops=3,
                    source="torch.profiler/cpu",
                )
            )

    def generate(self, arm: str, name: str, tokens: list[int], request: str = "r0", **fields: Any) -> None:
        values = {"finish_reason": "length", "text": "".join(map(chr, tokens)), "prompt_tokens": 8, **fields}
        self.records.append(
            GenerationRecord(
                **self.common(arm),
                run=self.run(arm, name),
                request=request,
                prompt_sha256=values.pop("prompt_sha256", request),
                token_ids=tokens,
                **values,
            )
        )

    def both(self, name: str, tokens: list[int], request: str = "r0", **fields: Any) -> None:
        for arm in ("stock", "optimized"):
            self.generate(arm, name, tokens, request, **fields)

    def finish(self, **numbers: float) -> None:
        steps = [r for r in self.records if isinstance(r, StepRecord) and r.kind in ("decode", "verify")]
        special = sum(s.path == "specialized" for s in steps)
        traced = {(t.run, t.index) for t in self.records if isinstance(t, TraceRecord)}
        self.records.append(
            FeatureRecord(
                **self.common("optimized"),
                feature=self.unit.feature,
                variant=self.unit.variant,
                held=True,
                specialized_steps=special,
                stock_steps=len(steps) - special,
                witnessed_steps=sum(s.path == "specialized" and (s.run, s.index) in traced for s in steps),
                numbers=numbers,
            )
        )

    def judge(self) -> Any:
        if not any(isinstance(r, FeatureRecord) for r in self.records):
            self.finish()
        return GATES[f"features.{self.unit.feature}"](self.scope, self.records)

    def change(self, kind: type[Any], where: Any = lambda r: True, **update: Any) -> None:
        at = next(i for i, r in enumerate(self.records) if isinstance(r, kind) and where(r))
        self.records[at] = self.records[at].model_copy(update=update)


def fast(record: Any) -> bool:
    return bool(record.arm == "optimized")
