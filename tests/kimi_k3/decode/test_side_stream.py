"""The side stream of a step: behind what was launched before it, joined once at the end. Streams are stand-ins here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_steps import Requests, model, prompts

CPU = torch.device("cpu")


class Streams:
    """A main stream and those that are made; ``log``: who waits for whom, and what runs where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        streams = self

        class Stream:
            device = CPU

            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                streams.log.append((self.name, "waits for", other.name))

        self.current = self.main = Stream(name="main")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, self.current = self.current, chosen
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", stream)


FORK, JOIN, WALK = ("side", "waits for", "main"), ("main", "waits for", "side"), ("side", "walks")


@pytest.mark.parametrize(("requests", "points"), [(2, True), (16, False)])
def test_a_step_joins_its_prefetches_once_and_last(
    requests: int, points: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Requests(model(), requests)
    first = given.prefill(prompts(requests))
    executor = given.executor(8)
    streams = Streams(monkeypatch)

    def prefetch(context: Any, point: str, weights: list[torch.Tensor]) -> None:
        with context.beside(CPU):
            streams.log.append((streams.current.name, "walks"))

    chosen = executor.context.providers
    chosen["prefetch"] = replace(chosen["prefetch"], run=prefetch)
    for _ in range(2):
        streams.log.clear()
        batch = given.batch([[token] for token in first])
        plan = executor.plan(batch)
        assert plan.specialized
        executor.run(plan, batch)
        walks = streams.log.count(WALK)
        assert (walks > 1) == points
        assert streams.log == [FORK, WALK] * walks + [JOIN] * points
    assert streams.current is streams.main
