"""The executor's numerics cases, in the form the harness runs (duck-typed: the fields of its ``NumericsCase``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode import registry
from kimi_k3.decode.executor import device_family
from kimi_k3.decode.numerics import attention, experts, residual
from kimi_k3.decode.numerics.bounded import Bounded
from kimi_k3.decode.numerics.families import Draw
from kimi_k3.decode.numerics.rig import CHANGED, OpCase, Rig, Shape
from kimi_k3.decode.ops import NAMESPACE, OpContext
from kimi_k3.reference.config import PRESETS, TINY_A, KimiK3Config
from kimi_k3.reference.precision import PRECISIONS

#: (rows, true rows) of plain steps per tier: every one has padding where it can; 16 is the first two-phase size.
ROWS = {
    "smoke": ((1, 1), (8, 5), (16, 11)),
    "standard": ((1, 1), (2, 2), (7, 7), (8, 5), (16, 11), (32, 19)),
    "full": ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 7), (8, 5), (16, 11), (32, 19), (64, 33), (64, 64)),
}

#: (rows, true rows, rows per request) of verify steps: attention only, the other ops see rows.
VERIFY = {"smoke": ((16, 8, 4),), "standard": ((16, 8, 4), (16, 8, 8)), "full": ((16, 8, 4), (60, 35, 5), (64, 40, 8))}

TENSOR_PARALLEL = (8, 16)

#: What ``options["checkpoint"]`` calls one rank's shard of the full model.
SHARD = "shard"

#: The same for a shard, where compilation counts: every number of token tiles that a tier's kernels are made for.
SHARD_ROWS = {
    "smoke": ((1, 1), (8, 5), (64, 40)),
    "standard": ((1, 1), (2, 2), (4, 3), (8, 5), (16, 11), (32, 19), (64, 40)),
    "full": ((1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (6, 6), (7, 7), (8, 5), (16, 11), (32, 19), (64, 40), (64, 64)),
}
SHARD_VERIFY = {
    "smoke": ((16, 8, 8),),
    "standard": ((16, 8, 4), (16, 8, 8), (64, 40, 8)),
    "full": ((4, 4, 4), (16, 8, 4), (60, 35, 5), (60, 36, 6), (63, 35, 7), (16, 8, 8), (64, 40, 8)),
}


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    provider: str
    families: tuple[str, ...]
    inputs: Callable[[str, int], dict[str, Any]]
    run: Callable[[dict[str, Any], float], dict[str, Any]]
    oracle: Callable[[dict[str, Any]], dict[str, Any]]
    bound: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    bound_text: str
    untouched: Callable[[dict[str, Any], dict[str, Any]], int]


def bind(case: OpCase, provider: str = "torch") -> Case:
    """An op case as the harness wants it, on the device of its shape."""
    device = torch.device(case.shape.device)

    def inputs(family: str, seed: int) -> dict[str, Tensor]:
        with device:
            return case.draw(case.shape, Draw(family, seed, case.shape.rows))

    def run(values: dict[str, Tensor], poison: float) -> dict[str, Tensor]:
        with device:
            rig = Rig(case.shape, provider, poison)
            for tensor in values.values():
                rig.guard(tensor)
            outputs = dict(case.run(rig, values))
            return {**outputs, CHANGED: rig.changed()}

    def bounded(values: dict[str, Tensor]) -> Mapping[str, Bounded]:
        with device:
            return case.oracle(case.shape, values)

    return Case(
        op=f"{NAMESPACE}::{case.op}",
        name=case.name,
        provider=provider,
        families=case.families,
        inputs=inputs,
        run=run,
        oracle=lambda values: {name: b.value.to(device) for name, b in bounded(values).items()},
        bound=lambda values, oracle: {name: b.error.to(device) for name, b in bounded(values).items()},
        bound_text=case.text,
        untouched=lambda values, outputs: int(outputs[CHANGED]),
    )


def op_cases(tier: str, config: KimiK3Config = TINY_A) -> Iterator[OpCase]:
    """Every op at every tensor-parallel size and row count of the tier."""
    if tier not in ROWS:
        raise ValueError(f"unknown tier {tier!r}; expected one of {', '.join(ROWS)}")
    precision = PRECISIONS["bf16"]
    for tp in TENSOR_PARALLEL:
        for rows, live in ROWS[tier]:
            shape = Shape(config, precision, tp, rows, live)
            for module in (residual, attention, experts):
                yield from module.cases(shape)
        for rows, live, query_len in VERIFY[tier]:
            yield from attention.cases(Shape(config, precision, tp, rows, live, query_len))
            yield from attention.mla_cases(Shape(config, precision, tp, rows, live, query_len, dcp=tp))
            # longer contexts, dealt out token by token: ranks own more than one run of tokens, at TP16 as well
            yield from attention.mla_cases(Shape(config, precision, tp, rows, rows, query_len, dcp=tp, interleave=1))
            yield from attention.mla_cases(Shape(config, PRECISIONS["bf16-kvfp8"], tp, rows, live, query_len))


def shard_cases(tier: str, device: str, config: KimiK3Config = PRESETS["kimi-k3"]) -> Iterator[OpCase]:
    """The ops that one rank can run alone, rank 0 of every tensor-parallel size with its shard at full width."""
    if tier not in SHARD_ROWS:
        raise ValueError(f"unknown tier {tier!r}; expected one of {', '.join(SHARD_ROWS)}")
    precision = PRECISIONS["bf16"]
    for tp in TENSOR_PARALLEL:
        for rows, live in SHARD_ROWS[tier]:
            shape = Shape(config, precision, tp, rows, live, played=1, device=device)
            yield from residual.kernel_cases(shape)
            yield experts.front_case(shape)
            yield attention.kda_case(shape)
        for rows, live, query_len in SHARD_VERIFY[tier]:
            yield attention.kda_case(Shape(config, precision, tp, rows, live, query_len, played=1, device=device))


def cases(tier: str = "smoke", options: Mapping[str, Any] | None = None) -> Iterator[Case]:
    """Cases of the executor's ops with FP64 oracles and bounds, served as an executor with these engine options would.

    ``options["provider"]``: as for the executor, default "auto". Each case says which provider serves it. With the
    checkpoint "shard" the ops of one rank run at full width on ``options["device"]``, default "cuda"; ops that need
    what other ranks publish run at the tiny size, all ranks together, on the CPU.
    """
    options = options or {}
    wanted = options.get("provider", "auto")
    alone: set[str] = set()
    if options.get("checkpoint") == SHARD:
        for case in shard_cases(tier, options.get("device", "cuda")):
            alone.add(case.op)
            yield bind(case, _provider(case, wanted))
    for case in op_cases(tier):
        if case.op not in alone:
            yield bind(case, _provider(case, wanted))


def _provider(case: OpCase, wanted: str) -> str:
    context = OpContext(case.shape.config, case.shape.precision, case.shape.tp)
    return registry.select(context, device_family(torch.device(case.shape.device)), wanted)[case.op].name
