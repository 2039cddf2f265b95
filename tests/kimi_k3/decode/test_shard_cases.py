"""Numerics cases of one rank's shard: which there are, and that one rank alone computes what the oracle says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kimi_k3.decode.cases import SHARD_ROWS, TENSOR_PARALLEL, bind, cases, op_cases, shard_cases
from kimi_k3.decode.numerics.families import FAMILIES
from kimi_k3.decode.numerics.rig import OpCase
from kimi_k3.decode.ops import SCHEMAS
from kimi_k3.decode.registry import _PROVIDERS, Provider, load
from kimi_k3.reference.config import TINY_A

POISONS = (float("nan"), 1e30)


def judge(case: OpCase, family: str, provider: str = "torch") -> tuple[float, int, bool]:
    """Largest error over its bound, elements changed that should not be, and whether the poison had no influence."""
    bound = bind(case, provider)
    first, second = (bound.run(bound.inputs(family, 3), poison) for poison in POISONS)
    inputs = bound.inputs(family, 3)
    oracle = bound.oracle(inputs)
    limits = bound.bound(inputs, oracle)
    ratios = [0.0]
    for name, exact in oracle.items():
        given = first[name].double()
        error = torch.where(given == exact, 0.0, (given - exact).abs()).nan_to_num(nan=math.inf)
        if error.numel():
            ratios.append(float(torch.where(error == 0, 0.0, error / limits[name]).max()))
    same = all(torch.equal(first[name], second[name]) for name in oracle)
    return max(ratios), bound.untouched(inputs, first) + bound.untouched(inputs, second), same


def good(case: OpCase, family: str, provider: str = "torch") -> None:
    worst, changed, same = judge(case, family, provider)
    assert worst <= 1, (case.name, family)
    assert changed == 0, (case.name, family)
    assert same, (case.name, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_alone_is_within_the_bounds(family: str) -> None:
    for case in shard_cases("smoke", "cpu", TINY_A):
        good(case, family)


def test_full_width_cases() -> None:
    """Every op with a kernel, at both sizes and every batch of the tier; the sizes are those of the released model."""
    found = list(shard_cases("standard", "cuda"))
    names = {case.name for case in found}
    assert len(names) == len(found)
    for tp in TENSOR_PARALLEL:
        for rows, live in SHARD_ROWS["standard"]:
            at = {c.op for c in found if (c.shape.tp, c.shape.rows, c.shape.live) == (tp, rows, live)}
            assert at >= {"in_proj", "kda_core", "oproj_publish", "attn_res", "moe_front", "embed"}
    assert {c.shape.config.hidden_size for c in found} == {7168}
    assert {c.shape.heads for c in found} == {12, 6}
    assert {c.shape.ranks for c in found} == {1}
    assert any("kda_core/tp16-1rank-m64of40-q8" in name for name in names)


def test_ops_that_need_other_ranks_stay_at_the_tiny_size() -> None:
    on_cpu = list(cases("smoke", {"checkpoint": "shard", "device": "cpu"}))
    assert {c.op.removeprefix("kimi_k3::") for c in on_cpu} == set(SCHEMAS)
    assert {c.provider for c in on_cpu} == {"torch"}
    alone = {c.op for c in on_cpu if "1rank" in c.name}
    assert not alone & {c.op for c in on_cpu if "1rank" not in c.name}
    assert len(list(cases("smoke"))) == len(list(op_cases("smoke")))


def test_every_op_with_a_kernel_has_full_width_cases() -> None:
    pytest.importorskip("cutlass")
    assert load("cute")
    kernels = {op for op, known in _PROVIDERS.items() if "cute" in known}
    assert {case.op for case in shard_cases("smoke", "cpu")} == kernels


@pytest.mark.parametrize("op", ["kda_core", "attn_res", "oproj_publish"])
def test_full_width_on_the_cpu(op: str) -> None:
    case = next(c for c in shard_cases("smoke", "cpu") if c.op == op and c.shape.tp == 16)
    good(case, "normal")


def test_columns_of_another_rank_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _PROVIDERS["moe_front"]["torch"]

    def greedy(context: object, x: Tensor, weight: Tensor, logits: Tensor, latent: Tensor) -> None:
        right.run(context, x, weight, logits, latent)
        latent[0, 0, -1] = 1.0

    case = next(c for c in shard_cases("smoke", "cpu", TINY_A) if c.op == "moe_front")
    monkeypatch.setitem(_PROVIDERS["moe_front"], "torch", Provider("moe_front", "torch", greedy))
    assert judge(case, "normal")[1] == 2
