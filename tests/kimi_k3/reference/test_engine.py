"""The engine's bookkeeping with a stand-in model: schedule, paths, ledger, life cycle, bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import CODEC, GREEDY, REFERENCE, Guesser, StandIn, build, crowd, expected_greedy, no_leaks, request, tokens

from kimi_k3.names import FALLBACK_REASONS
from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.options import EngineOptions, OptionError
from kimi_k3.reference.requests import GenerationRequest, RequestError

# -- tokens do not depend on the schedule ----------------------------------------------------------------------


def test_greedy_tokens_are_the_models() -> None:
    (done,) = build().generate([request("a", range(30), 20)], run="x")
    assert done.token_ids == expected_greedy(range(30), 20)
    assert done.finish_reason == "length"
    assert done.text == CODEC.decode(done.token_ids)


@settings(max_examples=15, deadline=None)
@given(
    pages=st.integers(17, 40),
    budget=st.integers(16, 48),
    schedule=st.sampled_from(["mixed", "pure"]),
    page_size=st.sampled_from([4, 7]),
    order=st.permutations(range(8)),
)
def test_batching_chunking_and_preemption_change_no_token(
    pages: int, budget: int, schedule: str, page_size: int, order: list[int]
) -> None:
    engine = build(pages=pages, max_tokens_per_step=budget, schedule=schedule, page_size=page_size)
    requests = crowd(8)
    done = engine.generate([requests[i] for i in order], run="x")
    assert [c.id for c in done] == [f"r{i}" for i in order]
    assert tokens(done) == REFERENCE
    assert no_leaks(engine)


def test_a_small_cache_really_preempts() -> None:
    engine = build(pages=17)
    states = [engine.submit(r) for r in crowd(8)]
    index = 0
    while any(s.finish_reason is None for s in states):
        engine.step("x", index)
        index += 1
    assert sum(s.preemptions for s in states) > 0
    assert {s.request.id: s.output for s in states} == REFERENCE


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("pages", [20, None])
def test_drafts_change_no_token_and_save_steps(ragged: bool, pages: int | None) -> None:
    engine = build(draft_length=3, drafter=Guesser(3, ragged), pages=pages)
    done = engine.generate(crowd(8, temperatures=[0.0]), run="x")
    ledger = engine.drain_ledger()
    assert tokens(done) == GREEDY
    assert no_leaks(engine)
    assert {"verify", "prefill"} <= {e.kind for e in ledger}
    assert max(e.emitted for e in ledger if e.requests == 1) > 1 or max(e.emitted for e in ledger) > 4
    assert sum(e.emitted for e in ledger) == sum(len(c.token_ids) for c in done)
    for entry, batch in zip(ledger, engine.model.batches, strict=True):
        assert entry.draft_length == max(batch.draft_lens)
        written = zip(batch.state_slots.tolist(), batch.query_lens, batch.is_prefill, strict=True)
        assert entry.slots == [s for slots, rows, prefill in written for s in slots[: 1 if prefill else rows]]


def test_too_many_drafts_are_an_error() -> None:
    engine = build(draft_length=2, drafter=Guesser(3, ragged=False))
    with pytest.raises(ValueError, match="3 drafts for 'a'"):
        engine.generate([request("a")], run="x")
    assert no_leaks(engine)


def test_the_last_position_of_the_context_is_reached() -> None:
    for drafter, length in ((None, 0), (Guesser(3, ragged=False), 3)):
        engine = build(max_context=32, draft_length=length, drafter=drafter, pages=8)
        (done,) = engine.generate([request("a", range(20), 12)], run="x")
        assert done.token_ids == expected_greedy(range(20), 12)


# -- ledger and paths ------------------------------------------------------------------------------------------


def test_the_ledger_accounts_for_every_step_and_token() -> None:
    engine = build()
    seen: list[int] = []
    done = engine.generate(crowd(6), run="run-1", on_step=seen.append)
    ledger = engine.drain_ledger()
    assert [e.index for e in ledger] == seen == list(range(len(ledger)))
    assert sum(e.emitted for e in ledger) == sum(len(c.token_ids) for c in done)
    for entry, batch in zip(ledger, engine.model.batches, strict=True):
        assert (entry.run, entry.path, entry.reason) == ("run-1", "stock", "switch_off")
        assert (entry.rows, entry.requests) == (batch.num_rows, batch.num_requests)
        assert entry.context_max == int(batch.positions.max()) + 1
        assert entry.slots == batch.state_slots[:, 0].tolist()
        assert entry.ops == {}
        assert entry.wall > 0
    assert engine.drain_ledger() == []


class Pretend:
    """An executor that takes decode steps of at most two requests and computes them with the stand-in."""

    def __init__(self, model: StandIn) -> None:
        self.model, self.caches = model, None
        self.last_step: Any = None

    def plan(self, batch: StepBatch) -> Any:
        if any(batch.is_prefill):
            return SimpleNamespace(reason="prefill" if all(batch.is_prefill) else "mixed")
        return SimpleNamespace(reason="too_many_rows" if batch.num_rows > 2 else None)

    def run(self, plan: Any, batch: StepBatch, aux_layers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.last_step = SimpleNamespace(
            ops={"kimi_k3::kda_core": 6},
            providers={"kimi_k3::kda_core": "torch"},
            slots=batch.state_slots[:, 0].tolist(),
            rank_hashes=["h"] * 2,
            padded_rows=2,
        )
        return self.model.forward(batch, self.caches, aux_layers)


def test_the_executor_gets_what_it_accepts_and_the_ledger_says_why_not() -> None:
    model = StandIn()
    executor = Pretend(model)
    engine = build(model, executor=executor, decode_backend="latency_specialized", tp=2)
    executor.caches = engine.caches
    done = engine.generate(crowd(8), run="x")
    assert tokens(done) == REFERENCE
    ledger = engine.drain_ledger()
    assert {e.reason for e in ledger} == {None, "prefill", "mixed", "too_many_rows"}
    for entry in ledger:
        assert (entry.path == "specialized") == (entry.reason is None) == (entry.kind == "decode" and entry.rows <= 2)
        assert bool(entry.ops) == bool(entry.rank_hashes) == (entry.path == "specialized")
        assert entry.reason is None or entry.reason in FALLBACK_REASONS


def test_each_step_opens_its_profiler_range() -> None:
    engine = build()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.generate([request("a", tokens=3)], run="run-7")
    names = [event.name for event in profile.events() if event.name.startswith("fasttrack.step/")]
    assert sorted(names) == [f"fasttrack.step/run-7/{i}" for i in range(3)]


def test_times_are_per_token_and_ordered() -> None:
    engine = build()
    done = engine.generate([request("a", tokens=5), request("b", tokens=5, arrival=3)], run="x")
    for c in done:
        assert len(c.token_times) == 5
        assert [c.arrival_time, *c.token_times] == sorted([c.arrival_time, *c.token_times])
    assert done[1].arrival_time >= done[0].token_times[2]


# -- life cycle and bad input ----------------------------------------------------------------------------------


def test_an_interrupted_run_frees_everything_and_the_engine_goes_on() -> None:
    engine = build()

    def interrupt(index: int) -> None:
        if index == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(crowd(8), run="x", on_step=interrupt)
    assert no_leaks(engine)
    assert not engine.scheduler.has_work
    assert tokens(engine.generate(crowd(8), run="y")) == REFERENCE


def test_reset_forgets_and_close_frees() -> None:
    engine = build()
    engine.submit(request("a"))
    engine.step("x", 0)
    engine.reset()
    assert no_leaks(engine)
    assert not any(bool(t.any()) for t in engine.caches.recurrent.values())
    assert engine.generate([request("a")], run="x")[0].token_ids == expected_greedy((1, 2, 3), 8)
    engine.close()
    assert engine.caches.kv == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", []), "'a': empty prompt"),
        (request("a", [1, 512]), r"'a': prompt\[1\] is token 512, expected 0 <= token < 512"),
        (request("a", forced=[-1]), r"forced\[0\] is token -1"),
        (request("a", tokens=0), "max_tokens 0"),
        (request("a", range(100), 29), "exceed the context; expected at most 128"),
        (request("a", temperature=-1.0), "temperature -1.0, expected >= 0"),
        (request("a", top_p=0.0, top_k=-2), "top_k -2.*top_p 0.0"),
        (request("a", stop=("",)), "empty string"),
        (request("a", structured={"regex": "a"}), "grammar backend"),
        (request("a", arrival=-1), "arrival_step -1"),
        (request("b"), "'b': already active"),
    ],
)
def test_bad_requests_are_refused_by_name_before_any_step(bad: GenerationRequest, message: str) -> None:
    engine = build()
    with pytest.raises(RequestError, match=message):
        engine.generate([request("b"), bad], run="x")
    assert engine.drain_ledger() == []
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_backend": "fast"}, "decode_backend 'fast', expected 'auto' or 'latency_specialized'"),
        ({"schedule": "x"}, "schedule 'x'"),
        ({"page_size": 0}, "page_size 0"),
        ({"draft_length": -1}, "draft_length -1"),
        ({"max_tokens_per_step": 4, "draft_length": 1}, "expected at least 8"),
        ({"max_context": 5000}, "max_context 5000, expected at most 4096"),
    ],
)
def test_bad_options_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(**options)


def test_config_holds_every_option_resolved() -> None:
    config = build(pages=None).config()
    assert config["pages"] == 128
    assert set(EngineOptions.__dataclass_fields__) <= set(config)
    assert config["precision"] == "fp64"
