"""The server engine against a tiny OpenAI-compatible server on loopback, backed by the toy engine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_target import TARGET

from fasttrack.checks.lm import chat_template_sha256
from fasttrack.engines.server import ServerEngine, request_body
from fasttrack.errors import EvidenceError, UsageError
from fasttrack.target import ChatEngine, Engine, EngineSpec, Request, Sampling


class Handler(BaseHTTPRequestHandler):
    token_ids = True
    cut_stream = False

    def log_message(self, *args):
        pass

    def _send(self, body, kind="application/json", status=200):
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/v1/models"
        self._send(json.dumps({"data": [{"id": "toy", "max_model_len": 512}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = TARGET.engine(EngineSpec("embedded", "stock", "auto"))
        if self.path == "/tokenize":
            text = body.get("prompt") or "".join(f"[{m['role'][0]}]{m['content']}" for m in body["messages"]) + "[a]"
            return self._send(json.dumps({"tokens": engine.encode(text)}))
        if self.path == "/detokenize":
            return self._send(json.dumps({"prompt": engine.decode(body["tokens"])}))
        if body["temperature"] < 0:
            return self._send('{"error": "temperature must not be negative"}', status=400)
        sampling = Sampling(
            temperature=body["temperature"], seed=body["seed"], ignore_eos=body.get("ignore_eos", False), logprobs=1
        )
        if body.get("echo"):
            forced = tuple(body["prompt"][1:])
            request = Request("x", tuple(body["prompt"][:1]), len(forced), Sampling(ignore_eos=True), forced=forced)
            done = engine.generate([request], run="s")[0]
            names = [f"token_id:{t}" for t in [*body["prompt"], 1]]
            block = {"tokens": names, "token_logprobs": [None, *done.logprobs, -1.0]}
            return self._send(json.dumps({"choices": [{"text": "x", "logprobs": block, "finish_reason": "length"}]}))
        done = engine.generate([Request("x", tuple(body["prompt"]), body["max_tokens"], sampling)], run="s")[0]
        events = []
        for i, token in enumerate(done.token_ids):
            name = f"token_id:{token}" if self.token_ids else chr(token)
            block = {"tokens": [name], "token_logprobs": [done.logprobs[i]], "top_logprobs": [{name: done.logprobs[i]}]}
            reason = done.finish_reason if i + 1 == len(done.token_ids) and not self.cut_stream else None
            events.append({"choices": [{"text": chr(token), "logprobs": block, "finish_reason": reason}]})
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events)
        return self._send(text + "data: [DONE]\n\n", "text/event-stream")


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", server.RequestHandlerClass
    server.shutdown()
    server.server_close()


def connect(url, arm="stock", **options):
    return ServerEngine(
        EngineSpec("server", arm, "auto", max_requests=4, options={"url": url, **options}), TARGET.describe()
    )


def test_answers_equal_those_of_the_engine_behind_it(url):
    engine = connect(url[0], vocab_size=128)
    assert isinstance(engine, Engine)
    requests = [Request(f"r{i}", (5 + i, 6, 7), 6, Sampling(ignore_eos=True)) for i in range(6)]
    direct = TARGET.engine(EngineSpec("embedded", "stock", "auto")).generate(requests, run="d")
    served = engine.generate(requests, run="s")
    assert [c.id for c in served] == [r.id for r in requests]
    for one, other in zip(served, direct, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        # the engine behind batches differently, which moves the last bits
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert len(one.token_times) == 6
        assert one.arrival_time <= one.token_times[0] <= one.token_times[-1]
    assert engine.decode(engine.encode("abc")) == "abc"
    assert engine.drain_ledger() == []


def test_forced_tokens_are_scored_by_echo(url):
    request = Request("f", (5, 6), 3, Sampling(logprobs=1), forced=(9, 10, 11))
    done = connect(url[0]).generate([request], run="s")[0]
    whole = Request("w", (5,), 4, Sampling(ignore_eos=True), forced=(6, 9, 10, 11))
    direct = TARGET.engine(EngineSpec("embedded", "stock", "auto")).generate([whole], run="d")[0]
    assert done.token_ids == [9, 10, 11]
    assert done.logprobs == pytest.approx(direct.logprobs[1:])


def test_evidence_is_measured_only_with_named_devices(url):
    assert connect(url[0]).info().evidence == "emulated"
    info = connect(url[0], devices=["NVIDIA GB300"]).info()
    assert (info.evidence, info.devices, info.max_context) == ("measured", ("NVIDIA GB300",), 512)
    assert "url" not in info.config, "arms have different URLs, and that is no difference between them"


def test_each_arm_has_its_url(url):
    assert connect({"stock": url[0]}, arm="stock-repeat").url == url[0]
    with pytest.raises(UsageError, match="no URL for arm optimized"):
        connect({"stock": url[0]}, arm="optimized")


def test_failures_are_one_clear_line(url):
    with pytest.raises(EvidenceError, match=r"no answer from http://127\.0\.0\.1:9/v1/models"):
        connect("http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"does not serve 'other'.*expected toy"):
        connect(url[0], model="other")
    with pytest.raises(EvidenceError, match=r"answered 400: .*negative"):
        connect(url[0]).generate([Request("r", (1,), 2, Sampling(temperature=-1.0))], run="s")
    with pytest.raises(EvidenceError, match="no full log-probabilities"):
        connect(url[0]).generate([Request("r", (1,), 2)], run="s", keep_logits=True)
    with pytest.raises(EvidenceError, match="arrival steps"):
        connect(url[0]).generate([Request("r", (1,), 2, arrival_step=3)], run="s")


def test_a_server_without_token_ids_or_with_a_broken_stream_is_refused(url):
    url[1].token_ids = False
    with pytest.raises(EvidenceError, match="return_tokens_as_token_ids"):
        connect(url[0]).generate([Request("r", (5, 6), 2)], run="s")
    url[1].token_ids, url[1].cut_stream = True, True
    with pytest.raises(EvidenceError, match="ended without a finish reason"):
        connect(url[0]).generate([Request("r", (5, 6), 2)], run="s")


def test_only_parameters_that_are_asked_for_travel():
    plain = request_body("m", Request("r", (1,), 4))
    assert set(plain) == {
        *("model", "prompt", "max_tokens", "temperature", "seed", "logprobs", "return_tokens_as_token_ids", "stream")
    }
    sampling = Sampling(top_k=5, stop=("x",), repetition_penalty=1.1, structured={"regex": "a+"})
    body = request_body("m", Request("r", (1,), 4, sampling))
    assert (body["top_k"], body["stop"], body["repetition_penalty"]) == (5, ["x"], 1.1)
    assert body["structured_outputs"] == {"regex": "a+"}
    schema = request_body("m", Request("r", (1,), 4, Sampling(structured={"json_schema": {"type": "object"}})))
    assert schema["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_conversations_go_through_the_servers_template(url):
    engine = connect(url[0])
    assert isinstance(engine, ChatEngine)
    turns = [{"role": "user", "content": "hi"}]
    assert engine.decode(engine.encode_chat(turns)) == "[u]hi[a]"
    assert chat_template_sha256(engine) == chat_template_sha256(connect(url[0]))
