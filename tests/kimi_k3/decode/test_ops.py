"""Operators and providers: names, declared mutations, visibility to the profiler, who serves what."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from decode_steps import Requests, model, prompts, specialized
from torch._subclasses.schema_check_mode import SchemaCheckMode

from kimi_k3.decode import registry
from kimi_k3.decode.ops import NAMESPACE, ROUNDING, SCHEMAS, OpContext, overload
from kimi_k3.decode.registry import Provider
from kimi_k3.decode.schedule import layer_kinds, step_schedule
from kimi_k3.names import OPS
from kimi_k3.reference.config import PRESETS, TINY_A
from kimi_k3.reference.precision import PRECISIONS


def test_names_agree_with_what_is_defined() -> None:
    assert sorted(f"{NAMESPACE}::{op}" for op in SCHEMAS) == sorted(OPS)
    assert set(ROUNDING) == set(SCHEMAS)
    assert all(hasattr(torch.ops.kimi_k3, op) for op in SCHEMAS)


def test_every_op_is_used_by_some_configuration() -> None:
    used = {call.op for preset in ("tiny-a", "kimi-k3") for call in step_schedule(PRESETS[preset], 1)}
    assert used == set(SCHEMAS)


@pytest.mark.parametrize(("requests", "query_len"), [(2, 1), (16, 1), (2, 4)])
def test_ops_write_what_they_declare_and_nothing_else(requests: int, query_len: int) -> None:
    """torch's own checker compares every argument before and after with the schema, aliases included."""
    run = Requests(model("bf16"), requests, draft_length=query_len - 1)
    first = run.prefill(prompts(requests))
    executor = run.executor(8)
    batch = run.batch([[token] * query_len for token in first])
    executor.prepare(executor.plan(batch))
    with SchemaCheckMode():
        executor.run(executor.plan(batch), batch)


def test_the_checker_would_notice() -> None:
    def quiet(x: torch.Tensor) -> None:
        x.zero_()

    library = torch.library.Library("kimi_k3_test", "DEF")
    library.define("quiet(Tensor x) -> ()")
    library.impl("quiet", quiet, "CPU")
    with pytest.raises(RuntimeError, match="mutated"), SchemaCheckMode():
        torch.ops.kimi_k3_test.quiet(torch.ones(3))


def test_the_profiler_counts_what_the_ledger_counts() -> None:
    run = Requests(model("bf16"), 2)
    first = run.prefill(prompts(2))
    executor = run.executor(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.decode(first, 1, specialized(executor))
    seen = Counter(e.name for e in profile.events() if e.name.startswith(f"{NAMESPACE}::"))
    assert executor.last_step is not None
    assert dict(seen) == executor.last_step.ops
    planned = Counter(f"{NAMESPACE}::{call.op}" for call in step_schedule(TINY_A, 2))
    assert seen == planned


@pytest.mark.parametrize(("attention", "main", "side"), [("kda", 10, 2), ("mla", 12, 2)])
def test_launches_of_one_moe_layer(attention: str, main: int, side: int) -> None:
    """10 main + 2 side launches; an MLA layer has query, core and value instead of one KDA core."""
    config = PRESETS["kimi-k3"]
    layer = next(i for i in range(1, 93) if layer_kinds(config, i) == (attention, "moe"))
    streams = Counter(call.stream for call in step_schedule(config, 64) if call.layer == layer)
    assert (streams["main"], streams["side"]) == (main, side)


def context() -> OpContext:
    return OpContext(TINY_A, PRECISIONS["bf16"], 8)


def test_an_op_without_the_wanted_kernel_is_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.load("torch")
    monkeypatch.setitem(registry.PROVIDER_MODULES, "cute", ("kimi_k3.decode.no_such_module",))
    known = {op: {"torch": found["torch"]} for op, found in registry._PROVIDERS.items()}  # whatever else was imported
    monkeypatch.setattr(registry, "_PROVIDERS", known)
    registry.register(Provider("in_proj", "cute", lambda *a: None, lambda c, device: device == "sm_90", priority=1))
    for wanted in ("auto", "cute"):
        chosen = registry.select(context(), "sm_90", wanted)
        assert {op for op, p in chosen.items() if p.name == "cute"} == {"in_proj"}
        assert {p.name for p in registry.select(context(), "cpu", wanted).values()} == {"torch"}
    assert {p.name for p in registry.select(context(), "sm_90", "torch").values()} == {"torch"}


def test_bad_registrations_are_refused() -> None:
    registry.load("torch")
    with pytest.raises(ValueError, match="unknown op 'nope'"):
        registry.register(Provider("nope", "torch", lambda: None))
    with pytest.raises(ValueError, match="already has a provider 'torch'"):
        registry.register(Provider("embed", "torch", lambda: None))
    with pytest.raises(ValueError, match="unknown provider 'gpu'"):
        registry.select(context(), "cpu", "gpu")


def test_a_dead_context_cannot_be_called() -> None:
    made = context()
    handle = made.handle
    made.providers = registry.select(made, "cpu", "torch")
    x = torch.ones(1)
    overload("prefetch")(handle, "point", [x])
    assert made.calls["prefetch"] == 1
    del made
    with pytest.raises(KeyError):
        overload("prefetch")(handle, "point", [x])
