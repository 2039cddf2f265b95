"""An engine as lm-eval sees it, against direct calls of the engine."""

from types import SimpleNamespace

import pytest
from fake_target import TARGET
from fake_target.engine import ToyEngine

from fasttrack.checks.lm import EngineLM, chat_template_sha256
from fasttrack.target import Completion, EngineSpec, Request, Sampling
from fasttrack.tasks.second import second_score


@pytest.fixture
def engine():
    return TARGET.engine(EngineSpec("embedded", "stock", "auto"))


def instance(doc_id, *args, doc=None):
    return SimpleNamespace(args=args, doc_id=doc_id, doc=doc)


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


class Chatty(ToyEngine):
    """A toy engine with a chat template that opens a reasoning block."""

    opening = "<think>"

    def encode_chat(self, messages):
        turns = "".join(f"[{m['role'][0]}]{m['content']}" for m in messages)
        return self.encode(f"{turns}[a]{self.opening}\n")

    def generate(self, requests, *, run, keep_logits=False, on_step=None):
        self.asked = [self.decode(r.prompt) for r in requests]
        return [Completion(r.id, [1], "length", "so \\boxed{7}") for r in requests]


def test_a_chat_template_gets_the_turns_and_an_open_thought_comes_back_with_the_response():
    engine = Chatty(EngineSpec("embedded", "stock", "auto"))
    lm = EngineLM(engine, run="r", max_tokens=8)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    texts = lm.generate_until([instance(0, "Hello", {}), instance(1, "flat", {}, doc={"messages": turns})])
    assert engine.asked == ["[u]Hello[a]<think>\n", "[u]a[a]b[u]c[a]<think>\n"]
    assert texts == ["<think>so \\boxed{7}"] * 2
    assert second_score("aime25", {"answer": "7"}, texts[0]) == 0  # the thought never ended
    engine.opening = ""
    assert lm.generate_until([instance(2, "Hello", {})]) == ["so \\boxed{7}"]
    assert lm.observations[2][0].prompt_tokens == len("[u]Hello[a]\n")


def test_chat_templates_are_known_by_what_they_render(engine):
    one, other = (Chatty(EngineSpec("embedded", "stock", "auto")) for _ in range(2))
    assert chat_template_sha256(one) == chat_template_sha256(other)
    other.opening = ""
    assert chat_template_sha256(one) != chat_template_sha256(other)
    assert chat_template_sha256(engine) is None
