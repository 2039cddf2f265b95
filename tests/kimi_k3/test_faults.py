"""Each fault does what it says, and an engine without one does not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fasttrack.errors import UsageError
from fasttrack.target import EngineSpec, Request, Sampling
from kimi_k3 import faults, names
from kimi_k3.target import TARGET

NUMERIC = [f for f in names.FAULTS if f not in ("penalty-ignored", "refuse-every-step", "false-ledger")]
#: Faults that need speculation; the others show without it.
SPECULATIVE = ("slot-after-rejection", "penalty-ignored")


def build(arm: str, draft_length: int = 5, *, dcp: int = 8, max_context: int = 128) -> Any:
    switch = names.SWITCH_OFF if arm == "stock" else names.SWITCH_ON
    options = {"precision": "fp64", "drafter": "rehearsal", "drafter_hit_rate": 0.6, "max_context": max_context}
    return TARGET.engine(
        EngineSpec("embedded", arm, switch, tp=8, dcp=dcp, draft_length=draft_length, max_requests=2, options=options)
    )


def score(engine: Any) -> torch.Tensor:
    """Log-probabilities of forced tokens [tokens, vocab]: two requests, one of them with fewer tokens than ranks."""
    generator = torch.Generator().manual_seed(0)
    wanted = []
    for name, length in (("a", 3), ("b", 13)):
        tokens = torch.randint(0, 500, (length + 20,), generator=generator).tolist()
        wanted.append(Request(name, tuple(tokens[:length]), 20, forced=tuple(tokens[length:])))
    return torch.cat([c.full_logprobs for c in engine.generate(wanted, run="x", keep_logits=True)])


@cache
def honest() -> torch.Tensor:
    return score(build("stock", 0, dcp=1))


def test_the_names_are_those_of_the_description() -> None:
    assert tuple(faults.FAULTS) == names.FAULTS == TARGET.describe().faults


@pytest.mark.parametrize("draft_length", [0, 5])
@pytest.mark.parametrize("dcp", [1, 8])
def test_without_a_fault_nothing_changes(draft_length: int, dcp: int) -> None:
    torch.testing.assert_close(score(build("optimized", draft_length, dcp=dcp)), honest(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("draft_length", [0, 5])
@pytest.mark.parametrize("fault", NUMERIC)
def test_numeric_faults_change_the_distributions(fault: str, draft_length: int) -> None:
    engine = build(f"sabotaged:{fault}", draft_length)
    error = float((score(engine) - honest()).abs().max())
    if fault in SPECULATIVE and draft_length == 0:
        assert error < 1e-9
    else:
        assert 1e-4 < error < 100
    steps = [s for s in engine.drain_ledger() if s.kind != "prefill"]
    assert {s.path for s in steps} == {"specialized"}, "the fault must sit in the optimised path"


@pytest.mark.parametrize("fault", ["lse-base", "empty-shard", "last-shard-dropped"])
def test_faults_of_merging_also_show_without_context_parallelism(fault: str) -> None:
    engine = build(f"sabotaged:{fault}", 0, dcp=1, max_context=2048)  # long enough for several splits of the keys
    assert float((score(engine) - honest()).abs().max()) > 1e-4


def penalised(engine: Any) -> list[int]:
    sampling = Sampling(repetition_penalty=3.0, presence_penalty=2.0, ignore_eos=True)
    (done,) = engine.generate([Request("a", tuple(range(20)), 30, sampling)], run="x")
    return done.token_ids


def test_ignored_penalties_show_under_drafts_only() -> None:
    expected = penalised(build("stock", 0))
    assert penalised(build("optimized", 5)) == expected
    assert penalised(build("sabotaged:penalty-ignored", 5)) != expected
    assert penalised(build("sabotaged:penalty-ignored", 0)) == expected
    assert penalised(build("optimized", 5)) == expected, "planting must not leak into other engines"


def test_refusing_every_step_leaves_the_right_answers_to_the_stock_path() -> None:
    engine = build("sabotaged:refuse-every-step", 0)
    torch.testing.assert_close(score(engine), honest(), rtol=0, atol=1e-9)
    steps = [s for s in engine.drain_ledger() if s.kind != "prefill"]
    assert {(s.path, s.reason) for s in steps} == {("stock", "unprepared_rows")}


def test_a_false_ledger_speaks_of_ops_that_no_profiler_sees() -> None:
    seen = {}
    for arm in ("optimized", "sabotaged:false-ledger"):
        engine = build(arm, 0)
        torch.testing.assert_close(score(engine), honest(), rtol=0, atol=1e-9)
        engine.drain_ledger()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.generate([Request("a", (1, 2), 4, Sampling(ignore_eos=True))], run="x")
        steps = [s for s in engine.drain_ledger() if s.kind != "prefill"]
        claimed = sum(sum(s.ops.values()) for s in steps)
        observed = sum(e.name() in names.OPS for e in profile.profiler.kineto_results.events())
        seen[arm] = (claimed, observed)
        assert len({h for s in steps for h in s.rank_hashes}) == len(steps)
    assert seen["optimized"][0] == seen["optimized"][1] == seen["sabotaged:false-ledger"][0] > 0
    assert seen["sabotaged:false-ledger"][1] == 0


@pytest.mark.parametrize(
    ("arm", "switch", "message"),
    [
        ("sabotaged:nothing", names.SWITCH_ON, "unknown fault 'nothing'; expected one of slot-after-rejection, "),
        ("sabotaged:conv-window", names.SWITCH_OFF, "decode_backend auto; expected latency_specialized"),
    ],
)
def test_bad_faults_are_one_clear_line(arm: str, switch: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TARGET.engine(EngineSpec("embedded", arm, switch))
