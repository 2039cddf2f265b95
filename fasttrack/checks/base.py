"""What a check is: work units that can be planned without torch, and a run of each that writes records."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fasttrack.engines.cache import EngineCache
from fasttrack.gates.base import Scope
from fasttrack.records import CellKey, EngineRecord, Evidence, GenerationRecord, RefusalRecord
from fasttrack.target import Completion, Engine, EngineInfo, LedgerStep, Request, Target, TargetDescription, step_record

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest


@dataclass(frozen=True)
class Unit:
    """The atom of work and of resume. ``cost_s`` is a rough estimate on two CPU cores, for the plan.

    ``engine``: it runs engines, so that the deployment's options and checkpoint must do.
    """

    name: str  #: unique in a run; the first part is the check's name
    check: str
    cell: CellKey | None = None
    arms: tuple[str, ...] = ()
    cost_s: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)
    engine: bool = True


class Check(Protocol):
    name: str

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        """What this check does in ``tier``. Torch-free, and known without the target."""
        ...

    def run(self, unit: Unit, ctx: Context) -> None:
        """Do one unit's work; everything it finds goes to ``ctx.write``."""
        ...


@dataclass
class Context:
    """What a check may use while it runs one attempt at one unit."""

    scope: Scope
    target: Target
    engines: EngineCache
    workdir: Path
    unit: Unit
    attempt: int
    seed: Callable[[str], int]  #: a seed for a named purpose, derived from the run's root seed
    write: Callable[[Any], None]  #: appends one record
    progress: Callable[[int, int, str], None] = lambda done, total, text: None

    @property
    def description(self) -> TargetDescription:
        return self.scope.description

    def record(self, kind: type[Any], **fields: Any) -> None:
        """Write a record of class ``kind`` of this unit and attempt."""
        self.write(kind(unit=self.unit.name, attempt=self.attempt, **fields))

    def engine(
        self,
        arm: str,
        *,
        tp: int = 1,
        dcp: int = 1,
        draft_length: int = 0,
        acceptance: str = "none",
        cell: CellKey | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Engine, EngineInfo]:
        """The arm's engine, reset, with its resolved configuration recorded.

        ``options`` override the manifest's; the record's configuration names them under ``overrides``.
        Raises :class:`fasttrack.target.DeploymentRefused` when the target refuses the deployment.
        """
        engine = self.engines.get(
            arm, tp=tp, dcp=dcp, draft_length=draft_length, acceptance=acceptance, options=options
        )
        info = engine.info()
        self.record(
            EngineRecord,
            arm=arm,
            cell=cell,
            evidence=evidence(info),
            engine=info.kind,
            switch={self.description.switch: self.engines.switch_value(arm)},
            devices=list(info.devices),
            checkpoint=info.checkpoint,
            config={
                "max_context": info.max_context,
                **info.config,
                **({"overrides": dict(options)} if options else {}),
            },
            modules_loaded=loaded_below(self.description.optimized_modules),
            vocab_size=info.vocab_size,
            eos_token_ids=list(info.eos_token_ids),
        )
        return engine, info

    def engine_for(self, arm: str, cell: CellKey, acceptance: str = "none") -> tuple[Engine, EngineInfo]:
        """The engine that produces the steps of ``cell``; drafts are accepted as they are unless told otherwise."""
        if cell.draft_length and acceptance == "none":
            acceptance = "measured"
        return self.engine(
            arm, tp=cell.tp, dcp=cell.dcp, draft_length=cell.draft_length, acceptance=acceptance, cell=cell
        )

    def write_refusal(self, deployment: Mapping[str, Any], reasons: Sequence[str], *, refused: bool = True) -> None:
        """The optimised arm's answer to a deployment it was asked to start with."""
        proof = Evidence(kind="emulated", device="none: refused at start" if refused else "")
        fields = {"deployment": dict(deployment), "refused": refused, "reasons": list(reasons)}
        self.record(RefusalRecord, arm="optimized", evidence=proof, **fields)

    def write_steps(self, steps: list[LedgerStep], *, arm: str, cell: CellKey | None, info: EngineInfo) -> None:
        proof = evidence(info)
        for step in steps:
            self.write(step_record(step, unit=self.unit.name, attempt=self.attempt, arm=arm, cell=cell, evidence=proof))

    def write_generation(
        self, request: Request, done: Completion, *, run: str, arm: str, cell: CellKey | None, info: EngineInfo
    ) -> None:
        self.record(
            GenerationRecord,
            arm=arm,
            cell=cell,
            evidence=evidence(info),
            run=run,
            request=request.id,
            prompt_sha256=sha256_tokens(request.prompt),
            prompt_tokens=len(request.prompt),
            token_ids=list(done.token_ids),
            finish_reason=done.finish_reason,
            logprobs=done.logprobs,
        )


def deployment_of(cell: CellKey) -> dict[str, int]:
    return {"tp": cell.tp, "dcp": cell.dcp, "draft_length": cell.draft_length, "requests": cell.requests}


def cells_of(manifest: Manifest, tier: str) -> list[CellKey]:
    """The tier's cells, each once: a named cell repeats a cell of the scope with other lengths."""
    return list(dict.fromkeys(cell.key for cell in manifest.cells(tier)))


def evidence(info: EngineInfo) -> Evidence:
    """What numbers of this engine may be used for; a shard says which rank of how many it plays."""
    rank, ranks = info.config.get("rank"), info.config.get("ranks_played")
    return Evidence.model_validate(
        {"kind": info.evidence, "device": ", ".join(dict.fromkeys(info.devices)), "rank": rank, "ranks": ranks}
    )


def loaded_below(modules: tuple[str, ...]) -> list[str]:
    """Loaded modules that are one of ``modules`` or below it."""
    return sorted(m for m in sys.modules if any(m == p or m.startswith(p + ".") for p in modules))


def sha256_tokens(tokens: tuple[int, ...] | list[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()
