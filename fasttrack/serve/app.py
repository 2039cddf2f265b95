"""The HTTP application: routes, errors, server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from fasttrack.errors import UsageError
from fasttrack.serve import answers
from fasttrack.serve.jobs import Job, chat_jobs, completion_jobs
from fasttrack.serve.metrics import CONTENT_TYPE
from fasttrack.serve.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from fasttrack.serve.worker import EngineFailed, EngineWorker
from fasttrack.target import ServingEngine

DONE = "data: [DONE]\n\n"


class UnknownModel(UsageError):
    """Answered with 404, as other servers do."""


def create_app(engine: ServingEngine, name: str) -> FastAPI:
    """The application that serves ``engine`` under the model name ``name``; it owns the engine from then on."""
    worker, created, info = EngineWorker(engine), int(time.time()), engine.info()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="fasttrack serve", lifespan=lifespan)
    app.state.worker = worker
    _handle_errors(app)

    def check(body: GenerationBody | TokenizeBody | DetokenizeBody) -> None:
        if body.model is not None and body.model != name:
            raise UnknownModel(f"the model {body.model!r} does not exist", expected=name)

    def head(kind: str, prefix: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [answers.model_card(name, created, info.max_context)]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        if model != name:
            raise UnknownModel(f"the model {model!r} does not exist", expected=name)
        return answers.model_card(name, created, info.max_context)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        check(body)
        header = head("text_completion", "cmpl")
        return await _answer(worker, body, header, header, completion_jobs(body, engine, header["id"]))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        check(body)
        header = head("chat.completion", "chatcmpl")
        chunk = {**header, "object": "chat.completion.chunk"}
        return await _answer(worker, body, header, chunk, chat_jobs(body, engine, header["id"]))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check(body)
        tokens = engine.encode(body.prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check(body)
        wrong = [t for t in body.tokens if t >= info.vocab_size]
        if wrong:
            raise UsageError(f"token {wrong[0]}", where="tokens", expected=f"below {info.vocab_size}")
        return {"prompt": engine.decode(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        ends = [engine.decode([t]) for t in info.eos_token_ids]
        return {"tokenizer_class": "fasttrack", "eos_token": ends[0] if ends else None, "bos_token": None}

    @app.get("/health")
    async def health() -> Response:
        if worker.failure is not None:
            return JSONResponse(answers.error(f"the engine failed: {worker.failure}", "server_error"), 500)
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(worker.metrics.render(), media_type=CONTENT_TYPE)

    return app


async def _answer(
    worker: EngineWorker, body: GenerationBody, header: dict[str, Any], chunk: dict[str, Any], jobs: list[Job]
) -> Response:
    """All of ``jobs``, as one document or as a stream. ``chunk``: the head of a stream's events."""
    if not body.stream:
        running = [asyncio.ensure_future(job.finish(worker)) for job in jobs]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
        document = {**header, "choices": [job.choice() for job in jobs], "usage": _usage(jobs)}
        return JSONResponse(document)
    events = _events(worker, body, chunk, jobs)
    first = await anext(events)  # what is wrong with the request is known before the stream begins
    return StreamingResponse(_chain(first, events), media_type="text/event-stream")


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _events(
    worker: EngineWorker, body: GenerationBody, chunk: dict[str, Any], jobs: list[Job]
) -> AsyncIterator[str]:
    """Server-sent events of all jobs, in the order in which the engine emits."""
    merged: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    async def feed(job: Job) -> None:
        try:
            async for choice in job.stream(worker):
                merged.put_nowait(choice)
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)

    running = [asyncio.ensure_future(feed(job)) for job in jobs]
    open_jobs, begun = len(jobs), False
    try:
        while open_jobs:
            item = await merged.get()
            if isinstance(item, Exception):
                if not begun:
                    raise item
                yield _event(answers.error(str(item), "server_error"))
                break
            if item is None:
                open_jobs -= 1
                continue
            begun = True
            yield _event({**chunk, "choices": [item]})
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event({**chunk, "choices": [], "usage": _usage(jobs)})
        yield DONE
    finally:
        for task in running:
            task.cancel()


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _usage(jobs: Iterable[Job]) -> dict[str, Any]:
    jobs = list(jobs)
    return answers.usage(
        sum(len(job.prompt) for job in jobs if job.counts_prompt),
        sum(job.generated for job in jobs),
        sum(job.cached for job in jobs),
    )


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return JSONResponse(answers.error(f"{field}: {first['msg']}", param=field), 400)

    @app.exception_handler(UnknownModel)
    async def unknown(request: Request, error: UnknownModel) -> Response:
        return JSONResponse(answers.error(str(error), "not_found_error", "model"), 404)

    @app.exception_handler(UsageError)
    async def refused(request: Request, error: UsageError) -> Response:
        return JSONResponse(answers.error(str(error)), 400)

    @app.exception_handler(EngineFailed)
    async def failed(request: Request, error: EngineFailed) -> Response:
        return JSONResponse(answers.error(f"the engine failed: {error}", "server_error"), 500)
