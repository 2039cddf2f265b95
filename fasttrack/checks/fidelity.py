"""Teacher-forced fidelity and routing: the same tokens and batch composition in every arm, held against the oracle.

Sequences are sampled from the oracle at temperature 1, so that they are likely under the model, then forced. Every
claimed batch size has its batch, some sequences end near the far end of the context bucket, and in some batches
requests come and go. Where
the manifest gives ``exact_options``, both arms are measured with them as well: hardly anything rounds there, and a
formula that is off by half a per cent in one head stands out by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import Context, Unit, evidence, sha256_tokens
from fasttrack.checks.schedule import come_and_go
from fasttrack.errors import EvidenceError
from fasttrack.records import CellKey, FidelityRecord, RoutingRecord
from fasttrack.target import Completion, Engine, EngineInfo, LedgerStep, Request, RoutingEngine, RoutingStep, Sampling

if TYPE_CHECKING:
    import torch

ARMS = ("stock", "optimized")
#: KL divergences below this, per position, are rounding of the FP64 sum itself, in nats.
KL_FLOOR = 1e-15


def run(unit: Unit, ctx: Context) -> None:
    """``unit.params``: ``batches`` (see :data:`fasttrack.checks.batches.Batch`), ``exact``.

    Memory: one [tokens, vocabulary] table of FP64 log-probabilities per sequence of a batch and arm.
    """
    assert unit.cell is not None
    batches: Sequence[Mapping[str, int]] = unit.params["batches"]
    first = 0
    for number, batch in enumerate(batches):
        cell = unit.cell.model_copy(update={"requests": batch["requests"]})
        _Batch(unit, ctx, cell, batch, first, bool(unit.params.get("exact"))).run()
        first += batch["requests"] + batch.get("late", 0)
        ctx.progress(number + 1, len(batches), "batches")


class _Batch:
    """One batch of forced sequences through every arm."""

    def __init__(
        self, unit: Unit, ctx: Context, cell: CellKey, batch: Mapping[str, int], first: int, exact: bool
    ) -> None:
        self.unit, self.ctx, self.cell, self.batch, self.first, self.exact = unit, ctx, cell, batch, first, exact
        self.run_name = f"{unit.name}/{first}"

    def run(self) -> None:
        oracle, info = self.ctx.engine("oracle", tp=1, cell=self.cell)
        seed = self.ctx.seed(self.run_name)
        bucket = self.ctx.scope.bucket(self.cell.context)
        changes = {name: self.batch.get(name, 0) for name in ("far", "late", "pause")}
        requests = come_and_go(self.cell.requests, self.batch["tokens"], bucket, info, seed, **changes)
        sampled = [
            replace(r, sampling=Sampling(temperature=1.0, seed=seed + i, ignore_eos=True))
            for i, r in enumerate(requests)
        ]
        answers, _, routing = self._generate(oracle, sampled, "oracle")
        exact = [_table(a, "oracle") for a in answers]
        forced = [replace(r, forced=tuple(a.token_ids)) for r, a in zip(requests, answers, strict=True)]
        largest = 0.0
        for arm in ARMS:
            engine, info = self._engine(arm)
            completions, steps, chosen = self._generate(engine, forced, arm)
            self.ctx.write_steps(steps, arm=arm, cell=self.cell, info=info)
            tables = [_table(c, arm) for c in completions]
            if arm == "stock":
                largest = max(largest_error(t, e) for t, e in zip(tables, exact, strict=True))
            # Two log-probabilities each off by stock's largest error can swap.
            near_tie = 2 * largest * (1 + self.ctx.scope.manifest.margins.fidelity)
            for i, (request, table) in enumerate(zip(forced, tables, strict=True)):
                # The first token comes out of prefill, which is stock in either arm.
                found = compare(table[1:], exact[i][1:], request.forced[1:], near_tie=near_tie)
                where = {"context": len(request.prompt) + len(request.forced), "late": request.arrival_step > 0}
                asked = {"prompt_sha256": sha256_tokens(request.prompt), "prompt_tokens": len(request.prompt)}
                place = {"batch": self.run_name, "sequence": f"{self.first + i}"}
                self._record(FidelityRecord, arm, info, **place, **asked, **where, **found)
            self._record_routing(arm, info, steps, routing, chosen)

    def _engine(self, arm: str) -> tuple[Engine, EngineInfo]:
        cell, options = self.cell, self.ctx.scope.manifest.engine.exact_options if self.exact else None
        acceptance = "measured" if cell.draft_length else "none"
        return self.ctx.engine(
            arm,
            tp=cell.tp,
            dcp=cell.dcp,
            draft_length=cell.draft_length,
            acceptance=acceptance,
            cell=cell,
            options=options,
        )

    def _generate(
        self, engine: Engine, requests: Sequence[Request], arm: str
    ) -> tuple[list[Completion], list[LedgerStep], list[RoutingStep]]:
        """Completions, ledger and, of engines that tell, the chosen experts."""
        teller = engine if isinstance(engine, RoutingEngine) and not self.cell.draft_length else None
        if teller is not None:
            teller.record_routing(True)
        try:
            done = engine.generate(requests, run=f"{self.run_name}/{arm}", keep_logits=True)
            return done, engine.drain_ledger(), list(teller.drain_routing()) if teller is not None else []
        finally:
            if teller is not None:
                teller.record_routing(False)

    def _record(self, kind: type[Any], arm: str, info: EngineInfo, **fields: Any) -> None:
        self.ctx.record(kind, arm=arm, cell=self.cell, evidence=evidence(info), exact=self.exact, **fields)

    def _record_routing(
        self,
        arm: str,
        info: EngineInfo,
        steps: Sequence[LedgerStep],
        oracle: Sequence[RoutingStep],
        chosen: Sequence[RoutingStep],
    ) -> None:
        for part, whole in enumerate(unchanged(steps, self.cell.requests)):
            for row, counts in enumerate(count_routing(oracle, [s for s in chosen if s.index in whole])):
                name = f"{self.first + row}" + (f"/{part}" if part else "")
                self._record(RoutingRecord, arm, info, sequence=name, **counts)


def unchanged(steps: Sequence[LedgerStep], requests: int) -> list[set[int]]:
    """Indices of the pure decode steps of exactly ``requests`` requests, split where others came in between: within
    each part row ``i`` is one and the same sequence."""
    parts: list[set[int]] = [set()]
    for step in sorted(steps, key=lambda s: s.index):
        if step.kind == "decode" and step.rows == requests:
            parts[-1].add(step.index)
        elif step.kind != "decode" and parts[-1]:
            parts.append(set())
    return [part for part in parts if part]


def count_routing(oracle: Sequence[RoutingStep], chosen: Sequence[RoutingStep]) -> list[dict[str, Any]]:
    """Per sequence, the fields of a :class:`RoutingRecord`: row ``i`` of every step is sequence ``i``.

    Steps of other rows than the oracle's are no comparison: :class:`EvidenceError`.
    """
    expected = {(s.index, s.layer): s.experts for s in oracle}
    found: list[dict[str, Any]] = []
    for step in chosen:
        wanted = expected.get((step.index, step.layer))
        if wanted is None or len(wanted) != len(step.experts) or (found and len(found) != len(wanted)):
            raise EvidenceError(f"step {step.index} of {step.run} routed other rows than the oracle's")
        if not found:
            empty = {"choices": 0, "sets_differ": 0, "experts_differ": 0, "experts": len(step.experts[0])}
            found = [{**empty, "layers": {}} for _ in wanted]
        for counts, right, own in zip(found, wanted, step.experts, strict=True):
            missing = len(set(right) - set(own))
            counts["choices"] += 1
            counts["experts_differ"] += missing
            if missing:
                counts["sets_differ"] += 1
                counts["layers"][step.layer] = counts["layers"].get(step.layer, 0) + 1
    return found


def _table(completion: Completion, arm: str) -> torch.Tensor:
    if completion.full_logprobs is None:
        raise EvidenceError(f"the engine of arm {arm} returns no full log-probabilities; fidelity cannot be measured")
    # Log-probabilities rounded to FP32 do not sum to one; left alone, that alone would outweigh a small divergence.
    return completion.full_logprobs.detach().double().cpu().log_softmax(1)


def largest_error(table: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference of two tables of log-probabilities, where both are finite."""
    difference = (table - exact).abs()
    return float(difference[difference.isfinite()].max()) if difference.isfinite().any() else 0.0


def compare(table: torch.Tensor, exact: torch.Tensor, forced: Sequence[int], near_tie: float) -> dict[str, Any]:
    """The fields of a :class:`FidelityRecord` from two [positions, vocabulary] tables of log-probabilities.

    ``near_tie`` is the gap, in nats, below which the oracle's best two tokens may swap by rounding.
    """
    import torch

    if table.shape != exact.shape or len(forced) != len(exact):
        raise ValueError(f"tables {tuple(table.shape)} and {tuple(exact.shape)} for {len(forced)} forced tokens")
    nonfinite = int((~table.isfinite() & exact.isfinite()).sum() + table.isnan().logical_and(~exact.isfinite()).sum())
    probability = exact.exp()
    terms = torch.where(probability > 0, probability * (exact - table), 0.0)
    divergence = terms.sum(1).clamp_min(0.0)
    index = torch.tensor(list(forced)).unsqueeze(1)
    error = (table.gather(1, index) - exact.gather(1, index)).abs().squeeze(1)
    best = exact.topk(2, dim=1).values
    gap = best[:, 0] - best[:, 1]
    flipped = table.argmax(1) != exact.argmax(1)
    logs = 0.5 * divergence.clamp_min(KL_FLOOR).log()
    return {
        "positions": len(forced),
        "kl_sum": float(divergence.sum()),
        "kl_max": float(divergence.max()),
        "abs_error_sum": float(error.sum()),
        "abs_error_max": float(error.max()),
        "log_error_sum": float(logs.sum()) if bool(logs.isfinite().all()) else math.inf,
        "largest_error": largest_error(table, exact),
        "largest_flip": float(gap[flipped].max()) if bool(flipped.any()) else 0.0,
        "top1_flips": int(flipped.sum()),
        "near_ties": int((flipped & (gap <= near_tie)).sum()),
        "nonfinite": nonfinite,
    }


__all__ = ["compare", "count_routing", "run"]
