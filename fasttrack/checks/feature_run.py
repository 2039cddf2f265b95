"""One feature on one deployment: generations of both arms, watched by both witnesses, and what they recorded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from fasttrack.checks.base import Context, evidence, sha256_tokens
from fasttrack.checks.schedule import SHORT_PROMPT, token_prompt
from fasttrack.checks.watch import WatchedRun
from fasttrack.gates.feature_units import FeatureUnit, UnitRecords
from fasttrack.gates.features import judge, witnesses
from fasttrack.records import CellKey, Evidence, FeatureRecord, GenerationRecord, RefusalRecord
from fasttrack.target import Completion, Engine, EngineInfo, Request, Sampling

#: What scenarios start from: greedy, and two alternatives per token, which tell a tie from a difference.
GREEDY = Sampling(ignore_eos=True, logprobs=2)


class FeatureRun:
    """What a scenario of :mod:`fasttrack.checks.features` works with.

    The stock arm runs without drafts: whatever an optimised arm with drafts emits must be what plain stock emits.
    Both arms run under the manifest's ``engine.feature_options``.
    """

    def __init__(self, unit: FeatureUnit, ctx: Context) -> None:
        self.unit, self.cell, self.records = unit, unit.cell, list[Any]()
        self.ctx = replace(ctx, write=self._write)
        self._append = ctx.write
        self.numbers: dict[str, float] = {}
        self.asked = "stock"  #: the arm that was last asked for something
        self._left = ctx.scope.knobs.profiled_steps
        self._engine: dict[str, tuple[Engine, EngineInfo]] = {}

    def _write(self, record: Any) -> None:
        self.records.append(record)
        self._append(record)

    @property
    def draft_length(self) -> int:
        return self.cell.draft_length

    def seed(self, purpose: str) -> int:
        return self.ctx.seed(f"{self.unit.name}/{purpose}")

    def engine(self, arm: str) -> tuple[Engine, EngineInfo]:
        """The arm's engine with empty caches. Raises what building an engine raises."""
        drafts = self.draft_length if arm == "optimized" else 0
        self._engine[arm] = self.ctx.engine(
            arm,
            tp=self.cell.tp,
            dcp=self.cell.dcp,
            draft_length=drafts,
            acceptance="measured" if drafts else "none",
            cell=self._cell(arm),
            options=self.ctx.scope.manifest.engine.feature_options,
        )
        return self._engine[arm]

    def _cell(self, arm: str) -> CellKey:
        """Stock of a deployment with drafts decodes without any."""
        return self.cell if arm == "optimized" else self.cell.model_copy(update={"step": "decode", "draft_length": 0})

    def info(self, arm: str = "stock") -> EngineInfo:
        return (self._engine.get(arm) or self.engine(arm))[1]

    def requests(
        self, tokens: int, *, count: int | None = None, prompt_tokens: int = SHORT_PROMPT, purpose: str = "prompts"
    ) -> list[Request]:
        """Greedy requests with prompts of random tokens that differ from request to request."""
        rng = random.Random(self.seed(purpose))
        return [
            Request(
                id=f"r{i}",
                prompt=token_prompt(rng, prompt_tokens, self.info()),
                max_tokens=tokens,
                sampling=GREEDY,
            )
            for i in range(count or self.cell.requests)
        ]

    def generate(
        self,
        arm: str,
        requests: Sequence[Request],
        name: str,
        *,
        fresh: bool = True,
        keep_logits: bool = False,
        record: bool = True,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[Completion]:
        """Run ``name`` of ``arm``, from empty caches unless ``fresh`` is false.

        Some specialised steps of the optimised arm are profiled. ``details`` go into the requests' records, by id;
        ``record`` false leaves the completions out, not the steps.
        """
        self.asked = arm
        engine, info = self.engine(arm) if fresh or arm not in self._engine else self._engine[arm]
        watched = WatchedRun(
            engine,
            wanted=lambda step: step.path == "specialized",
            profiled=self._left if arm == "optimized" else 0,
        )
        run = f"{self.unit.name}/{arm}/{name}"
        done = watched.generate(self.ctx, requests, run, keep_logits=keep_logits)
        self._left = watched.left if arm == "optimized" else self._left
        watched.write(self.ctx, arm=arm, cell=self._cell(arm), info=info)
        if arm == "optimized":
            self._count_reports(watched)
        for request, completion in zip(requests, done, strict=True) if record else ():
            self._write_generation(request, completion, run, arm, info, (details or {}).get(request.id, {}))
        return done

    def both(self, requests: Sequence[Request], name: str, **options: Any) -> tuple[list[Completion], list[Completion]]:
        """The same requests in both arms, stock first."""
        return self.generate("stock", requests, name, **options), self.generate("optimized", requests, name, **options)

    def _count_reports(self, watched: WatchedRun) -> None:
        """``on_step`` must name every step of the ledger, in order, each once."""
        indices, steps = watched.reported, [s.index for s in watched.steps]
        disorder = sum(a >= b for a, b in pairwise(indices))
        self.numbers["on_step_disorder"] = self.numbers.get("on_step_disorder", 0) + disorder
        missing = len(set(steps) - set(indices)) + watched.late
        self.numbers["on_step_missing"] = self.numbers.get("on_step_missing", 0) + missing

    def _write_generation(
        self, request: Request, done: Completion, run: str, arm: str, info: EngineInfo, details: Mapping[str, Any]
    ) -> None:
        self.ctx.record(
            GenerationRecord,
            arm=arm,
            cell=self._cell(arm),
            evidence=evidence(info),
            run=run,
            request=request.id,
            prompt_sha256=sha256_tokens(request.prompt),
            prompt_tokens=len(request.prompt),
            token_ids=list(done.token_ids),
            finish_reason=done.finish_reason,
            text=done.text,
            logprobs=done.logprobs,
            top_logprobs=done.top_logprobs,
            sampling={k: v for k, v in asdict(request.sampling).items() if v != getattr(GREEDY, k)},
            arrival_time=done.arrival_time,
            token_times=list(done.token_times),
            cached_tokens=done.cached_tokens,
            details=dict(details),
        )

    def finish(self) -> None:
        """The feature's own record, behind the raw ones it is judged by."""
        seen = witnesses(self.ctx.scope, UnitRecords(self.unit, self.records))
        pure = UnitRecords(self.unit, self.records).pure
        specialised = sum(s.path == "specialized" for s in pure)
        fields: dict[str, Any] = {
            "unit": self.unit.name,
            "attempt": self.ctx.attempt,
            "arm": "optimized",
            "cell": self.cell,
            "evidence": evidence(self.info("optimized")),
            "feature": self.unit.feature,
            "variant": self.unit.variant,
            "specialized_steps": specialised,
            "stock_steps": len(pure) - specialised,
            "witnessed_steps": next((int(t.value) for t in seen.tallies if t.name.startswith("of these")), 0),
            "numbers": self.numbers,
        }
        record = FeatureRecord(**fields, held=True)
        found = judge(self.ctx.scope, self.unit, [*self.records, record])
        explanation = "; ".join([*found.wrong, *found.vacuous])
        self._write(record.model_copy(update={"held": not explanation, "explanation": explanation}))

    def refuse(self, reasons: Sequence[str], *, at_start: bool) -> None:
        """The feature could not be run; a request that stock takes and the optimised arm does not is a fault of it."""
        self.ctx.record(
            RefusalRecord,
            arm=self.asked,
            evidence=Evidence(kind="emulated", device="none: refused"),
            deployment={
                "feature": self.unit.feature,
                "variant": self.unit.variant,
                "stock_served": self.asked == "optimized" and not at_start,
            },
            refused=True,
            reasons=list(reasons),
        )
