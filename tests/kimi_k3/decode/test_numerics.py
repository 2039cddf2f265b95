"""Numerics cases: every op within its bound; the bounds are neither too tight nor too wide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k3.decode import cases as all_cases
from kimi_k3.decode import registry
from kimi_k3.decode.cases import Case, bind, cases, op_cases
from kimi_k3.decode.numerics.bounded import BF16, E4M3, Bounded, half_ulp
from kimi_k3.decode.numerics.families import FAMILIES, Draw
from kimi_k3.decode.numerics.rig import OpCase
from kimi_k3.decode.ops import ROUNDING, SCHEMAS, OpContext
from kimi_k3.decode.providers import torch_mla
from kimi_k3.decode.registry import Provider
from kimi_k3.reference.numerics import to_fp8
from kimi_k3.reference.precision import FP8, Precision

POISONS = (float("nan"), 1e30)


def ratio(given: Tensor, oracle: Tensor, bound: Tensor) -> Tensor:
    """Error in units of the bound; equal values are fine whatever the bound, NaN never is."""
    given = given.double()
    error = torch.where(given == oracle, 0.0, (given - oracle).abs()).nan_to_num(nan=math.inf)
    return torch.where(error == 0, 0.0, error / bound)


def judge(case: Case, outputs: dict[str, Any], family: str, seed: int = 1) -> dict[str, float]:
    """Worst error per output."""
    inputs = case.inputs(family, seed)
    oracle = case.oracle(inputs)
    bound = case.bound(inputs, oracle)
    worst = {name: ratio(outputs[name], exact, bound[name]) for name, exact in oracle.items()}
    return {name: float(r.max()) for name, r in worst.items() if r.numel()}  # a full batch has no padding rows


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_is_within_its_bound_and_touches_nothing_else(family: str) -> None:
    seen = set()
    for case in cases("smoke"):
        first, second = (case.run(case.inputs(family, 1), poison) for poison in POISONS)
        worst = judge(case, first, family)
        assert max(worst.values()) <= 1, (case.name, worst)
        for name in worst:  # whatever was in outputs, scratch, padding and unused slots has no influence
            assert torch.equal(first[name], second[name]), (case.name, name)
        inputs = case.inputs(family, 1)
        assert case.untouched(inputs, first) == case.untouched(inputs, second) == 0, case.name
        seen.add(case.op.removeprefix("kimi_k3::"))
    assert seen == set(SCHEMAS)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_ideally_rounded_result_passes(family: str) -> None:
    """The FP64 result, rounded once to the output's dtype: no correct implementation can be better."""
    for case in cases("smoke"):
        outputs = case.run(case.inputs(family, 1), 0.0)
        oracle = case.oracle(case.inputs(family, 1))
        ideal = {name: exact.to(outputs[name].dtype) for name, exact in oracle.items()}
        worst = judge(case, ideal, family)
        assert max(worst.values()) <= 1, (case.name, worst)


def smoke(op: str) -> Iterator[OpCase]:
    found = [c for c in op_cases("smoke") if c.op == op]
    assert found
    yield from found


def spoiled(case: OpCase, change: Any, family: str = "normal") -> float:
    """Worst error of the op on inputs that ``change`` altered, judged by the bound of the unaltered ones."""
    bound = bind(case)
    inputs = bound.inputs(family, 1)
    change(inputs)
    return max(judge(bound, bound.run(inputs, 0.0), family).values())


LINEAR = {
    "in_proj": "weight",
    "oproj_publish": "weight",
    "dense_gate_up": "weight",
    "dense_down_push": "weight",
    "shared_gate_up": "weight",
    "shared_down_push": "weight",
    "moe_front": "weight",
    "mla_query": "q_b",
    "mla_value": "w_uv",
    "kda_core": "f_b",
    "moe_tail": "up",
}


@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize("family", ["normal", "outliers", "coded"])
def test_one_dropped_block_of_the_inner_dimension_fails(op: str, family: str) -> None:
    for case in smoke(op):

        def drop(inputs: dict[str, Tensor]) -> None:
            weight = inputs[LINEAR[op]]
            block = min(16, weight.shape[-1] // 2)
            weight[..., -block:] = 0

        assert spoiled(case, drop, family) > 1, case.name


@pytest.mark.parametrize("op", ["fc1", "fc2_publish"])
def test_one_dropped_scale_group_of_an_expert_fails(op: str) -> None:
    for case in smoke(op):

        def drop(inputs: dict[str, Tensor]) -> None:
            used = int(inputs["ids"][0, 0, 0])  # an expert that a live row chose
            inputs["packed"][:, used, :, -16:] = 0

        assert spoiled(case, drop) > 1, case.name


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("oproj_reduce_attnres", "partials"),
        ("dense_reduce", "partials"),
        ("moe_tail", "latent"),
        ("moe_tail", "shared"),
    ],
)
@pytest.mark.parametrize("rank", [0, 7])
def test_one_dropped_rank_fails(op: str, name: str, rank: int) -> None:
    for case in smoke(op):
        assert spoiled(case, lambda inputs: inputs[name][rank].zero_()) > 1, case.name


@pytest.mark.parametrize("op", ["oproj_publish", "dense_down_push", "shared_down_push", "fc2_publish", "moe_front"])
def test_a_publication_of_another_rank_fails(op: str) -> None:
    """Coded inputs: what lands in a mailbox names the rank it came from."""
    for case in smoke(op):
        bound = bind(case)
        outputs = bound.run(bound.inputs("coded", 1), 0.0)
        outputs = {k: v.roll(1, 2 if op == "moe_front" else 1) if k != "changed" else v for k, v in outputs.items()}
        assert max(judge(bound, outputs, "coded").values()) > 1, case.name


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("kda_core", lambda i: i["conv"].copy_(i["conv"].roll(1, 1))),  # taps shifted
        ("kda_core", lambda i: i["accepted"].copy_(torch.where(i["accepted"] > 1, i["accepted"] - 1, 4))),
        ("mla_core", lambda i: i["lens"].copy_((i["lens"] - 1).clamp(min=0))),  # the newest key unseen
        ("mla_core", lambda i: i["block_tables"].copy_(i["block_tables"].roll(1, 0))),
        ("mla_value", lambda i: i["lse"].mul_(math.log2(math.e))),  # base 2 taken for base e
        ("route", lambda i: i["bias"].zero_()),
        ("attn_res", lambda i: i["blocks"][:, 0].zero_()),
        ("embed", lambda i: i["ids"].add_(1).remainder_(512)),
    ],
)
def test_wrong_state_indices_and_bases_fail(op: str, change: Any) -> None:
    """At the largest case of each op; a single request or row may hide some of them."""
    case = list(smoke(op))[-1]
    assert spoiled(case, change) > 1


def test_ranks_that_leave_out_their_last_run_of_tokens_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Context parallelism: rounded down, only whole rounds over the ranks are attended to."""
    registry.load("torch")

    def owned_keys(length: Tensor, longest: int, context: OpContext) -> tuple[Tensor, Tensor]:
        run, ranks = context.interleave, context.dcp
        return whole(length, max(run * ranks, longest // (run * ranks) * run * ranks), context)

    whole = torch_mla._owned_keys
    monkeypatch.setattr(torch_mla, "_owned_keys", owned_keys)
    caught = set()
    for case in smoke("mla_core"):
        if case.shape.dcp > 1:
            bound = bind(case)
            if max(judge(bound, bound.run(bound.inputs("normal", 1), 0.0), "normal").values()) > 1:
                caught.add(case.shape.tp)
    assert caught == {8, 16}


def test_a_write_outside_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that also writes one padding slot, one canary row and one of its inputs."""
    registry.load("torch")
    for op, spoil in {
        "kda_core": lambda args: args[7][0, 0, 0, 0].fill_(1.0),  # null slot
        "mla_query": lambda args: args[5][-1, -1, 0].fill_(1.0),  # a row that nobody owns
        "oproj_publish": lambda args: args[2][0, 0, -1, 0].fill_(1.0),  # mailbox row beyond the step
        "in_proj": lambda args: args[1][0, 0, 0].fill_(9.0),  # the weight
    }.items():
        real = registry._PROVIDERS[op]["torch"]

        def run(context: OpContext, *args: Any, real: Provider = real, spoil: Any = spoil) -> None:
            real.run(context, *args)
            spoil(args)

        with monkeypatch.context() as patch:
            patch.setitem(registry._PROVIDERS[op], "torch", Provider(op, "torch", run))
            case = bind(list(smoke(op))[1])
            inputs = case.inputs("normal", 1)
            assert case.untouched(inputs, case.run(inputs, 0.0)) == 1, op


# -- the bound itself --------------------------------------------------------------------------------------------


def test_half_ulp_is_what_rounding_loses_at_most() -> None:
    x = torch.cat([torch.randn(20000, dtype=torch.float64) * 2.0**e for e in (-140, -120, 0, 60)])
    for values, rounded, format_ in (
        (x, x.float().bfloat16(), BF16),
        (x[x.abs() < 448], to_fp8(x[x.abs() < 448]).float(), E4M3),
    ):
        error = (rounded.double() - values).abs()
        limit = half_ulp(values, *format_)
        assert bool((error <= limit * (1 + 2.0**-15)).all())  # the values went through FP32 first
        assert float((error / limit).max()) > 0.99


@pytest.mark.parametrize(
    "function",
    [
        Bounded.exp,
        Bounded.sigmoid,
        Bounded.tanh,
        Bounded.silu,
        lambda b: b.softmax(-1),
        lambda b: b.rms(1e-5),
        lambda b: b.l2(),
        lambda b: b * b + b,
        lambda b: b.situ(b, 4.0, 25.0),
        lambda b: b.matmul(b.map("transpose", -1, -2)),
        lambda b: (b * b).shifted(1.0).rsqrt(1.0),
        lambda b: (b * b).shifted(1.0).reciprocal(),
        lambda b: b.sum(-1),
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_bounds_hold_for_any_input_within_the_error(function: Any, size: float) -> None:
    """Perturb inputs by their whole error, in random directions: no result leaves its bound."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(6, 24, generator=generator, dtype=torch.float64) * size
    error = value.abs() * 2.0**-8
    expected = function(Bounded(value, error))
    for _ in range(50):
        moved = value + error * (torch.randint(0, 2, value.shape, generator=generator) * 2 - 1)
        found = function(Bounded(moved, torch.zeros_like(moved))).value
        assert bool(((found - expected.value).abs() <= expected.error).all())


def test_families_are_what_they_say() -> None:
    draw = {family: Draw(family, 0, 4).activation("x", 4, 512).float() for family in FAMILIES}
    assert draw["outliers"].abs().max() / draw["normal"].abs().mean() > 20
    assert 0 < draw["denormals"].abs().max() < 2.0**-126
    assert bool(draw["negative_zero"].signbit().all())
    assert not draw["negative_zero"].any()
    assert set((draw["coded"] * 4).flatten().tolist()) == set(range(-6, 7))
    again = Draw("normal", 0, 4).activation("x", 4, 512).float()
    assert torch.equal(again, draw["normal"])
    with pytest.raises(ValueError, match="unknown input family"):
        Draw("odd", 0, 4)


def test_tiers() -> None:
    counts = {tier: len(list(op_cases(tier))) for tier in all_cases.ROWS}
    assert counts["smoke"] < counts["standard"] < counts["full"]
    with pytest.raises(ValueError, match="unknown tier"):
        next(op_cases("huge"))


# -- the declared rounding points --------------------------------------------------------------------------------


#: Outputs that are FP32, exact, or no numbers of the op: they would only dilute the shares below.
UNROUNDED = {"recurrent", "logits", "lse", "conv", "padding", "armed", "ids", "units"}


def mismatches(op: str) -> float:
    """Share of output elements that differ from the FP64 formula rounded exactly where the op declares to round."""
    wrong = total = 0
    for case in smoke(op):
        if case.shape.precision.kv == FP8 or case.op == "mla_core":
            continue  # the formula's FP8 casts are not rounded; the core rounds parts that the formula does not have
        bound = bind(case)
        outputs = bound.run(bound.inputs("normal", 1), 0.0)
        oracle = bound.oracle(bound.inputs("normal", 1))
        for name in set(oracle) - UNROUNDED:
            wrong += int((outputs[name].double() != oracle[name]).sum())
            total += outputs[name].numel()
    return wrong / max(total, 1)


@pytest.fixture
def rounding_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "rounded", lambda b: Bounded.of(b.value.float().bfloat16()))


@pytest.mark.usefixtures("rounding_oracles")
@pytest.mark.parametrize("op", SCHEMAS)
def test_providers_round_where_they_declare_to(op: str) -> None:
    """Rounding differences remain only where FP32 and FP64 sums fall on different sides of a rounding boundary."""
    assert mismatches(op) < 0.005


@pytest.mark.usefixtures("rounding_oracles")
@pytest.mark.parametrize("op", [op for op, points in ROUNDING.items() if points and op != "mla_core"])
def test_a_provider_that_does_not_round_in_between_would_be_noticed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Precision, "rounded", lambda self, x: x)
    assert mismatches(op) > 0.05
