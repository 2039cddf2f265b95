"""Teacher-forced fidelity: the same tokens, schedule and batch composition in every arm, compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import Context, Unit, evidence
from fasttrack.checks.schedule import together
from fasttrack.errors import EvidenceError
from fasttrack.records import CellKey, FidelityRecord
from fasttrack.target import Completion, Sampling

if TYPE_CHECKING:
    import torch


def run(unit: Unit, ctx: Context) -> None:
    """Sequences are sampled from the oracle at temperature 1, so that they are likely under the model, then forced.

    Memory: one [tokens, vocabulary] table of FP64 log-probabilities per sequence of a batch and arm.
    """
    cell, knobs = unit.cell, ctx.scope.knobs
    assert cell is not None
    done = 0
    while done < knobs.fidelity_sequences:
        count = min(cell.requests, knobs.fidelity_sequences - done)
        _batch(unit, ctx, cell, count, first=done)
        done += count
        ctx.progress(done, knobs.fidelity_sequences, "sequences")


def _batch(unit: Unit, ctx: Context, cell: CellKey, count: int, first: int) -> None:
    tokens = ctx.scope.knobs.fidelity_tokens
    seed = ctx.seed(f"{unit.name}/{first}")
    oracle, info = ctx.engine("oracle", tp=1, cell=cell)
    requests = together(count, tokens, ctx.scope.bucket(cell.context), info, seed)
    sampled = [
        replace(r, sampling=Sampling(temperature=1.0, seed=seed + i, ignore_eos=True)) for i, r in enumerate(requests)
    ]
    answers = oracle.generate(sampled, run=f"{unit.name}/{first}/oracle", keep_logits=True)
    forced = [replace(r, forced=tuple(a.token_ids)) for r, a in zip(requests, answers, strict=True)]
    exact = [_table(a, "oracle") for a in answers]
    rounding: list[float] = []
    for arm in ("stock", "optimized"):
        engine, info = ctx.engine_for(arm, cell)
        completions = engine.generate(forced, run=f"{unit.name}/{first}/{arm}", keep_logits=True)
        ctx.write_steps(engine.drain_ledger(), arm=arm, cell=cell, info=info)
        tables = [_table(c, arm) for c in completions]
        if arm == "stock":
            # Two log-probabilities each off by stock's largest error can swap; the margin scales it.
            scale = 2 * (1 + ctx.scope.manifest.margins.fidelity)
            rounding = [scale * _largest_difference(t, e) for t, e in zip(tables, exact, strict=True)]
        for i, (request, table) in enumerate(zip(forced, tables, strict=True)):
            ctx.record(
                FidelityRecord,
                arm=arm,
                cell=cell,
                evidence=evidence(info),
                sequence=f"{first + i}",
                **compare(table, exact[i], request.forced, near_tie=rounding[i]),
            )


def _table(completion: Completion, arm: str) -> torch.Tensor:
    if completion.full_logprobs is None:
        raise EvidenceError(f"the engine of arm {arm} returns no full log-probabilities; fidelity cannot be measured")
    # Log-probabilities rounded to FP32 do not sum to one; left alone, that alone would outweigh a small divergence.
    return completion.full_logprobs.detach().double().cpu().log_softmax(1)


def _largest_difference(table: torch.Tensor, exact: torch.Tensor) -> float:
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
    flipped = table.argmax(1) != exact.argmax(1)
    return {
        "positions": len(forced),
        "kl_sum": float(divergence.sum()),
        "kl_max": float(divergence.max()),
        "abs_error_sum": float(error.sum()),
        "abs_error_max": float(error.max()),
        "top1_flips": int(flipped.sum()),
        "near_ties": int((flipped & (best[:, 0] - best[:, 1] <= near_tie)).sum()),
        "nonfinite": nonfinite,
    }
