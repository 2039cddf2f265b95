"""The scheduler alone: no model, tokens are counted only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.reference.cache import PageAllocator, SlotAllocator
from kimi_k3.reference.requests import GenerationRequest, RequestError, RequestState
from kimi_k3.reference.scheduler import ScheduledStep, Scheduler


def make(
    pages: int = 64, page_size: int = 4, requests: int = 4, budget: int = 16, drafts: int = 0, **options
) -> Scheduler:
    options.setdefault("max_context", 64)
    return Scheduler(
        PageAllocator(pages, page_size),
        SlotAllocator(requests, drafts),
        max_requests=requests,
        max_tokens_per_step=budget,
        **options,
    )


def state(order: int, prompt: int, tokens: int, arrival: int = 0) -> RequestState:
    return RequestState(GenerationRequest(str(order), tuple(range(prompt)), tokens), order, arrival)


def play(scheduler: Scheduler, states: list[RequestState], accept: int = 0, draft: int = 0) -> list[ScheduledStep]:
    """Run to the end; each verify step accepts ``accept`` of ``draft`` drafts. Checks every step on the way."""
    for s in states:
        scheduler.add(s)
    steps = []
    while scheduler.has_work:
        free = scheduler.pages.free
        step = scheduler.schedule()
        check(scheduler, step)
        for r in step.requests:
            s = r.state
            if not r.samples:
                s.computed += r.rows
                continue
            got = 1 + min(accept, len(r.drafts))
            s.computed += r.rows if r.prefill else got
            s.accepted = 1 if r.prefill else got
            s.tokens += [0] * got
            if s.emitted >= s.request.max_tokens:
                scheduler.finish(s)
                s.finish_reason = "length"
            else:
                s.drafts = [0] * draft
        steps.append(step)
        assert len(steps) < 5000, f"no progress, {free} pages free"
    return steps


def check(scheduler: Scheduler, step: ScheduledStep) -> None:
    owned = [page for s in scheduler.running for page in s.pages]
    slots = [slot for s in scheduler.running for slot in s.slots]
    assert len(owned) == len(set(owned))
    assert len(slots) == len(set(slots)) == len(scheduler.running) * scheduler.slots.width
    assert len(owned) + scheduler.pages.free == scheduler.pages.pages
    assert 0 < step.rows <= scheduler.max_tokens
    assert len(step.requests) <= scheduler.max_requests
    decodes = [not r.prefill for r in step.requests]
    assert decodes == sorted(decodes, reverse=True), "decode rows come first"
    for r in step.requests:
        assert r.state in scheduler.running
        assert r.state.arrival < scheduler.clock, "nobody runs before arriving"
        assert scheduler.pages.pages_for(r.state.computed + r.rows) <= len(r.state.pages)
        assert r.state.computed + r.rows <= scheduler.max_context
        if not r.prefill:
            assert r.state.computed == len(r.state.tokens) - 1


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=10)


@settings(max_examples=80, deadline=None)
@given(
    shape=requests,
    pages=st.integers(14, 30),
    budget=st.integers(16, 40),
    pure=st.booleans(),
    draft=st.integers(0, 3),
    accept=st.integers(0, 3),
)
def test_every_request_finishes_and_nothing_leaks(
    shape: list[tuple[int, int, int]], pages: int, budget: int, pure: bool, draft: int, accept: int
) -> None:
    scheduler = make(pages=pages, budget=budget, drafts=3, pure=pure)
    states = [state(i, *s) for i, s in enumerate(shape)]
    steps = play(scheduler, states, accept=accept, draft=draft)
    assert all(s.finish_reason == "length" for s in states)
    assert scheduler.pages.free == pages
    assert scheduler.slots.free == scheduler.max_requests
    if pure:
        assert "mixed" not in {step.kind for step in steps}


def kinds(steps: list[ScheduledStep]) -> list[str]:
    return [step.kind for step in steps]


def test_decode_has_priority_and_prefill_is_chunked_into_the_rest() -> None:
    scheduler = make(budget=8)
    steps = play(scheduler, [state(0, 4, 6), state(1, 20, 2, arrival=1)])
    assert [[(r.state.order, r.rows) for r in s.requests] for s in steps[:4]] == [
        [(0, 4)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 6)],
    ]
    assert kinds(steps) == ["prefill", "mixed", "mixed", "mixed", "decode", "decode"]


def test_nobody_is_admitted_before_the_budget_reaches_them() -> None:
    scheduler = make(budget=8)
    long, short = state(0, 20, 2), state(1, 3, 2)
    scheduler.add(long)
    scheduler.add(short)
    scheduler.schedule()
    assert scheduler.running == [long], "a request without rows would only hold pages and slots"
    long.computed += 8
    scheduler.schedule()
    assert scheduler.running == [long]
    long.computed += 8
    assert [(r.state, r.rows) for r in scheduler.schedule().requests] == [(long, 4), (short, 3)]


def test_pure_mode_never_mixes() -> None:
    steps = play(make(budget=8, pure=True), [state(0, 4, 4), state(1, 20, 3, arrival=1)])
    assert kinds(steps) == ["prefill", "prefill", "prefill", "prefill", "decode", "decode", "decode"]


def test_only_a_finished_prefill_samples() -> None:
    steps = play(make(budget=8), [state(0, 20, 1)])
    assert [r.samples for s in steps for r in s.requests] == [False, False, True]


def test_the_clock_jumps_over_idle_time() -> None:
    scheduler = make()
    steps = play(scheduler, [state(0, 2, 1, arrival=100), state(1, 2, 1, arrival=7)])
    assert len(steps) == 2
    assert scheduler.clock == 101


def test_the_youngest_is_preempted_and_recomputed() -> None:
    scheduler = make(pages=4, max_context=16)
    old, young = state(0, 4, 10), state(1, 4, 10)
    steps = play(scheduler, [young, old])
    assert old.preemptions == 0
    assert young.preemptions == 1
    again = next(r for s in steps for r in s.requests if r.state is young and r.prefill and r.rows > 4)
    assert again.samples, "the recomputation of prompt and output ends with the next token"


def test_verify_rows_stay_within_the_context() -> None:
    scheduler = make(budget=64, drafts=3, max_context=16)
    steps = play(scheduler, [state(0, 10, 6)], accept=0, draft=3)
    assert [r.rows for s in steps[1:] for r in s.requests] == [4, 4, 4, 3, 2]
    assert kinds(steps)[1] == "verify"


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        (0, 1, "empty prompt"),
        (1, 0, "max_tokens 0"),
        (60, 5, "at most 64"),
        (40, 10, "at most 32"),
    ],
)
def test_what_can_never_finish_is_refused(prompt: int, tokens: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(pages=8).add(state(0, prompt, tokens))


def test_the_budget_must_cover_a_decode_step() -> None:
    with pytest.raises(ValueError, match="expected at least 32"):
        make(requests=4, drafts=7, budget=31)
