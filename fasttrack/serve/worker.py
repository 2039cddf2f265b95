"""The thread that owns the engine: takes requests from the event loop between steps, hands back what they got."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fasttrack.serve.metrics import Metrics
from fasttrack.target import Delta, Request, ServingEngine

RUN = "serve"  #: name of the run in the ledger and in profiler ranges


class EngineFailed(RuntimeError):
    """The engine raised in a step; it serves nothing any more."""


@dataclass
class _Client:
    request: Request
    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[Delta | Exception]
    admitted: bool = False

    def put(self, item: Delta | Exception) -> None:
        self.loop.call_soon_threadsafe(self.deltas.put_nowait, item)


class EngineWorker:
    """All calls into the engine happen on one thread; :meth:`run` may be called from any event loop."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine, self.metrics = engine, Metrics()
        self.failure: Exception | None = None
        self._clients: dict[str, _Client] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current step, forget all requests, close the engine."""
        self._commands.put(None)
        self._thread.join()

    async def run(self, request: Request) -> AsyncIterator[Delta]:
        """What ``request`` gets, step by step. Leaving early takes it out of the engine.

        Raises what :meth:`ServingEngine.submit` raises, and :class:`EngineFailed`.
        """
        if self.failure is not None:
            raise EngineFailed(str(self.failure))
        client = _Client(request, asyncio.get_running_loop(), asyncio.Queue())
        self._commands.put(lambda: self._submit(client))
        try:
            while True:
                item = await client.deltas.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._commands.put(lambda: self._abort(client))

    # -- on the engine's thread --------------------------------------------------------------------------------

    def _submit(self, client: _Client) -> None:
        try:
            self.engine.submit(client.request)
        except Exception as error:
            client.put(error)
            return
        self._clients[client.request.id] = client
        self.metrics.active = len(self._clients)

    def _abort(self, client: _Client) -> None:
        if self._clients.get(client.request.id) is client:
            self.engine.abort(client.request.id)
            self._forget(client, "abort")

    def _forget(self, client: _Client, reason: str) -> None:
        del self._clients[client.request.id]
        self.metrics.finished(reason)
        self.metrics.active = len(self._clients)

    def _loop(self) -> None:
        index = 0
        while True:
            while not self.engine.busy or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self.engine.close()
                    return
                command()
                if self.failure is not None:
                    self._fail_all()
            try:
                deltas = self.engine.step(RUN, index)
            except Exception as error:
                self.failure = error
                self._fail_all()
                self.engine.reset()
                continue
            index += 1
            self.metrics.step(self.engine.drain_ledger())
            for delta in deltas:
                self._hand_out(delta)

    def _hand_out(self, delta: Delta) -> None:
        client = self._clients[delta.id]
        if not client.admitted:
            client.admitted = True
            self.metrics.admitted(len(client.request.prompt), delta.cached_tokens)
        self.metrics.generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._forget(client, delta.finish_reason)
        client.put(delta)

    def _fail_all(self) -> None:
        for client in list(self._clients.values()):
            client.put(EngineFailed(f"{type(self.failure).__name__}: {self.failure}"))
            self._forget(client, "error")
