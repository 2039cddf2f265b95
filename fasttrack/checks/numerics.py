"""Numerics: every op of the optimised path against its FP64 oracle, on inputs that reach what random ones do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import Context, Unit
from fasttrack.gates.numerics import FAMILIES
from fasttrack.records import Evidence, NumericsRecord

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest
    from fasttrack.target import NumericsCase

#: Two runs with different garbage in outputs and scratch: what depends on it differs between them.
POISONS = (float("nan"), 1e30)


class NumericsCheck:
    name = "numerics"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        return [
            Unit(f"numerics/{family}", self.name, cost_s=3.0, params={"family": family}, engine=False)
            for family in FAMILIES
        ]

    def run(self, unit: Unit, ctx: Context) -> None:
        family = unit.params["family"]
        options = ctx.scope.manifest.engine.options
        cases = [c for c in ctx.target.numerics_cases(ctx.scope.tier, options) if family in c.families]
        for done, case in enumerate(cases):
            ctx.progress(done, len(cases), f"{case.op} {case.name}")
            for repeat in range(ctx.scope.knobs.numerics_seeds):
                _one(case, family, ctx.seed(f"numerics/{case.name}/{family}/{repeat}"), ctx)


def _one(case: NumericsCase, family: str, seed: int, ctx: Context) -> None:
    import torch

    with torch.no_grad():
        first_inputs, second_inputs = case.inputs(family, seed), case.inputs(family, seed)
        pristine = case.inputs(family, seed)
        first, second = (
            case.run(inputs, poison) for inputs, poison in zip((first_inputs, second_inputs), POISONS, strict=True)
        )
        oracle = case.oracle(pristine)
        bound = case.bound(pristine, oracle)
        changed = sum(case.untouched(pristine, outputs) for outputs in (first, second))
    device = next((str(v.device) for v in first.values() if isinstance(v, torch.Tensor)), "cpu")
    proof = Evidence(kind="emulated" if device == "cpu" else "measured", device=device)
    for position, (name, exact) in enumerate(oracle.items()):
        ctx.record(
            NumericsRecord,
            arm="optimized",
            evidence=proof,
            op=case.op,
            provider=case.provider,
            case=case.name,
            family=family,
            output=name,
            bound=case.bound_text,
            changed_untouched=changed if position == 0 else 0,
            rerun_identical=_same_bits(first[name], second[name]),
            **compare(first[name], exact, bound[name]),
        )


def compare(given: Any, exact: Any, bound: Any) -> dict[str, Any]:
    """Error of ``given`` against FP64 ``exact`` in units of ``bound``, elementwise; a zero bound demands equality.

    Elements that are non-finite in the oracle must be equal to it; poison that survived has an infinite error.
    """
    import torch

    value, exact, bound = given.detach().double().cpu(), exact.detach().double().cpu(), bound.detach().double().cpu()
    if value.shape != exact.shape:
        raise ValueError(f"output has shape {tuple(value.shape)}, the oracle {tuple(exact.shape)}")
    same = (value == exact) | (value.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    ratio = torch.where(error == 0, 0.0, error / bound.expand_as(error)).nan_to_num(
        nan=float("inf"), posinf=float("inf")
    )
    empty = value.numel() == 0
    return {
        "dtype": str(given.dtype).removeprefix("torch."),
        "elements": value.numel(),
        "worst": 0.0 if empty else float(ratio.max()),
        "failing": int((ratio > 1).sum()),
        "max_abs_error": 0.0 if empty else float(error.max()),
        "nan_outputs": int((value.isnan() & ~exact.isnan()).sum()),
    }


def _same_bits(first: Any, second: Any) -> bool:
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, other = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (first, second))
    return bool(torch.equal(one, other))
