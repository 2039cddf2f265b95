"""The engine's bookkeeping with a stand-in model that checks what it is given.

:class:`StandIn` keeps a hash of the token history in the state slots and the tokens themselves in the paged
cache, and its logits are a function of the hash: a wrong page, slot, position or accepted count changes the
tokens or trips its assertion. The real model is used in ``test_engine_model.py``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.names import FALLBACK_REASONS
from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import NULL_SLOT, Caches
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.engine import EmbeddedEngine, EngineOptions, OptionError
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.requests import Completion, GenerationRequest, RequestError, RequestState, SamplingParams
from kimi_k3.reference.tokenizer import TextCodec

CODEC = TextCodec()
EOS = TINY_A.eos_token_id
VOCAB = TINY_A.vocab_size
KV_LAYER, KDA_LAYER = 3, 0
BASIS = torch.arange(1, VOCAB + 1, dtype=torch.float64)


def logits_of(history: float) -> torch.Tensor:
    return 4 * torch.sin(BASIS * (0.1 + history % 997))


class StandIn:
    config = TINY_A
    precision = PRECISIONS["fp64"]
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    @staticmethod
    def extend(history: float, token: float) -> float:
        return (history * 31 + token + 1) % 1000003

    def forward(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        self.batches.append(batch)
        kv, states = caches.kv[KV_LAYER].flatten(0, 1)[:, 0], caches.recurrent[KDA_LAYER][:, 0, 0, 0]
        out, first = [], 0
        for i, rows in enumerate(batch.query_lens):
            context, slots = batch.context_lens[i], batch.state_slots[i].tolist()
            assert NULL_SLOT not in slots
            history = float(states[slots[int(batch.accepted[i]) - 1]]) if context else 0.0
            for j in range(rows):
                row = first + j
                assert int(batch.positions[row]) == context + j
                kv[batch.slot_mapping[row]] = float(batch.token_ids[row])
                history = self.extend(history, float(batch.token_ids[row]))
                if not batch.is_prefill[i]:
                    states[slots[j]] = history
                out.append(history)
            if batch.is_prefill[i]:
                states[slots[0]] = history
            reread = 0.0
            for position in range(context + rows):
                page = int(batch.block_tables[i, position // caches.page_size])
                reread = self.extend(reread, float(kv[page * caches.page_size + position % caches.page_size]))
            assert reread == history, "pages and state slots tell different stories"
            first += rows
        return torch.tensor(out, dtype=torch.float64)[:, None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits_of(float(h)) for h in hidden]) if len(hidden) else torch.empty(0, VOCAB)


def build(model: Any = None, *, drafter: Any = None, executor: Any = None, grammar: Any = None, **options: Any):
    values: dict[str, Any] = {"max_requests": 4, "max_context": 128, "max_tokens_per_step": 64, "page_size": 4}
    engine = EmbeddedEngine(
        model or StandIn(),
        CODEC,
        EngineOptions(**{**values, **options}),
        drafter=drafter,
        executor=executor,
        grammar=grammar,
    )
    for tensor in (engine.caches.kv[KV_LAYER], engine.caches.recurrent[KDA_LAYER]):
        tensor.fill_(float("nan"))  # nothing may be read before it was written
    return engine


def request(name: str, prompt: Sequence[int] = (1, 2, 3), tokens: int = 8, *, arrival: int = 0, forced=(), **sampling):
    sampling.setdefault("ignore_eos", True)
    return GenerationRequest(
        name, tuple(prompt), tokens, SamplingParams(**sampling), arrival_step=arrival, forced=tuple(forced)
    )


def crowd(count: int, seed: int = 0) -> list[GenerationRequest]:
    """Requests of mixed lengths, arrivals and sampling."""
    rng = random.Random(seed)
    return [
        request(
            f"r{i}",
            [rng.randrange(500) for _ in range(rng.randrange(1, 24))],
            rng.randrange(1, 40),
            arrival=rng.randrange(10),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1000),
            top_k=rng.choice([0, 20]),
            frequency_penalty=rng.choice([0.0, 0.5]),
        )
        for i in range(count)
    ]


def tokens(completions: Sequence[Completion]) -> dict[str, list[int]]:
    return {c.id: c.token_ids for c in completions}


def expected_greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The stand-in's greedy continuation, computed without engine."""
    history, out = 0.0, []
    for token in prompt:
        history = StandIn.extend(history, token)
    for _ in range(count):
        out.append(int(logits_of(history).argmax()))
        history = StandIn.extend(history, out[-1])
    return out


def no_leaks(engine: EmbeddedEngine) -> bool:
    scheduler = engine.scheduler
    return scheduler.pages.free == scheduler.pages.pages and scheduler.slots.free == scheduler.max_requests


# -- tokens do not depend on the schedule ----------------------------------------------------------------------


def test_greedy_tokens_are_the_models() -> None:
    (done,) = build().generate([request("a", range(30), 20)], run="x")
    assert done.token_ids == expected_greedy(range(30), 20)
    assert done.finish_reason == "length"
    assert done.text == CODEC.decode(done.token_ids)


REFERENCE = tokens(
    itertools.chain.from_iterable(
        build().generate([GenerationRequest(**{**vars(r), "arrival_step": 0})], run="x") for r in crowd(8)
    )
)


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


class Guesser:
    """Drafts that are sometimes right: the true greedy continuation, broken at a random place."""

    def __init__(self, length: int, ragged: bool) -> None:
        self.rng, self.length, self.ragged = random.Random(0), length, ragged

    def propose(self, states: Sequence[RequestState]) -> list[list[int]]:
        drafts = []
        for s in states:
            count = self.rng.randrange(self.length + 1) if self.ragged else self.length
            guess = expected_greedy(s.tokens, count)
            if guess and self.rng.random() < 0.7:
                guess[self.rng.randrange(count)] = self.rng.randrange(VOCAB)
            drafts.append(guess)
        return drafts


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("pages", [20, None])
def test_drafts_change_no_token_and_save_steps(ragged: bool, pages: int | None) -> None:
    engine = build(draft_length=3, drafter=Guesser(3, ragged), pages=pages)
    done = engine.generate(crowd(8), run="x")
    ledger = engine.drain_ledger()
    assert tokens(done) == REFERENCE
    assert no_leaks(engine)
    assert {"verify", "prefill"} <= {e.kind for e in ledger}
    assert max(e.emitted for e in ledger if e.requests == 1) > 1 or max(e.emitted for e in ledger) > 4
    assert sum(e.emitted for e in ledger) == sum(len(c.token_ids) for c in done)
    assert {e.draft_length for e in ledger if e.kind == "verify"} <= {1, 2, 3}


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


# -- sampling parameters as the engine applies them ------------------------------------------------------------


def script(spec: Mapping[str, Any]):
    """A grammar that allows one given token after the other."""
    ids = list(spec["ids"])

    def mask(output: Sequence[int]) -> torch.Tensor:
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[ids[len(output)]] = True
        return allowed

    return mask


def say(text: str | list[int], **sampling: Any) -> Completion:
    """One completion whose tokens are dictated through the structured-output hook."""
    ids = CODEC.encode(text) if isinstance(text, str) else text
    engine = build(grammar=script)
    sampling.setdefault("ignore_eos", False)
    (done,) = engine.generate([request("a", tokens=len(ids), structured={"ids": ids}, **sampling)], run="x")
    return done


def test_the_mask_hook_dictates() -> None:
    done = say("Answer: 42", temperature=1.0, seed=3)
    assert (done.text, done.finish_reason) == ("Answer: 42", "length")


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("The answer is 42. Bye", ("42.",), "The answer is "),
        ("The answer is 42. Bye", ("he ans",), "T"),  # starts and ends inside tokens
        ("The answer is 42. Bye", ("Bye", "is"), "The answer "),  # the earliest wins
        ("The answer is 42. Bye", ("e",), "Th"),
        ("naïve 漢字 text", ("字",), "naïve 漢"),  # one character, three byte tokens
        ("abc", ("x",), "abc"),
    ],
)
def test_stop_strings_end_the_text_wherever_token_boundaries_lie(text: str, stop: tuple[str, ...], kept: str) -> None:
    done = say(text, stop=stop)
    assert done.text == kept
    assert done.finish_reason == ("length" if kept == text else "stop")
    full = CODEC.decode(done.token_ids)
    assert text.startswith(full) or "\ufffd" in full
    if kept != text:
        assert any(s in full for s in stop), "tokens run up to the one that completed the stop string"
        assert not any(s in CODEC.decode(done.token_ids[:-1]) for s in stop), "and not beyond"


def test_a_stop_string_does_not_match_the_prompt() -> None:
    engine = build()
    (done,) = engine.generate([request("a", CODEC.encode("END"), 4, stop=("ENDX", "END"))], run="x")
    assert done.finish_reason == "length"


def test_end_of_sequence_stops_and_stays_out_of_the_text() -> None:
    ids = [*CODEC.encode("hi"), EOS, *CODEC.encode("there")]
    stopped = say(ids)
    assert (stopped.text, stopped.finish_reason) == ("hi", "stop")
    assert stopped.token_ids == ids[: ids.index(EOS) + 1]
    ignored = say(ids, ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == (ids, "length")


def test_stop_tokens_stop_and_min_tokens_holds_them_back() -> None:
    ids = CODEC.encode("a b c")
    assert say(ids, stop_token_ids=(ids[1],)).token_ids == ids[:2]
    engine = build()
    greedy = engine.generate([request("a", tokens=6)], run="x")[0].token_ids
    stopping = {"stop_token_ids": (greedy[0],), "ignore_eos": False}
    (first,) = engine.generate([request("a", tokens=6, **stopping)], run="x")
    assert first.token_ids == greedy[:1]
    (later,) = engine.generate([request("a", tokens=6, min_tokens=3, **stopping)], run="x")
    assert len(later.token_ids) >= 3
    assert greedy[0] not in later.token_ids[:3]


def test_a_seed_repeats_and_another_differs() -> None:
    engine = build()
    runs = [
        engine.generate([request("a", tokens=16, temperature=1.0, seed=s)], run="x")[0].token_ids for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_penalties_see_the_whole_history_of_a_request() -> None:
    engine = build(pages=17)
    strong = [request(f"r{i}", [i] * 5, 40, presence_penalty=100.0) for i in range(4)]
    for done in engine.generate(strong, run="x"):
        assert len(set(done.token_ids)) == 40, "a presence penalty of 100 forbids repetition"


# -- forced tokens and log-probabilities -----------------------------------------------------------------------


def test_forced_tokens_come_out_with_their_log_probabilities() -> None:
    prompt, forced = [5, 6, 7], [10, EOS, 499, 3]
    engine = build()
    (done,) = engine.generate([request("a", prompt, 6, forced=forced, ignore_eos=False)], run="x", keep_logits=True)
    assert done.token_ids[:4] == forced, "not even the end-of-sequence token stops a forced request"
    assert done.token_ids[4:] == expected_greedy([*prompt, *forced], 2)
    history, expected = 0.0, []
    for token in prompt:
        history = StandIn.extend(history, token)
    for token in done.token_ids:
        expected.append(torch.log_softmax(logits_of(history), 0))
        history = StandIn.extend(history, token)
    assert done.full_logprobs is not None
    torch.testing.assert_close(done.full_logprobs, torch.stack(expected), rtol=0, atol=0)
    assert done.logprobs == [float(row[t]) for row, t in zip(expected, done.token_ids, strict=True)]


def test_forcing_works_through_verify_steps() -> None:
    forced = list(range(100, 120))
    engine = build(draft_length=3, drafter=Guesser(3, ragged=True))
    plain = build().generate([request("a", tokens=20, forced=forced)], run="x", keep_logits=True)[0]
    drafted = engine.generate([request("a", tokens=20, forced=forced)], run="x", keep_logits=True)[0]
    assert drafted.token_ids == forced
    assert torch.equal(plain.full_logprobs, drafted.full_logprobs)


def test_log_probabilities_only_where_asked() -> None:
    engine = build()
    none, some = engine.generate([request("a"), request("b", logprobs=2)], run="x")
    assert none.logprobs is none.top_logprobs is none.full_logprobs is None
    assert some.logprobs is not None
    assert some.top_logprobs is not None
    assert len(some.logprobs) == len(some.top_logprobs) == 8
    for chosen, value, top in zip(some.token_ids, some.logprobs, some.top_logprobs, strict=True):
        assert top[chosen] == value == max(top.values())
        assert len(top) == 2


def test_log_probabilities_are_those_before_penalties_and_temperature() -> None:
    engine = build()
    (plain,) = engine.generate([request("a", tokens=1, logprobs=0)], run="x")
    (bent,) = engine.generate(
        [request("a", tokens=1, logprobs=0, temperature=0.1, repetition_penalty=1.5, forced=plain.token_ids)], run="x"
    )
    assert plain.logprobs == bent.logprobs


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

    def run(self, plan: Any, batch: StepBatch) -> torch.Tensor:
        self.last_step = SimpleNamespace(
            ops={"kimi_k3::kda_core": 6},
            providers={"kimi_k3::kda_core": "torch"},
            slots=batch.state_slots[:, 0].tolist(),
            rank_hashes=["h"] * 2,
            padded_rows=2,
        )
        return self.model.forward(batch, self.caches)


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
