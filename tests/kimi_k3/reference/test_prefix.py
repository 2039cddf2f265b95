"""Prefix reuse: what is found, what is forgotten, and that a hit computes what a miss computes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import build as build_standin
from standin import crowd, one_by_one, request, tokens

from kimi_k3.reference.cache import PageAllocator
from kimi_k3.reference.options import OptionError
from kimi_k3.reference.prefix import PrefixCache, Snapshot

EMPTY = Snapshot({}, {})


def filled(length: int, pages: int = 20, size: int = 4, interval: int = 8) -> tuple[PrefixCache, list[int], list[int]]:
    """A cache after the prefill of ``length`` distinct tokens, the tokens, and the pages, still held."""
    cache = PrefixCache(PageAllocator(pages, size), interval)
    prompt = list(range(100, 100 + length))
    own = cache.pages.allocate(-(-length // size))
    assert own is not None
    cut = 0
    while (cut := cache.next_cut(cut, length)) < length:
        cache.insert(prompt, cut, own, EMPTY)
    return cache, prompt, own


@given(length=st.integers(1, 200), size=st.integers(1, 9), factor=st.integers(1, 5))
def test_cuts_are_page_aligned_and_leave_a_token(length: int, size: int, factor: int) -> None:
    cache = PrefixCache(PageAllocator(4, size), size * factor)
    position, cuts = 0, []
    while position < length:
        position = cache.next_cut(position, length)
        cuts.append(position)
    assert cuts[-1] == length
    assert all(c % size == 0 and c < length for c in cuts[:-1])
    assert all(b - a <= size * factor for a, b in zip([0, *cuts[:-2]], cuts[:-1], strict=False))
    assert set(range(size * factor, length, size * factor)) <= set(cuts)
    assert length - (cuts[-2] if len(cuts) > 1 else 0) <= size


def test_the_longest_common_cut_is_found_and_its_pages_are_shared() -> None:
    cache, prompt, own = filled(30)
    hit = cache.find(prompt)
    assert (hit.tokens, hit.pages) == (28, own[:7])
    assert [cache.pages.references(p) for p in own] == [3] * 7 + [1]
    # Another prompt that goes on after 28 common tokens has no cut at 28 of its own: 24 is the longest.
    assert cache.find([*prompt[:29], *range(20)]).tokens == 24
    assert cache.find([*prompt[:17], *range(20)]).tokens == 16
    assert cache.find(prompt[:8]).tokens == 4 - 4
    assert cache.find([1, *prompt]).tokens == 0
    assert cache.find([prompt[0] + 1, *prompt[1:]]).tokens == 0


def test_pages_are_given_back_ends_first_and_only_when_idle() -> None:
    cache, prompt, own = filled(30)
    assert cache.evictable == 0
    cache.evict(5)
    assert cache.find(prompt).tokens == 28
    cache.pages.release(own[:7])  # the hit's
    cache.pages.release(own)  # the request's
    assert cache.evictable == 7
    cache.evict(2)
    assert cache.pages.free == 20 - 5
    assert cache.find(prompt).tokens == 16, "the cut at 24 lost its last page"


def test_states_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_k3.reference.prefix.SNAPSHOTS", 2)
    cache, prompt, _ = filled(30)
    assert cache.find(prompt).tokens == 28
    assert cache.find([*prompt[:9], 1, 2, 3]).tokens == 0


@settings(max_examples=10, deadline=None)
@given(pages=st.integers(17, 60), budget=st.integers(16, 64), order=st.permutations(range(8)))
def test_reuse_changes_no_token_under_any_schedule(pages: int, budget: int, order: list[int]) -> None:
    """Prompts with common beginnings; preemption and eviction included."""
    wanted = crowd(8)
    start = tuple(range(200, 220))
    wanted = [request(r.id, (*start[: 4 * (i % 6)], *r.prompt), 12) for i, r in enumerate(wanted)]
    engine = build_standin(pages=pages, max_tokens_per_step=budget, prefix_caching=True, prefix_interval=8)
    expected = one_by_one(wanted)
    for turn in range(2):
        done = engine.generate([wanted[i] for i in order], run=f"x{turn}")
        assert tokens(done) == expected
    scheduler = engine.scheduler
    assert scheduler.pages.free + engine.prefix.evictable == scheduler.pages.pages
    assert scheduler.slots.free == scheduler.max_requests
    if pages > 40:
        assert engine.prefix.hit > 0
        assert max(c.cached_tokens for c in done) >= 16


def test_reset_forgets_prefixes() -> None:
    engine = build_standin(prefix_caching=True, prefix_interval=4)
    for expected in (0, 20):
        assert engine.generate([request("a", range(23))], run="x")[0].cached_tokens == expected
    engine.reset()
    assert engine.generate([request("a", range(23))], run="x")[0].cached_tokens == 0
    assert engine.scheduler.pages.free + engine.prefix.evictable == engine.scheduler.pages.pages


def test_the_interval_must_be_whole_pages() -> None:
    with pytest.raises(OptionError, match="prefix_interval 6, expected a multiple of the page size 4"):
        build_standin(prefix_caching=True, prefix_interval=6)


# -- with the real model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_length", "drafter"), [(0, ""), (3, "rehearsal"), (7, "random")])
@pytest.mark.parametrize("arm", ["stock", "optimized"])
def test_a_hit_equals_a_miss_bit_for_bit_in_fp64(arm: str, draft_length: int, drafter: str) -> None:
    from fasttrack.target import EngineSpec, Request, Sampling
    from kimi_k3 import names
    from kimi_k3.target import TARGET

    options = {"precision": "fp64", "prefix_caching": True, "prefix_interval": 16, "page_size": 8, "max_context": 160}
    switch = names.SWITCH_ON if arm == "optimized" else names.SWITCH_OFF
    engine = TARGET.engine(
        EngineSpec(
            "embedded",
            arm,
            switch,
            tp=8,
            draft_length=draft_length,
            max_requests=2,
            options={**options, "drafter": drafter or "random"},
        )
    )
    for tensors in (engine.engine.caches.kv, engine.engine.caches.conv, engine.engine.caches.recurrent):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    common = tuple(torch.randint(0, 500, (70,), generator=torch.Generator().manual_seed(0)).tolist())
    sampling = Sampling(ignore_eos=True, logprobs=1)
    first, second = (
        Request(name, (*common, *own), 16, sampling) for name, own in (("a", (1, 2, 3)), ("b", range(9, 40)))
    )

    def run(request: Request) -> tuple[object, list[object]]:
        (done,) = engine.generate([request], run="x", keep_logits=True)
        return done, engine.drain_ledger()

    misses = {}
    for wanted in (first, second):
        misses[wanted.id] = run(wanted)
        assert misses[wanted.id][0].cached_tokens == 0
        engine.reset()
    for wanted, cached in ((first, 0), (second, 64), (first, 72), (second, 96)):
        done, steps = run(wanted)
        miss, plain_steps = misses[wanted.id]
        assert done.cached_tokens == cached
        assert done.token_ids == miss.token_ids
        assert torch.equal(done.full_logprobs, miss.full_logprobs)
        decode = [(s.kind, s.path, s.emitted, s.accepted) for s in steps if s.kind != "prefill"]
        assert decode == [(s.kind, s.path, s.emitted, s.accepted) for s in plain_steps if s.kind != "prefill"]
        assert (len(steps) < len(plain_steps)) == (cached > 0)
        assert {path for _, path, _, _ in decode} == {"specialized" if arm == "optimized" else "stock"}
