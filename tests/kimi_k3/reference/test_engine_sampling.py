"""What the engine does with sampling parameters, stop conditions, forced tokens and log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from standin import BASIS, CODEC, EOS, VOCAB, Guesser, StandIn, build, expected_greedy, logits_of, request

from kimi_k3.reference.drafter import Draft, Drafter
from kimi_k3.reference.rejection import Rejection
from kimi_k3.reference.requests import Completion, RequestState

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
        ("ab is", ("s", " is"), "ab"),  # one token completes both
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


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = CODEC.encode("a.b.c")
    done = say(ids, stop=(".",), min_tokens=3)
    assert done.token_ids == ids[:4]
    assert done.text == "a.b"


class Stubborn(StandIn):
    """The same logits after any history: without penalties one token for ever."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (BASIS / 100).expand(len(hidden), -1).clone()


class Echo(Drafter):
    """Drafts one fixed sequence after any history, e.g. what penalties forbid or require."""

    def __init__(self, continuation: Sequence[int]) -> None:
        self.continuation = list(continuation)

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        return [Draft(self.continuation[s.emitted : s.emitted + 3]) for s in states]


@pytest.mark.parametrize("drafts", [None, [VOCAB - 1] * 60, list(range(VOCAB - 1, VOCAB - 61, -1))])
def test_penalties_see_the_whole_history_and_the_drafts_before_a_row(drafts: list[int] | None) -> None:
    """A presence penalty above any gap makes a stubborn model count down, however its tokens are proposed."""
    options = {"draft_length": 3, "drafter": Echo(drafts)} if drafts else {}
    engine = build(Stubborn(), pages=20, **options)
    requests = [request(f"r{i}", [i] * 5, 50, presence_penalty=100.0) for i in range(4)]
    for done in engine.generate(requests, run="x"):
        assert done.token_ids == list(range(VOCAB - 1, VOCAB - 51, -1))


def test_the_mask_follows_accepted_drafts_and_is_not_asked_beyond_a_forbidden_one() -> None:
    ids = CODEC.encode("The answer is 42")
    asked: list[list[int]] = []

    def strict(spec: Mapping[str, Any]):
        mask = script(spec)

        def checked(output: Sequence[int]) -> torch.Tensor:
            asked.append(list(output))
            assert list(output) == ids[: len(output)], "a grammar cannot continue what it forbade"
            return mask(output)

        return checked

    spoiled = [*ids[:2], 0, *ids[3:]]
    engine = build(grammar=strict, draft_length=3, drafter=Echo(spoiled))
    wanted = request("a", tokens=len(ids) - 3, structured={"ids": ids})
    (done,) = engine.generate([wanted], run="x")
    assert done.token_ids == ids[:-3]
    assert len(engine.drain_ledger()) < len(ids) - 3, "right drafts were accepted"


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


# -- drafts and chance -----------------------------------------------------------------------------------------


class Half(Drafter):
    """Drafts the greedy continuation after a few rounds of it: right often, and often improbable."""

    def propose(self, states: Sequence[RequestState]) -> list[Draft]:
        return [Draft(expected_greedy(s.tokens, 2)) for s in states]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_rejection_leaves_the_distribution_alone(method: str) -> None:
    """Two-sample test over the 64 pairs of second and third token: 1500 requests with drafts, 1500 without.

    A defect that moves 8 % of the probability between cells shifts the statistic by more than ten standard deviations
    of its null distribution."""
    from scipy import stats

    count, samples = 1500, []
    for drafter, base in ((None, 0), (Half(), count)):
        engine = build(
            drafter=drafter,
            rejection=Rejection(method),
            draft_length=2,
            max_requests=64,
            max_tokens_per_step=512,
            max_context=32,
        )
        wanted = [request(f"r{i}", tokens=3, temperature=1.5, top_k=8, seed=base + i, forced=[7]) for i in range(count)]
        samples.append(Counter(tuple(c.token_ids[1:]) for c in engine.generate(wanted, run="x")))
        if drafter is not None:
            accepted = [n for s in engine.drain_ledger() for n in s.accepted]
            assert {0, 1, 2} == set(accepted)
    cells = sorted(set().union(*samples))
    assert len(cells) == 64
    result = stats.chi2_contingency([[s[c] for c in cells] for s in samples])
    assert result.pvalue > 1e-3
