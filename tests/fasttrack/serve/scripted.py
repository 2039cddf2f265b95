"""A served engine without a model, and a server for it on a free loopback port."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from fasttrack.errors import UsageError
from fasttrack.serve.app import create_app
from fasttrack.target import Completion, Delta, EngineInfo, LedgerStep, Request

VOCAB, CONTEXT, END = 256, 64, 0


class ScriptedEngine:
    """Tokens are bytes. Every step gives every request its next two tokens of :attr:`script` (or what is forced), as
    a verify step of three drafts would that accepts one."""

    script = b"one two three four five six seven eight nine"

    def __init__(self) -> None:
        self.active: dict[str, tuple[Request, int]] = {}
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.ledger: list[LedgerStep] = []
        self.fail_at: int | None = None
        self.delay = 0.0
        self.closed = False

    def info(self) -> EngineInfo:
        return EngineInfo("embedded", ("cpu",), "none", VOCAB, CONTEXT, (END,), {}, "emulated")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        raise NotImplementedError

    def drain_ledger(self) -> list[LedgerStep]:
        drained, self.ledger = self.ledger, []
        return drained

    def reset(self) -> None:
        self.active.clear()

    def close(self) -> None:
        self.closed = True

    def submit(self, request: Request) -> None:
        if len(request.prompt) + request.max_tokens > CONTEXT:
            raise UsageError(f"request {request.id!r}: too long", expected=f"at most {CONTEXT}")
        self.requests.append(request)
        self.active[request.id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self.active.pop(request_id, None):
            self.aborted.append(request_id)

    @property
    def busy(self) -> bool:
        return bool(self.active)

    def step(self, run: str, index: int) -> list[Delta]:
        time.sleep(self.delay)
        if index == self.fail_at:
            raise RuntimeError("a kernel hung")
        deltas = []
        for name, (request, at) in list(self.active.items()):
            text = [*request.forced, *self.script[len(request.forced) :]]
            tokens = text[at : min(at + 2, request.max_tokens)]
            reason = "length" if at + len(tokens) == request.max_tokens else None
            scored = [-float(t) for t in tokens]
            top = [{t: -float(t), t + 1: -999.0} for t in tokens]
            keep = request.sampling.logprobs is not None
            deltas.append(
                Delta(
                    name,
                    tokens,
                    self.decode(tokens),
                    scored if keep else None,
                    top if keep else None,
                    reason,
                    len(request.prompt) // 2,
                )
            )
            self.active[name] = (request, at + len(tokens))
            if reason:
                del self.active[name]
        count = len(deltas)
        self.ledger.append(
            LedgerStep(
                run,
                index,
                "verify",
                count,
                4 * count,
                4 * count,
                3,
                1,
                1,
                9,
                "specialized",
                None,
                {},
                {},
                [],
                [],
                wall=0.5,
                emitted=2 * count,
                accepted=[1] * count,
            )
        )
        return deltas


class ScriptedChat(ScriptedEngine):
    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, structured: bool = False
    ) -> tuple[list[int], Any]:
        if options:
            raise UsageError("unknown option", where=f"chat_template_kwargs.{min(options)}")
        return self.encode("|".join(f"{m['role']}:{m['content']}" for m in messages)), Thoughts()


class Thoughts:
    """Everything up to the first "t" is reasoning."""

    def __init__(self) -> None:
        self.over = False

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        if self.over:
            return "", text
        before, seen, after = text.partition("t")
        self.over = bool(seen)
        return before, seen + after


@contextmanager
def serving(engine: Any, name: str = "scripted") -> Iterator[str]:
    """The base URL of a running server."""
    config = uvicorn.Config(create_app(engine, name), host="127.0.0.1", port=0, log_level="error")
    listener = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def call(url: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON (or text) of one request; POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, raw = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read().decode()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw


def events(url: str, body: Any) -> list[Any]:
    """The events of a stream, parsed; the closing one stays text."""
    _, raw = call(url, {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in str(raw).splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
