"""One answer being generated: the engine's request, what has come back, and its shape in the API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fasttrack.errors import UsageError
from fasttrack.serve import answers
from fasttrack.serve.answers import Piece
from fasttrack.serve.schema import ChatBody, CompletionBody, GenerationBody
from fasttrack.serve.worker import EngineWorker
from fasttrack.target import ChatParser, ChatServingEngine, Delta, Request, ServingEngine

DEFAULT_TOKENS = 16  #: of a completion that does not say


class Job:
    """Choice ``index`` of an answer. ``counts_prompt``: the first of several answers to one prompt."""

    def __init__(
        self, engine: ServingEngine, body: GenerationBody, index: int, prompt: Sequence[int], request: Request | None
    ) -> None:
        self.engine, self.body, self.index = engine, body, index
        self.prompt, self.request = list(prompt), request
        self.counts_prompt = index % body.n == 0
        self.piece, self.text = Piece(), ""
        self.finish_reason: str | None = "length" if request is None else None
        self.generated = self.cached = 0

    def spell(self, token: int) -> str:
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.engine.decode([token])

    async def finish(self, worker: EngineWorker) -> None:
        """Generate to the end."""
        if self.request is not None:
            async for delta in worker.run(self.request):
                self._take(delta)

    async def stream(self, worker: EngineWorker) -> AsyncIterator[dict[str, Any]]:
        """The choice of each event."""
        assert self.request is not None
        async for delta in worker.run(self.request):
            for choice in self._events(delta):
                yield choice

    def _take(self, delta: Delta) -> Piece:
        own = Piece()
        own.add(delta)
        self.piece.add(delta)
        self.text += delta.text
        self.generated += len(delta.token_ids)
        self.cached, self.finish_reason = delta.cached_tokens, delta.finish_reason
        return own

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        raise NotImplementedError

    def choice(self) -> dict[str, Any]:
        """The finished choice."""
        raise NotImplementedError


class CompletionJob(Job):
    body: CompletionBody

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        return None if self.body.logprobs is None else answers.completion_logprobs(piece, self.spell, offset)

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        offset = len(self.text)
        piece = self._take(delta)
        reason = answers.finish(delta.finish_reason)
        logprobs = self._logprobs(piece, offset)
        return [{"index": self.index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}]

    def choice(self) -> dict[str, Any]:
        piece, text = self.piece, self.text
        if self.body.echo:  # the first token is the engine's prompt, the others were forced
            piece = Piece([self.prompt[0], *piece.tokens], [None, *piece.logprobs], [None, *piece.top])
            text = self.engine.decode(self.prompt[:1]) + text
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._logprobs(piece, 0),
            "finish_reason": answers.finish(self.finish_reason),
        }

    def _take(self, delta: Delta) -> Piece:
        own = super()._take(delta)
        if self.body.echo:
            self.generated = max(0, len(self.piece.tokens) - len(self.prompt) + 1)
        return own


class ChatJob(Job):
    body: ChatBody

    def __init__(self, *args: Any, parser: ChatParser) -> None:
        super().__init__(*args)
        self.parser, self.begun = parser, False
        self.reasoning = self.answer = ""

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return answers.chat_logprobs(piece, self.spell, self.body.top_logprobs or 0) if self.body.logprobs else None

    def _take(self, delta: Delta) -> Piece:
        own = super()._take(delta)
        self.added = self.parser.feed(delta.text, final=delta.finish_reason is not None)
        self.reasoning += self.added[0]
        self.answer += self.added[1]
        return own

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        piece, reason = self._take(delta), answers.finish(delta.finish_reason)
        fields: dict[str, Any] = {} if self.begun else {"role": "assistant", "content": ""}
        self.begun = True
        for name, text in zip(("reasoning_content", "content"), self.added, strict=True):
            if text:
                fields[name] = text
        return [{"index": self.index, "delta": fields, "logprobs": self._logprobs(piece), "finish_reason": reason}]

    def choice(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.answer, "reasoning_content": self.reasoning or None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self.piece),
            "finish_reason": answers.finish(self.finish_reason),
        }


def completion_jobs(body: CompletionBody, engine: ServingEngine, answer: str) -> list[Job]:
    """One per prompt and wanted answer. :class:`UsageError` for what cannot be served."""
    if body.echo and (body.stream or body.structured()):
        raise UsageError("together with stream or structured output", where="echo", expected="echo alone")
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if tokens < 1 and not body.echo:
        raise UsageError("0", where="max_tokens", expected="at least 1 without echo")
    jobs: list[Job] = []
    for prompt in answers.prompts_of(body.prompt, engine.encode):
        if not prompt:
            raise UsageError("is empty", where="prompt", expected="at least one token")
        for seed in body.seeds(body.n):
            index, request = len(jobs), None
            if body.echo and len(prompt) - 1 + tokens > 0:
                total, forced = len(prompt) - 1 + tokens, tuple(prompt[1:])
                sampling = body.sampling(body.logprobs, seed)
                request = Request(f"{answer}-{index}", (prompt[0],), total, sampling, forced=forced)
            elif not body.echo:
                request = Request(f"{answer}-{index}", tuple(prompt), tokens, body.sampling(body.logprobs, seed))
            jobs.append(CompletionJob(engine, body, index, prompt, request))
    return jobs


def chat_jobs(body: ChatBody, engine: ServingEngine, answer: str) -> list[Job]:
    """One per wanted answer. :class:`UsageError` for what cannot be served."""
    if not isinstance(engine, ChatServingEngine):
        raise UsageError("this engine has no chat template", expected="/v1/completions")
    if body.top_logprobs and not body.logprobs:
        raise UsageError("without logprobs", where="top_logprobs", expected="logprobs true")
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    messages = [message.as_mapping() for message in body.messages]
    jobs: list[Job] = []
    for index, seed in enumerate(body.seeds(body.n)):
        sampling = body.sampling(alternatives, seed)
        options = body.chat_template_kwargs
        prompt, parser = engine.chat_prompt(messages, options, structured=sampling.structured is not None)
        tokens = limit or max(1, engine.info().max_context - len(prompt))
        request = Request(f"{answer}-{index}", tuple(prompt), tokens, sampling)
        jobs.append(ChatJob(engine, body, index, prompt, request, parser=parser))
    return jobs
