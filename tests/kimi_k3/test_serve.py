"""The served engine as clients see it: the official client, lm-eval, and the harness's own server engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fasttrack.target import EngineSpec, Request, Sampling
from kimi_k3 import names
from kimi_k3.target import TARGET

MODEL = "kimi_k3"
OPTIONS = {"precision": "fp64", "drafter": "rehearsal", "prefix_caching": True, "max_context": 256}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server process as a user starts it, on a free port of the default address."""
    log = tmp_path_factory.mktemp("serve") / "log"
    options = [word for k, v in OPTIONS.items() for word in ("--option", f"{k}={json.dumps(v)}")]
    command = [
        Path(sys.executable).with_name("fasttrack"),
        "serve",
        MODEL,
        "--port",
        "0",
        "--draft-length",
        "5",
        *options,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"at (http://127\.0\.0\.1:\d+)/v1", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same model in this process: stock, without drafts."""
    return TARGET.engine(EngineSpec("embedded", "stock", names.SWITCH_OFF, tp=1, max_requests=4, options=OPTIONS))


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(v) for name, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_completions_are_the_engines(client: openai.OpenAI, plain: Any) -> None:
    prompt = "The number of questions is "
    done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, logprobs=3)
    (expected,) = plain.generate([Request("a", tuple(plain.encode(prompt)), 16, Sampling(logprobs=3))], run="x")
    choice = done.choices[0]
    assert choice.text == expected.text
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    for top, exact in zip(choice.logprobs.top_logprobs, expected.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(max(exact.values()), abs=1e-9)
        assert 1 <= len(top) <= len(exact)  # parts of characters are written alike
    streamed = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == expected.text


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt="A", max_tokens=12, seed=seed).choices[0].text

    assert text(1) == text(1) != text(2)


def test_stop_strings_end_streams_without_being_sent(client: openai.OpenAI, plain: Any) -> None:
    (free,) = plain.generate([Request("a", tuple(plain.encode("What")), 24, Sampling(ignore_eos=True))], run="x")
    stop = free.text[9:12]
    ask = {"model": MODEL, "prompt": "What", "max_tokens": 24, "temperature": 0, "stop": [stop]}
    whole = client.completions.create(**ask).choices[0]
    assert (whole.text, whole.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    assert "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True)) == whole.text


def test_structured_chats(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["red", "green"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A colour?"}]
    done = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        seed=1,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
    )
    value = json.loads(done.choices[0].message.content)
    assert set(value) == {"kind", "n"}
    done = client.completions.create(
        model=MODEL, prompt="?", max_tokens=20, seed=2, extra_body={"structured_outputs": {"regex": "(yes|no)!"}}
    )
    assert done.choices[0].text in ("yes!", "no!")


def test_chats_stream_reasoning_and_log_probabilities(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ask = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == 12
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    off = client.chat.completions.create(**ask, extra_body={"chat_template_kwargs": {"thinking": False}})
    assert off.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="expected role system, user or assistant"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "tool", "content": "x"}])


def test_metrics_show_acceptance_by_place_and_prefix_hits(client: openai.OpenAI, url: str) -> None:
    prompt = "".join(f"question {i} and the answer. " for i in range(12))
    for _ in range(2):
        done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
    assert done.usage.prompt_tokens_details.cached_tokens >= 64
    values = metrics(url)
    assert values["fasttrack_prefix_cache_hits_total"] >= 64
    accepted = [values[f'fasttrack_draft_tokens_accepted_per_position_total{{position="{i}"}}'] for i in range(5)]
    assert accepted == sorted(accepted, reverse=True)
    assert values["fasttrack_drafts_verified_total"] > accepted[0] > accepted[-1] > 0
    assert values['fasttrack_steps_total{kind="verify",path="specialized",reason=""}'] > 0
    assert not any('kind="verify",path="stock",reason="draft' in name for name in values)


def test_lm_eval_local_completions(url: str, plain: Any) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    lm = get_model("local-completions").create_from_arg_obj(
        {
            "model": MODEL,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 1,
            "max_length": 200,
            "batch_size": 2,
        }
    )
    pairs = [("The answer to the question is", " with"), ("What is", " the number"), ("A", " b c")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, continuation), (score, greedy) in zip(pairs, lm.loglikelihood(asked), strict=True):
        prompt, target = plain.encode(context), plain.encode(continuation)
        (done,) = plain.generate(
            [Request("a", tuple(prompt), len(target), Sampling(logprobs=1), forced=tuple(target))], run="x"
        )
        assert score == pytest.approx(sum(done.logprobs), abs=1e-9)
        assert greedy == all(max(top, key=top.get) == t for top, t in zip(done.top_logprobs, target, strict=True))
    asked = [Instance("generate_until", {}, ("The answer", {"until": ["\n\n"], "max_gen_toks": 8}), 0)]
    (expected,) = plain.generate([Request("a", tuple(plain.encode("The answer")), 8)], run="x")
    assert lm.generate_until(asked) == [expected.text]


def test_the_harness_s_server_engine_speaks_to_it(url: str, plain: Any) -> None:
    from fasttrack.engines.server import ServerEngine

    spec = EngineSpec("server", "stock", names.SWITCH_OFF, max_requests=2, options={"url": url, "vocab_size": 512})
    engine = ServerEngine(spec, TARGET.describe())
    assert engine.info().max_context == 256
    assert engine.encode("the answer") == plain.encode("the answer")
    requests = [
        Request("free", (5, 6, 7), 9, Sampling(logprobs=2)),
        Request("shaped", (5, 6), 20, Sampling(structured={"regex": "[ab]{3}"})),
    ]
    got, expected = engine.generate(requests, run="x"), plain.generate(requests, run="x")
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    assert got[0].logprobs == pytest.approx(expected[0].logprobs, abs=1e-9)
    forced = [Request("f", (5, 6), 3, Sampling(logprobs=1), forced=(10, 11, 12))]
    (scored,), (exact,) = engine.generate(forced, run="x"), plain.generate(forced, run="x")
    assert scored.token_ids == [10, 11, 12]
    assert scored.logprobs == pytest.approx(exact.logprobs, abs=1e-9)
