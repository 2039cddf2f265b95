"""A request's output as it grows: what each step added, in text that will not be taken back."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from kimi_k3.reference.requests import RequestState


@dataclass(frozen=True)
class Delta:
    """What was added since the last one. ``text`` may lag behind ``token_ids``: bytes of an unfinished character and
    beginnings of a stop string are held back until it is clear what they are."""

    id: str
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    cached_tokens: int


class Stream:
    """Reads one request's state after each step that gave it tokens."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self._tokens = self._bytes = 0
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop.encode() for stop in state.request.sampling.stop]

    def take(self) -> Delta:
        state, first = self.state, self._tokens
        finished = state.finish_reason is not None
        end = len(state.output_bytes) - (0 if finished else self._held_back())
        text = self._decoder.decode(bytes(state.output_bytes[self._bytes : end]), final=finished)
        self._bytes, self._tokens = max(self._bytes, end), state.emitted
        scored = state.wants_logprobs
        return Delta(
            state.request.id,
            state.output[first:],
            text,
            state.logprobs[first:] if scored else None,
            state.top_logprobs[first:] if state.request.sampling.logprobs is not None else None,
            state.finish_reason,
            state.cached_tokens,
        )

    def _held_back(self) -> int:
        """Bytes at the end that are the beginning of a stop string."""
        text, longest = self.state.output_bytes, 0
        for stop in self._stops:
            for count in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:count]):
                    longest = count
                    break
        return longest
