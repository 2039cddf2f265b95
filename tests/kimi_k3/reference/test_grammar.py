"""Token masks of grammars: against the language itself, and rolled back and forth."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.grammar import Grammars
from kimi_k3.reference.requests import RequestError
from kimi_k3.reference.tokenizer import FIRST_SPECIAL, TextCodec

CODEC, EOS, VOCAB = TextCodec(), TINY_A.eos_token_id, TINY_A.vocab_size
GRAMMARS = Grammars(CODEC, VOCAB, EOS)
PATTERN = "[a-c]{2,3}(!|, the)"


def allowed(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def test_the_mask_of_a_regex_is_every_token_that_can_be_completed() -> None:
    language = [x + end for x in _words("abc", 2) + _words("abc", 3) for end in ("!", ", the")]
    mask = GRAMMARS({"regex": PATTERN})
    for text in ("", "a", "abc", "ab,", "cab, t"):
        expected = {
            t
            for t in range(FIRST_SPECIAL)
            if (piece := CODEC.text_bytes(t).decode("utf-8", "replace"))
            and any(word.startswith(text + piece) for word in language)
        }
        assert allowed(mask(CODEC.encode(text))) == expected
    assert allowed(mask(CODEC.encode("ab!"))) == {EOS}
    assert allowed(mask([*CODEC.encode("ab!"), EOS])) == {EOS}


def _words(letters: str, length: int) -> list[str]:
    return [w + x for w in _words(letters, length - 1) for x in letters] if length else [""]


def test_random_walks_end_in_the_language() -> None:
    rng = random.Random(0)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 22]}, "ok": {"type": "boolean"}},
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    }
    for _ in range(20):
        mask, tokens = GRAMMARS({"json_schema": schema}), list[int]()
        while not tokens or tokens[-1] != EOS:
            tokens.append(rng.choice(sorted(allowed(mask(tokens)))))
        value = json.loads(CODEC.decode(tokens[:-1]), strict=False)  # xgrammar lets control characters in
        assert set(value) == {"name", "n", "ok"}
        assert value["n"] in (1, 22)


def test_going_back_and_forth_equals_starting_anew() -> None:
    rng = random.Random(1)
    walked = GRAMMARS({"json_object": True})
    history: list[int] = []
    for _ in range(60):
        if history and rng.random() < 0.4:
            del history[rng.randrange(len(history)) :]
        else:
            fresh = GRAMMARS({"json_object": True})
            choices = sorted(allowed(fresh(history)) - {EOS}) or [EOS]
            history.append(rng.choice(choices))
        assert torch.equal(walked(history), GRAMMARS({"json_object": True})(history))


def test_special_tokens_are_no_text() -> None:
    mask = GRAMMARS({"regex": "(.|\\n)*"})
    assert allowed(mask([])) & set(range(FIRST_SPECIAL, VOCAB)) == {EOS}


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "(("}, "regex cannot be compiled: Regex parsing error"),
        ({"json_schema": {"type": "nothing"}}, 'json_schema cannot be compiled: Unsupported type "nothing"'),
        ({"json_schema": "{"}, "json_schema cannot be compiled"),
        ({}, "expected exactly one of json_schema, json_object, regex"),
        ({"regex": "a", "json_object": True}, "expected exactly one of"),
        ({"grammar": "a"}, r"\['grammar'\], expected exactly one of"),
    ],
)
def test_bad_grammars_are_one_clear_line(structured: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        GRAMMARS(structured)
    assert "\n" not in str(caught.value)
    assert re.search(r"\.cc:\d", str(caught.value)) is None
