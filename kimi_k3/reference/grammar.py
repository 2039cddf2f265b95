"""Structured output: JSON schemas and regular expressions as token masks, with xgrammar (as vLLM's default)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k3.reference.requests import RequestError, TokenMask
from kimi_k3.reference.tokenizer import TextCodec

KINDS = ("json_schema", "json_object", "regex")
_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  #: time and C++ source line in front of the library's messages


class GrammarMask:
    """Which tokens may follow, for one request. Keeps the matcher at the last history it was asked about: a verify
    step asks row by row, and the next step begins by rolling back what was rejected."""

    def __init__(self, matcher: Any, vocab_size: int, eos: int) -> None:
        self.matcher, self.vocab_size, self.eos = matcher, vocab_size, eos
        self.accepted: list[int] = []
        self.bits = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """bool [vocab] after ``tokens``, all of which must have been allowed. Once complete: the end token only."""
        self._move(list(tokens))
        if self.matcher.is_terminated():
            allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
            allowed[self.eos] = True
            return allowed
        self.matcher.fill_next_token_bitmask(self.bits)
        words = self.bits[0].unsqueeze(-1)
        return ((words >> torch.arange(32)) & 1).bool().flatten()[: self.vocab_size]

    def _move(self, tokens: list[int]) -> None:
        common = 0
        while common < min(len(tokens), len(self.accepted)) and tokens[common] == self.accepted[common]:
            common += 1
        if common < len(self.accepted):
            self.matcher.rollback(len(self.accepted) - common)
            del self.accepted[common:]
        for token in tokens[common:]:
            if self.matcher.is_terminated():
                return  # end tokens after the end
            if not self.matcher.accept_token(token):
                raise ValueError(f"token {token} does not follow {self.accepted} in this grammar")
            self.accepted.append(token)


class Grammars:
    """Compiles what requests ask for; equal requests share a compiled grammar.

    JSON comes out compact, without whitespace between tokens, so that a finite schema has a finite output.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, eos: int) -> None:
        self.codec, self.vocab_size, self.eos = codec, vocab_size, eos
        self._compiler: Any = None
        self._compiled: dict[str, Any] = {}

    def __call__(self, structured: Mapping[str, Any]) -> TokenMask:
        """``structured``: one of :data:`KINDS`. :class:`RequestError` says what is wrong with it."""
        import xgrammar

        asked = [kind for kind in KINDS if structured.get(kind)]
        if len(asked) != 1 or len(structured) != 1:
            raise RequestError(f"structured output {sorted(structured)}, expected exactly one of {', '.join(KINDS)}")
        key = json.dumps(dict(structured), sort_keys=True)
        if key not in self._compiled:
            try:
                self._compiled[key] = self._compile(asked[0], structured[asked[0]])
            except Exception as error:  # the library raises its own kinds, RuntimeError among them
                first = _SOURCE.sub("", (str(error).strip().splitlines() or [type(error).__name__])[0])
                raise RequestError(f"structured output: {asked[0]} cannot be compiled: {first}") from None
        return GrammarMask(xgrammar.GrammarMatcher(self._compiled[key]), self.vocab_size, self.eos)

    def _compile(self, kind: str, value: Any) -> Any:
        import xgrammar

        if self._compiler is None:
            # Special and reserved tokens are no text: an empty spelling keeps them out of every grammar.
            texts = [self.codec.text_bytes(i) for i in range(self.codec.vocab_size)]
            info = xgrammar.TokenizerInfo(texts, vocab_size=self.vocab_size, stop_token_ids=[self.eos])
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        if kind == "regex":
            return self._compiler.compile_regex(value)
        schema = {"type": "object"} if kind == "json_object" else value
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self._compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"))
