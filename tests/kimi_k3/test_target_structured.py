"""Structured output through both paths, plain and with drafts."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from fasttrack.errors import UsageError
from fasttrack.target import Completion, EngineSpec, Request, Sampling
from kimi_k3 import names
from kimi_k3.target import TARGET

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
PATTERN = r"[a-z]{3,8}(-[0-9]{2}){1,3}\."


def build(arm: str, draft_length: int, **options: Any) -> Any:
    switch = names.SWITCH_ON if arm == "optimized" else names.SWITCH_OFF
    options = {"precision": "fp64", "drafter": "rehearsal", "max_context": 256, **options}
    return TARGET.engine(
        EngineSpec("embedded", arm, switch, tp=8, draft_length=draft_length, max_requests=4, options=options)
    )


def requests(temperature: float = 0.0) -> list[Request]:
    kinds: list[dict[str, Any] | None] = [{"json_schema": SCHEMA}, {"regex": PATTERN}, None, {"json_schema": SCHEMA}]
    return [
        Request(f"r{i}", tuple(range(i, 3 * i + 4)), 60, Sampling(temperature=temperature, seed=i, structured=kind))
        for i, kind in enumerate(kinds)
    ]


def check(done: list[Completion]) -> None:
    for index in (0, 3):
        assert done[index].finish_reason == "stop"
        value = json.loads(done[index].text, strict=False)  # xgrammar lets control characters into short strings
        assert list(value) == ["name", "count", "kind"]
        assert value["kind"] in ("red", "green")
        assert 0 <= value["count"] <= 999
    assert re.fullmatch(PATTERN, done[1].text)


@cache
def plain() -> list[list[int]]:
    done = build("stock", 0).generate(requests(), run="x")
    check(done)
    return [c.token_ids for c in done]


@pytest.mark.parametrize("arm", ["stock", "optimized"])
@pytest.mark.parametrize(("draft_length", "drafter"), [(0, ""), (3, "rehearsal"), (7, "rehearsal"), (7, "random")])
def test_greedy_outputs_obey_and_do_not_depend_on_path_or_drafts(arm: str, draft_length: int, drafter: str) -> None:
    engine = build(arm, draft_length, drafter=drafter)
    done = engine.generate(requests(), run="x")
    check(done)
    assert [c.token_ids for c in done] == plain()
    steps = [s for s in engine.drain_ledger() if s.kind not in ("prefill", "mixed")]
    assert {s.path for s in steps} == {"specialized" if arm == "optimized" else "stock"}
    if drafter == "rehearsal":  # it follows the grammar as a trained drafter would: most drafts stand
        assert sum(sum(s.accepted) for s in steps) > sum(len(c.token_ids) for c in done) / 2


def test_drafts_that_the_grammar_allows_and_the_model_does_not_want_are_rolled_back() -> None:
    engine = build("optimized", 3, drafter_hit_rate=1)
    propose, spoiled = engine.engine.drafter.propose, [0]

    def other(states: Any) -> Any:
        found = propose(states)
        for state, draft in zip(states, found, strict=True):
            structured = state.request.sampling.structured
            if structured is None:
                continue
            for place in range(len(draft.tokens)):  # the first draft with an alternative takes it
                choices = engine.engine.grammar(structured)([*state.output, *draft.tokens[:place]])
                choices[draft.tokens[place]] = False
                if choices.any():
                    draft.tokens[place] = int(choices.nonzero()[0])
                    spoiled[0] += 1
                    break
        return found

    engine.engine.drafter.propose = other
    assert [c.token_ids for c in engine.generate(requests(), run="x")] == plain()
    assert spoiled[0] > 10


@pytest.mark.parametrize("draft_length", [0, 5])
def test_sampled_outputs_obey(draft_length: int) -> None:
    for rejection in ("standard", "block"):
        check(build("optimized", draft_length, rejection=rejection).generate(requests(1.0), run="x"))


def test_synthetic_acceptance_does_not_accept_what_is_forbidden() -> None:
    spec = EngineSpec(
        "embedded",
        "optimized",
        names.SWITCH_ON,
        tp=8,
        draft_length=7,
        max_requests=4,
        acceptance="synthetic(8)",
        options={"precision": "fp64", "max_context": 256},
    )
    check(TARGET.engine(spec).generate(requests(), run="x"))


def test_a_grammar_that_cannot_be_compiled_names_the_request() -> None:
    with pytest.raises(UsageError, match="request 'a': structured output: regex cannot be compiled"):
        build("stock", 0).generate([Request("a", (1,), 4, Sampling(structured={"regex": "(("}))], run="x")
