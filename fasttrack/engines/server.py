"""An engine behind an OpenAI-compatible completions API, for arms that were started by somebody else.

Options (``engine.options`` of the manifest):

- ``url``: one base URL, or one per arm (``{stock: ..., optimized: ...}``), without ``/v1``;
- ``model``: served name; ``vocab_size``; ``max_context`` where the server's model list has no ``max_model_len``;
- ``devices``: GPU names of the server. Without them nobody knows what ran, and the evidence is ``emulated``;
- ``timeout_s`` per request; ``api_key_env``: name of the environment variable that holds the key.

Token ids are asked for with vLLM's ``return_tokens_as_token_ids``. A server shows no steps: the ledger stays
empty, and the gates that need it do not run.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fasttrack.errors import EvidenceError, UsageError
from fasttrack.target import Completion, EngineInfo, EngineSpec, LedgerStep, Request, TargetDescription


class ServerEngine:
    def __init__(self, spec: EngineSpec, description: TargetDescription) -> None:
        self.spec, self.description, self.options = spec, description, dict(spec.options)
        url = self.options.get("url")
        if isinstance(url, dict):
            url = url.get(spec.arm, url.get("stock" if spec.arm == "stock-repeat" else spec.arm))
        if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(
                f"no URL for arm {spec.arm}", where="engine.options.url", expected="http://HOST:PORT, or one per arm"
            )
        self.url = url.rstrip("/")
        served = self._json("GET", "/v1/models").get("data") or [{}]
        wanted = self.options.get("model", served[0].get("id"))
        card = next((m for m in served if m.get("id") == wanted), None)
        if card is None:
            known = ", ".join(str(m.get("id")) for m in served)
            raise UsageError(f"{self.url} does not serve {wanted!r}", where="engine.options.model", expected=known)
        self.model = str(wanted)
        self.max_context = int(card.get("max_model_len") or self.options.get("max_context") or 0)
        if not self.max_context:
            raise UsageError(
                "the server does not say its context", where="engine.options.max_context", expected="tokens"
            )

    def info(self) -> EngineInfo:
        devices = tuple(self.options.get("devices", ()))
        hidden = ("url", "devices", "api_key_env", "timeout_s")
        config = {k: v for k, v in self.options.items() if k not in hidden}
        return EngineInfo(
            kind="server",
            devices=devices,
            checkpoint=str(self.options.get("checkpoint", self.model)),
            vocab_size=int(self.options.get("vocab_size", 1)),
            max_context=self.max_context,
            eos_token_ids=tuple(self.options.get("eos_token_ids", ())),
            config={**config, "max_context": self.max_context, "tp": self.spec.tp},
            evidence="measured" if devices else "emulated",
        )

    def encode(self, text: str) -> list[int]:
        answer = self._json("POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        return [int(t) for t in answer["tokens"]]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Through the server's chat template; :class:`EvidenceError` where it has none."""
        body = {"model": self.model, "messages": [dict(m) for m in messages], "add_generation_prompt": True}
        answer = self._json("POST", "/tokenize", body)
        return [int(t) for t in answer["tokens"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._json("POST", "/detokenize", {"model": self.model, "tokens": list(token_ids)})["prompt"])

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Send all requests, at most ``max_requests`` at a time. ``run`` and ``on_step`` have no counterpart here.

        Raises :class:`EvidenceError` for what an API cannot do: full logits, and arrivals in engine steps.
        """
        if keep_logits:
            raise EvidenceError("a server returns no full log-probabilities; fidelity needs an in-process engine")
        if any(r.arrival_step for r in requests):
            raise EvidenceError("a server shows no steps; a schedule of arrival steps needs an in-process engine")
        with ThreadPoolExecutor(max_workers=max(1, min(self.spec.max_requests, len(requests)))) as pool:
            return list(pool.map(self._forced if any(r.forced for r in requests) else self._one, requests))

    def drain_ledger(self) -> list[LedgerStep]:
        return []

    def reset(self) -> None:
        """Nothing: what a server keeps between requests is the server's, and part of the experiment's conditions."""

    def close(self) -> None:
        """Nothing: the server was started by somebody else."""

    def _one(self, request: Request) -> Completion:
        done = Completion(request.id, [], "", logprobs=[], top_logprobs=[], arrival_time=time.perf_counter())
        for choice in self._stream(request_body(self.model, request)):
            now = time.perf_counter()
            tokens, logprobs, top = _tokens(choice)
            done.token_ids += tokens
            done.token_times += [now] * len(tokens)
            done.text += choice.get("text") or ""
            assert done.logprobs is not None
            assert done.top_logprobs is not None
            done.logprobs += logprobs
            done.top_logprobs += top
            done.finish_reason = choice.get("finish_reason") or done.finish_reason
        if not done.finish_reason:
            raise EvidenceError(f"{self.url}: the stream of request {request.id} ended without a finish reason")
        return done

    def _forced(self, request: Request) -> Completion:
        """Score ``request.forced`` after the prompt. The server does that in prefill, not in decode steps."""
        body = request_body(self.model, request)
        body |= {"prompt": [*request.prompt, *request.forced], "echo": True, "max_tokens": 1, "logprobs": 1}
        body.pop("stream")
        arrival = time.perf_counter()
        choice = self._json("POST", "/v1/completions", body)["choices"][0]
        tokens, logprobs, top = _tokens(choice)
        start, end = len(request.prompt), len(request.prompt) + len(request.forced)
        if tuple(tokens[start:end]) != request.forced:
            raise EvidenceError(f"{self.url}: echo did not return the forced tokens of request {request.id}")
        times = [time.perf_counter()] * len(request.forced)
        return Completion(
            request.id, list(request.forced), "length", "", logprobs[start:end], top[start:end], arrival, times
        )

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection, response = self._open("POST", "/v1/completions", body)
        try:
            for raw in response:
                line = raw.decode("utf-8").strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise EvidenceError(f"{self.url}: {event['error']}")
                if event.get("choices"):
                    yield event["choices"][0]
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection, response = self._open(method, path, body)
        try:
            answer = json.loads(response.read())
        finally:
            connection.close()
        return dict(answer)

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=float(self.options.get("timeout_s", 600)))
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(str(self.options.get("api_key_env", ""))):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, parts.path + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise EvidenceError(f"no answer from {self.url}{path}: {error}") from None
        if response.status != 200:
            text = response.read().decode("utf-8", "replace").splitlines() or [""]
            connection.close()
            raise EvidenceError(f"{self.url}{path} answered {response.status}: {text[0][:300]}")
        return connection, response


def request_body(model: str, request: Request) -> dict[str, Any]:
    """The completions request; vLLM's extensions appear only where a sampling parameter needs them."""
    s = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": s.temperature,
        "seed": s.seed,
        "logprobs": max(1, s.logprobs or 1),
        "return_tokens_as_token_ids": True,
        "stream": True,
    }
    optional = {
        "top_p": (s.top_p, 1.0),
        "top_k": (s.top_k, 0),
        "stop": (list(s.stop), []),
        "stop_token_ids": (list(s.stop_token_ids), []),
        "presence_penalty": (s.presence_penalty, 0.0),
        "frequency_penalty": (s.frequency_penalty, 0.0),
        "repetition_penalty": (s.repetition_penalty, 1.0),
        "ignore_eos": (s.ignore_eos, False),
    }
    body |= {key: value for key, (value, default) in optional.items() if value != default}
    if s.structured and "json_schema" in s.structured:
        schema = {"name": "output", "schema": s.structured["json_schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif s.structured:
        body["structured_outputs"] = dict(s.structured)
    return body


def _tokens(choice: dict[str, Any]) -> tuple[list[int], list[float], list[dict[int, float]]]:
    """Token ids, log-probabilities and alternatives of one choice; the first echoed token has no log-probability."""
    block = choice.get("logprobs") or {}
    names = block.get("tokens") or []
    if any(not str(n).startswith("token_id:") for n in names) or (choice.get("text") and not names):
        raise EvidenceError("the server returns no token ids; expected support of return_tokens_as_token_ids")
    tokens = [_token_id(n) for n in names]
    logprobs = [float("nan") if v is None else float(v) for v in block.get("token_logprobs") or []]
    top = [
        {_token_id(k): float(v) for k, v in (d or {}).items()} for d in block.get("top_logprobs") or [{}] * len(names)
    ]
    return tokens, logprobs, top


def _token_id(name: str) -> int:
    return int(str(name).removeprefix("token_id:"))
