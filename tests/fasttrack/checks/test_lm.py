"""An engine as lm-eval sees it, against direct calls of the engine."""

from types import SimpleNamespace

import pytest
from fake_target import TARGET

from fasttrack.checks.lm import EngineLM
from fasttrack.target import EngineSpec, Request, Sampling


@pytest.fixture
def engine():
    return TARGET.engine(EngineSpec("embedded", "stock", "auto"))


def instance(doc_id, *args):
    return SimpleNamespace(args=args, doc_id=doc_id)


def test_generation_is_capped_cut_at_the_stop_string_and_observed(engine):
    direct = engine.generate([Request("x", tuple(engine.encode("Hello")), 8)], run="d")[0]
    lm = EngineLM(engine, run="r", max_tokens=8)
    stop = direct.text[3]
    texts = lm.generate_until(
        [instance(0, "Hello", {"max_gen_toks": 999}), instance(1, "Hello", {"until": [stop], "max_gen_toks": 99})]
    )
    assert texts[0] == direct.text
    assert texts[1] == direct.text[: direct.text.index(stop)]
    assert (lm.observations[0][0].finish_reason, lm.observations[0][0].output_tokens) == ("length", 8)
    assert lm.observations[1][0].finish_reason == "stop"


def test_prompts_above_the_context_are_skipped_and_said_so(engine):
    lm = EngineLM(engine, run="r", max_tokens=8)
    texts = lm.generate_until([instance(0, "x" * 600, {}), instance(1, "Hello", {})])
    assert texts[0] == ""
    assert texts[1] != ""
    assert [lm.observations[i][0].finish_reason for i in (0, 1)] == ["skipped", "length"]
    assert lm.loglikelihood([instance(2, "x" * 600, " A")]) == [(float("-inf"), False)]
    assert lm.observations[2][0].finish_reason == "skipped"


def test_loglikelihood_is_the_sum_over_the_continuation(engine):
    lm = EngineLM(engine, run="r", max_tokens=8)
    greedy = engine.generate([Request("x", tuple(engine.encode("Hi")), 2, Sampling(ignore_eos=True))], run="d")[0]
    other = chr((greedy.token_ids[0] + 1) % 128)
    (score, is_greedy), (wrong, is_not) = lm.loglikelihood(
        [instance(0, "Hi", greedy.text), instance(0, "Hi", other + greedy.text[1])]
    )
    assert score == pytest.approx(sum(greedy.logprobs))
    assert is_greedy
    assert not is_not
    assert wrong < score
    assert [o.output_tokens for o in lm.observations[0]] == [2, 2]


def test_rolling_equals_one_forced_pass_and_windows_cover_every_token(engine):
    lm = EngineLM(engine, run="r", max_tokens=8)
    text = "a short text"
    tokens = engine.encode(text)
    forced = Request("f", (tokens[0],), len(tokens) - 1, Sampling(ignore_eos=True), forced=tuple(tokens[1:]))
    direct = sum(engine.generate([forced], run="d")[0].logprobs)
    assert lm.loglikelihood_rolling([instance(0, text)]) == [pytest.approx(direct)]
    lm.max_context = 5
    windowed = lm.loglikelihood_rolling([instance(1, text)])[0]
    assert windowed != pytest.approx(direct)
    assert lm.observations[1][0].output_tokens == len(tokens) - 1


def test_sampling_depends_on_the_documents_seed_alone(engine):
    def answers(seed_of):
        lm = EngineLM(engine, run="r", max_tokens=8, temperature=1.0, seed_of=seed_of)
        return lm.generate_until([instance(0, "Hello", {}), instance(1, "Hello", {})])

    assert answers(lambda d: d) == answers(lambda d: d)
    assert answers(lambda d: d)[0] != answers(lambda d: d)[1]
    assert len(set(answers(lambda d: 5))) == 1
