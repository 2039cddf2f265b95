"""Answers in the API's shapes: choices, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fasttrack.target import Delta

Spell = Callable[[int], str]  #: how a token is written in log-probabilities


@dataclass
class Piece:
    """Tokens with what is known of each; ``logprobs`` has None for the first token of an echoed prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Mapping[int, float] | None] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or [None] * len(delta.token_ids)
        self.top += delta.top_logprobs or [None] * len(delta.token_ids)


def completion_logprobs(piece: Piece, spell: Spell, offset: int = 0) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``text_offset`` counts from ``offset``."""
    names = [spell(t) for t in piece.tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": piece.logprobs,
        "top_logprobs": [_spelled(top, spell) if top is not None else None for top in piece.top],
        "text_offset": offsets,
    }


def _spelled(top: Mapping[int, float], spell: Spell) -> dict[str, float]:
    """By text; of tokens that are written alike (parts of characters) the most likely stays."""
    spelled: dict[str, float] = {}
    for token, value in sorted(top.items(), key=lambda item: -item[1]):
        spelled.setdefault(spell(token), value)
    return spelled


def chat_logprobs(piece: Piece, spell: Spell, alternatives: int) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        name = spell(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode())}

    content = []
    for token, value, top in zip(piece.tokens, piece.logprobs, piece.top, strict=True):
        best = list((top or {}).items())[:alternatives]
        content.append({**entry(token, value), "top_logprobs": [entry(t, v) for t, v in best]})
    return {"content": content}


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish(reason: str | None) -> str | None:
    """The API knows no "abort"."""
    return "stop" if reason == "abort" else reason


def error(message: str, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def model_card(name: str, created: int, max_context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "fasttrack",
        "max_model_len": max_context,
    }


def prompts_of(prompt: Any, encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """A completion's prompts as ids: one string, several, one list of ids, or several."""
    if isinstance(prompt, str):
        return [list(encode(prompt))]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return [list(encode(p)) if isinstance(p, str) else list(p) for p in prompt]
