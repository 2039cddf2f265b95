"""DSpark through the target, stock and specialised: exactness, acceptance, drafter rows, preemption, fallbacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrack.errors import UsageError
from fasttrack.target import Completion, DeploymentRefused, EngineSpec, Request, Sampling
from kimi_k3 import names
from kimi_k3.target import TARGET

ARMS = {"stock": names.SWITCH_OFF, "optimized": names.SWITCH_ON}


def build(
    arm: str = "optimized", draft_length: int = 7, *, tp: int = 8, acceptance: str = "none", size: int = 3, **options
) -> Any:
    options = {"precision": "fp64", "drafter": "rehearsal", "max_context": 128, "page_size": 8, **options}
    return TARGET.engine(
        EngineSpec(
            "embedded",
            arm,
            ARMS[arm],
            tp=tp,
            draft_length=draft_length,
            max_requests=size,
            acceptance=acceptance,
            options=options,
        )
    )


def requests(count: int = 3, tokens: int = 25, **sampling: Any) -> list[Request]:
    sampling.setdefault("ignore_eos", True)
    return [
        Request(f"r{i}", tuple(range(7 * i, 9 * i + 5)), tokens, Sampling(seed=i, **sampling)) for i in range(count)
    ]


def ids(done: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


@cache
def plain() -> list[list[int]]:
    return ids(build("stock", 0, tp=1).generate(requests(), run="x"))


@pytest.mark.parametrize("draft_length", [3, 4, 5, 6, 7])
@pytest.mark.parametrize(("arm", "tp"), [("stock", 8), ("optimized", 8), ("optimized", 16)])
def test_at_temperature_0_in_fp64_speculation_changes_no_token(arm: str, tp: int, draft_length: int) -> None:
    engine = build(arm, draft_length, tp=tp)
    assert ids(engine.generate(requests(), run="x")) == plain()
    verify = [s for s in engine.drain_ledger() if s.kind == "verify"]
    assert {(s.path, s.reason) for s in verify} == (
        {("specialized", None)} if arm == "optimized" else {("stock", "switch_off")}
    )
    accepted = {n for s in verify for n in s.accepted}
    assert {0, draft_length} <= accepted, "rejections at once and whole blocks must both have occurred"
    assert all(s.emitted <= sum(s.accepted) + s.requests for s in verify)


def test_a_random_drafter_changes_no_token_either_and_its_cache_survives_preemption() -> None:
    expected = plain()
    for options in ({}, {"pages": 12}):
        engine = build(drafter="random", **options)
        for cache_ in engine.engine.drafter.caches:
            cache_.fill_(float("nan"))  # rows that were never written must never be read
        states = [engine.engine.submit(_internal(r)) for r in requests()]
        index = 0
        while any(s.finish_reason is None for s in states):
            engine.engine.step("x", index)
            index += 1
        assert [s.output for s in states] == expected
        assert (sum(s.preemptions for s in states) > 0) == ("pages" in options)


def _internal(request: Request) -> Any:
    from kimi_k3.target import _request

    return _request(request)


@pytest.mark.parametrize("arm", ["stock", "optimized"])
@pytest.mark.parametrize(("size", "tokens"), [(1, 1 + 6 * 20), (3, 1 + 6 * 4)])
def test_synthetic_acceptance_6_emits_exactly_6_tokens_a_step(arm: str, size: int, tokens: int) -> None:
    engine = build(arm, tp=16, acceptance="synthetic(6)", size=size, drafter="random")
    assert engine.info().config["acceptance_rates"] == [1, 1, 1, 1, 1, 0, 0]
    done = engine.generate(requests(size, tokens), run="x")
    steps = [s for s in engine.drain_ledger() if s.kind != "prefill"]
    assert [(s.kind, s.emitted, s.accepted) for s in steps] == [("verify", 6 * size, [5] * size)] * (tokens // 6)
    assert {s.path for s in steps} == {"specialized" if arm == "optimized" else "stock"}
    assert all(len(c.token_ids) == tokens for c in done)


def test_fractional_synthetic_acceptance_has_two_outcomes() -> None:
    engine = build(acceptance="synthetic(5.5)", size=3, drafter="random", tp=8)
    engine.generate(requests(3, 90), run="x")
    counts = Counter(n for s in engine.drain_ledger() for n in s.accepted)
    assert set(counts) == {4, 5}
    assert 0.25 < counts[5] / counts.total() < 0.75


def test_drafter_rows_are_those_of_accepted_tokens() -> None:
    """The drafter's cache after speculation holds what a run without rejections would have written."""
    expected = plain()[0]
    caches = []
    for hits in (0, 5):
        engine = build("optimized", 7, drafter="random", size=1)
        inner = engine.engine
        propose, drafts = inner.drafter.propose, []

        def replay(states: Any, hits: int = hits, propose: Any = propose, drafts: Any = drafts) -> Any:
            found = propose(states)
            for state, draft in zip(states, found, strict=True):
                good = expected[state.emitted : state.emitted + hits]
                draft.tokens[: len(good)] = good
                drafts.append(list(draft.tokens))
            return found

        inner.drafter.propose = replay
        (done,) = engine.generate(requests(1, 19), run="x")
        assert done.token_ids == expected[:19]
        assert len(set(map(tuple, drafts))) > 1
        rows = len(requests(1)[0].prompt) + 18 - 6  # whole pages are given back in order: the first page is page 0
        caches.append([c.flatten(0, 1)[:rows].clone() for c in inner.drafter.caches])
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        assert bool(one.abs().sum(-1).gt(0).all())


def test_zero_draft_and_non_uniform_steps_run_stock_where_they_must_and_the_path_resumes() -> None:
    engine = build()
    none, some, full = requests()
    mixed = [
        Request(**{**vars(none), "max_drafts": 0, "max_tokens": 4}),
        Request(**{**vars(some), "max_drafts": 4, "max_tokens": 9}),
        full,
    ]
    done = engine.generate(mixed, run="x")
    assert [c.token_ids for c in done] == [plain()[0][:4], plain()[1][:9], plain()[2]]
    steps = engine.drain_ledger()
    assert {s.reason for s in steps} == {"prefill", "non_uniform_drafts", None}
    assert [s.path for s in steps if s.requests == 1][-1] == "specialized"

    alone = [Request(**{**vars(full), "max_drafts": 0})]
    assert engine.generate(alone, run="y")[0].token_ids == plain()[2]
    assert {(s.kind, s.path) for s in engine.drain_ledger()} == {("prefill", "stock"), ("decode", "specialized")}


class Irregular:
    """Sometimes proposes nothing for anyone: plain steps between verify steps, which must honour what was accepted."""

    def __init__(self, propose: Any) -> None:
        self.propose, self.calls = propose, 0

    def __call__(self, states: Any) -> Any:
        self.calls += 1
        found = self.propose(states)
        if self.calls % 3 == 0:
            for draft in found:
                draft.tokens.clear()
        return found


@pytest.mark.parametrize("arm", ["stock", "optimized"])
def test_steps_without_any_drafts_continue_from_the_accepted_state(arm: str) -> None:
    engine = build(arm)
    engine.engine.drafter.propose = Irregular(engine.engine.drafter.propose)
    assert ids(engine.generate(requests(), run="x")) == plain()
    assert {s.kind for s in engine.drain_ledger()} == {"prefill", "verify", "decode"}


def test_pages_always_cover_the_block_that_is_drafted() -> None:
    """Else the drafts would depend on where pages happen to end."""
    engine = build("stock", drafter="random", page_size=4)
    propose, checked = engine.engine.drafter.propose, []

    def watched(states: Any) -> Any:
        for state in states:
            assert len(state.pages) * 4 >= min(len(state.tokens) - 1 + 7, 128)
            checked.append(len(state.tokens))
        return propose(states)

    engine.engine.drafter.propose = watched
    engine.generate([*requests(2), Request("long", tuple(range(100)), 28, Sampling(ignore_eos=True))], run="x")
    assert max(checked) > 120


def test_recovered_states_give_the_same_tokens_and_the_specialised_path_refuses_them() -> None:
    """One slot per request, advanced only by what stood; drafts are made right by the known continuation."""
    engine = build("stock", 7, drafter="random", state_scheme="recover")
    inner, known = engine.engine, dict(zip(("r0", "r1", "r2"), plain(), strict=True))
    propose, calls = inner.drafter.propose, [0]

    def replay(states: Any) -> Any:
        found = propose(states)
        for state, draft in zip(states, found, strict=True):
            good = known[state.request.id][state.emitted : state.emitted + calls[0] % 8]
            draft.tokens[: len(good)] = good
            calls[0] += 1
        return found

    inner.drafter.propose = replay
    assert ids(engine.generate(requests(), run="x")) == plain()
    steps = [s for s in engine.drain_ledger() if s.kind == "verify"]
    assert len({n for s in steps for n in s.accepted}) > 3
    assert all(len(s.slots) == s.requests for s in steps)
    with pytest.raises(DeploymentRefused, match="state_scheme"):
        build("optimized", 7, state_scheme="recover")
    with pytest.raises(UsageError, match="needs the native state slots"):
        build("stock", 7, state_scheme="recover")


@pytest.mark.parametrize(
    "options",
    [{}, {"rejection": "block"}, {"draft_sampling": "probabilistic", "drafter": "random"}],
    ids=["standard", "block", "probabilistic"],
)
def test_sampled_tokens_depend_on_the_seed_and_not_on_the_path(options: dict[str, Any]) -> None:
    wanted = requests(tokens=14, temperature=1.0, top_p=0.9, frequency_penalty=0.3)
    stock, fast = (ids(build(arm, 5, **options).generate(wanted, run="x")) for arm in ARMS)
    assert stock == fast
    again = ids(build("stock", 5, **options).generate(wanted, run="x"))
    assert again == stock
    other = [Request(**{**vars(r), "sampling": Sampling(**{**vars(r.sampling), "seed": 99})}) for r in wanted]
    assert all(a != b for a, b in zip(ids(build("stock", 5, **options).generate(other, run="x")), stock, strict=True))


@pytest.mark.parametrize("drafter", ["rehearsal", "random"])
def test_teacher_forcing_through_verify_steps_scores_the_same(drafter: str) -> None:
    forced = tuple(plain()[0])
    scored = []
    for draft_length in (0, 7):
        engine = build(draft_length=draft_length, drafter=drafter, drafter_hit_rate=0.7)
        (done,) = engine.generate(
            [Request("a", requests(1)[0].prompt, len(forced), forced=forced)], run="x", keep_logits=True
        )
        assert tuple(done.token_ids) == forced
        scored.append(done.full_logprobs)
        counts = [n for s in engine.drain_ledger() for n in s.accepted]
    torch.testing.assert_close(*scored, rtol=0, atol=1e-9)
    assert (max(counts) > 2) == (drafter == "rehearsal")


def test_the_arms_differ_in_the_switch_alone_and_the_drafter_is_described() -> None:
    one, other = (dict(build(arm, drafter="random").info().config) for arm in ARMS)
    assert (one.pop(names.SWITCH), other.pop(names.SWITCH)) == (names.SWITCH_OFF, names.SWITCH_ON)
    assert one == other
    assert len(one["drafter_checkpoint"]) == 64
    assert (one["rejection"], one["drafter"]) == ("standard", "random")
    assert (
        build("stock", 7, drafter="random", drafter_seed=1).info().config["drafter_checkpoint"]
        != one["drafter_checkpoint"]
    )


def test_a_saved_drafter_is_the_same_drafter_and_must_fit_the_model(tmp_path: Path) -> None:
    from kimi_k3.reference.config import TINY_A
    from kimi_k3.reference.dspark_weights import random_drafter_weights, save_drafter

    save_drafter(tmp_path / "fits", TINY_A, random_drafter_weights(TINY_A, 4))
    one, other = build("stock", drafter="random", drafter_seed=4), build("stock", drafter=str(tmp_path / "fits"))
    digests = [e.info().config["drafter_checkpoint"] for e in (one, other)]
    assert digests[0] == digests[1]
    drafts = []
    for engine in (one, other):
        propose, seen = engine.engine.drafter.propose, []
        engine.engine.drafter.propose = lambda s, p=propose, seen=seen: (found := p(s), seen.append(found))[0]
        engine.generate(requests(2, 6), run="x")
        drafts.append([d.tokens for found in seen for d in found])
    assert drafts[0] == drafts[1]
    small = replace(TINY_A, vocab_size=256)
    save_drafter(tmp_path / "other", small, random_drafter_weights(small, 4))
    with pytest.raises(UsageError, match="drafter of a model with 256 tokens"):
        build("stock", drafter=str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "nowhere"}, "drafter 'nowhere': no such folder; expected a folder, random or rehearsal"),
        ({"drafter": "random", "checkpoint": "tiny-b"}, "names no drafter geometry"),
        ({"drafter_hit_rate": 2}, "hit rate 2.0, expected between 0 and 1"),
        ({"draft_sampling": "hot", "drafter": "random"}, "draft sampling 'hot', expected one of greedy, probabilistic"),
        ({"rejection": "fly"}, "unknown rejection method 'fly'; expected standard, block"),
        ({"acceptance": "synthetic(9)"}, "acceptance length 9.0, expected between 1 and 8"),
    ],
)
def test_bad_drafter_options_are_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        build("stock", **arguments)
