"""The API in front of a scripted engine: shapes, order, refusals, failures, metrics."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted import CONTEXT, ScriptedChat, ScriptedEngine, call, events, serving

TEXT = ScriptedEngine.script.decode()


@pytest.fixture(scope="module")
def engine() -> ScriptedChat:
    return ScriptedChat()


@pytest.fixture(scope="module")
def url(engine: ScriptedChat) -> Iterator[str]:
    with serving(engine) as base:
        yield base
    assert engine.closed


def complete(url: str, **body: Any) -> Any:
    status, answer = call(f"{url}/v1/completions", {"prompt": "Say it", **body})
    assert status == 200, answer
    return answer


def test_models_and_tokenizer(url: str) -> None:
    assert call(f"{url}/v1/models")[1]["data"][0] == {**call(f"{url}/v1/models/scripted")[1], "max_model_len": CONTEXT}
    assert call(f"{url}/tokenize", {"prompt": "ab"})[1]["tokens"] == [97, 98]
    assert call(f"{url}/detokenize", {"tokens": [97, 98]})[1]["prompt"] == "ab"
    assert call(f"{url}/tokenizer_info")[1]["eos_token"] == "\0"
    assert call(f"{url}/health")[0] == 200


def test_a_completion_has_text_reason_and_usage(url: str) -> None:
    answer = complete(url, max_tokens=9)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": TEXT[:9], "logprobs": None, "finish_reason": "length"}]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 9, 15)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert len(complete(url)["choices"][0]["text"]) == 16


def test_every_form_of_prompt_and_several_answers(url: str, engine: ScriptedChat) -> None:
    for prompt, expected in (
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([1, 2], [(1, 2)]),
        ([[1], [2]], [(1,), (2,)]),
    ):
        seen = len(engine.requests)
        answer = complete(url, prompt=prompt, n=2, seed=5, max_tokens=2)
        new = sorted(engine.requests[seen:], key=lambda r: int(r.id.rpartition("-")[2]))
        assert [r.prompt for r in new] == [p for p in expected for _ in range(2)]
        assert [r.sampling.seed for r in new] == [5, 6] * len(expected)
        assert [c["index"] for c in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_sampling_parameters_reach_the_engine(url: str, engine: ScriptedChat) -> None:
    complete(
        url,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=11,
        stop=["x", "yz"],
        stop_token_ids=[3],
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        ignore_eos=True,
        logprobs=2,
    )
    s = engine.requests[-1].sampling
    assert (s.temperature, s.top_p, s.top_k, s.seed, s.logprobs) == (0.5, 0.9, 7, 11, 2)
    assert (s.stop, s.stop_token_ids, s.ignore_eos) == (("x", "yz"), (3,), True)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.25, -0.5, 1.5)
    complete(url, stop="x", top_k=-1)
    s = engine.requests[-1].sampling
    assert (s.temperature, s.top_p, s.top_k, s.stop, s.logprobs) == (1.0, 1.0, 0, ("x",), None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
        ({"guided_regex": "b"}, {"regex": "b"}),
        ({"guided_json": "{}"}, {"json_schema": "{}"}),
    ],
)
def test_structured_output_in_all_its_spellings(
    url: str, engine: ScriptedChat, body: dict[str, Any], expected: Any
) -> None:
    complete(url, **body)
    assert engine.requests[-1].sampling.structured == expected


def test_streams_give_the_same_text_in_order(url: str) -> None:
    got = events(
        f"{url}/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 9, "logprobs": 1, "stream_options": {"include_usage": True}},
    )
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"] == []
    assert got[-2]["usage"]["completion_tokens"] == 18
    for index in (0, 1):
        own = [c for e in got[:-2] for c in e["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == TEXT[:9]
        assert [c["finish_reason"] for c in own] == [None] * 4 + ["length"]
        assert [o for c in own for o in c["logprobs"]["text_offset"]] == list(range(9))
    assert len({e["id"] for e in got[:-1]}) == 1


def test_logprobs_of_completions(url: str) -> None:
    block = complete(url, max_tokens=3, logprobs=1)["choices"][0]["logprobs"]
    assert block["tokens"] == ["o", "n", "e"]
    assert block["token_logprobs"] == [-111.0, -110.0, -101.0]
    assert block["top_logprobs"][0] == {"o": -111.0, "p": -999.0}
    assert block["text_offset"] == [0, 1, 2]
    named = complete(url, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert named["tokens"] == ["token_id:111"]


def test_echo_scores_the_prompt(url: str, engine: ScriptedChat) -> None:
    answer = complete(url, prompt="abc", echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abc" + TEXT[2]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", TEXT[2]]
    assert choice["logprobs"]["token_logprobs"] == [None, -98.0, -99.0, -float(ord(TEXT[2]))]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert engine.requests[-1].forced == (98, 99)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 1)
    alone = complete(url, prompt="a", echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert (alone["text"], alone["logprobs"]["tokens"], alone["finish_reason"]) == ("a", ["a"], "length")


def chat(**body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **body}


def test_a_chat_splits_reasoning_and_answer(url: str, engine: ScriptedChat) -> None:
    status, answer = call(f"{url}/v1/chat/completions", chat(logprobs=True, top_logprobs=2))
    assert (status, answer["object"]) == (200, "chat.completion")
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "reasoning_content": "one ", "content": TEXT[4:9]}
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("o", -111.0, [111])
    assert [t["token"] for t in first["top_logprobs"]] == ["o", "p"]
    assert bytes(engine.requests[-1].prompt) == b"user:hi"
    got = events(f"{url}/v1/chat/completions", chat())
    deltas = [e["choices"][0]["delta"] for e in got[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": "on"}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "one "
    assert "".join(d.get("content", "") for d in deltas) == TEXT[4:9]
    assert {e["object"] for e in got[:-1]} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_may_fill_the_context(url: str, engine: ScriptedChat) -> None:
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 40}]}])
    del body["max_tokens"]
    assert call(f"{url}/v1/chat/completions", body)[0] == 200
    assert engine.requests[-1].max_tokens == CONTEXT - 45


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "x", "best": 1}, 400, "best: Extra inputs are not permitted"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature: Input should be greater than"),
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": ""}, 400, "prompt: is empty"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens: 0; expected at least 1 without echo"),
        ("completions", {"prompt": "x", "max_tokens": 99}, 400, "too long; expected at most 64"),
        ("completions", {"prompt": "x", "stream": True, "max_tokens": 99}, 400, "too long"),
        ("completions", {"prompt": "x", "echo": True, "stream": True}, 400, "echo: together with stream"),
        ("completions", {"prompt": "x", "echo": True, "guided_regex": "a"}, 400, "echo: together with stream"),
        ("completions", {"prompt": "x", "guided_regex": "a", "guided_json": {"a": 1}}, 400, "asked for at once"),
        ("completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "json_schema: is missing"),
        ("completions", {"prompt": "x", "model": "other"}, 404, "the model 'other' does not exist"),
        ("chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
        ("chat/completions", chat(top_logprobs=2), 400, "top_logprobs: without logprobs"),
        ("chat/completions", chat(chat_template_kwargs={"mood": 1}), 400, "chat_template_kwargs.mood: unknown option"),
        (
            "chat/completions",
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            400,
            "content of type ['image_url']; expected text",
        ),
    ],
)
def test_bad_requests_are_one_clear_line(url: str, path: str, body: Any, status: int, message: str) -> None:
    got, answer = call(f"{url}/v1/{path}", body)
    assert got == status
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_an_engine_without_a_template_refuses_chats() -> None:
    with serving(ScriptedEngine()) as base:
        status, answer = call(f"{base}/v1/chat/completions", chat())
    assert (status, answer["error"]["message"]) == (400, "this engine has no chat template; expected /v1/completions")


def test_metrics_count_steps_acceptance_and_prefix_hits() -> None:
    with serving(ScriptedEngine()) as base:
        complete(base, max_tokens=8)
        _, text = call(f"{base}/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["fasttrack_requests_active"] == "0"
    assert values['fasttrack_requests_total{reason="length"}'] == "1"
    assert values["fasttrack_generation_tokens_total"] == "8"
    assert values["fasttrack_prompt_tokens_total"] == values["fasttrack_prefix_cache_queries_total"] == "6"
    assert values["fasttrack_prefix_cache_hits_total"] == "3"
    assert values['fasttrack_steps_total{kind="verify",path="specialized",reason=""}'] == "4"
    assert values["fasttrack_step_seconds_total"] == "2"
    assert values["fasttrack_drafts_verified_total"] == values["fasttrack_draft_tokens_accepted_total"] == "4"
    assert values['fasttrack_draft_tokens_accepted_per_position_total{position="0"}'] == "4"
    assert not any('position="1"' in name for name in values)


def test_a_failing_engine_fails_its_requests_and_the_health_check() -> None:
    engine = ScriptedEngine()
    engine.fail_at = 1
    with serving(engine) as base:
        status, answer = call(f"{base}/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["message"]) == (500, "the engine failed: RuntimeError: a kernel hung")
        assert call(f"{base}/v1/completions", {"prompt": "x"})[0] == 500
        assert call(f"{base}/health")[0] == 500


def test_a_failure_in_a_stream_ends_it_with_an_error() -> None:
    engine = ScriptedEngine()
    engine.fail_at = 2
    with serving(engine) as base:
        got = events(f"{base}/v1/completions", {"prompt": "x"})
    assert [e["choices"][0]["text"] for e in got[:2]] == [TEXT[:2], TEXT[2:4]]
    assert "a kernel hung" in got[2]["error"]["message"]


def test_a_client_that_leaves_frees_its_request() -> None:
    engine = ScriptedEngine()
    engine.delay = 0.05
    with serving(engine) as base:
        parts = urlsplit(base)
        connection = http.client.HTTPConnection(parts.netloc)
        body = json.dumps({"prompt": "x", "max_tokens": 40, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
        connection.close()
        deadline = time.monotonic() + 10
        while not engine.aborted and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(engine.aborted) == 1
        assert not engine.active
