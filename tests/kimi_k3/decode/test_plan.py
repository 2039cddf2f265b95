"""plan(): the truth table of reasons, prepared sizes, and that nothing rank-specific can enter it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kimi_k3.decode.plan import BASE_ROWS, PlanLimits, StepFacts, kv_splits, plan_step, prepared_rows
from kimi_k3.names import DRAFT_LENGTHS, FALLBACK_REASONS, MAX_ROWS, REASON_SWITCH_OFF

LIMITS = PlanLimits(tp=8, draft_length=7, max_context=100)


def facts(requests: int, drafts: int = 0, context: int = 10, prefill: bool = False) -> StepFacts:
    return StepFacts((1 + drafts,) * requests, (context,) * requests, (prefill,) * requests, (drafts,) * requests)


def mixed(first: StepFacts, second: StepFacts) -> StepFacts:
    return StepFacts(*(getattr(first, f.name) + getattr(second, f.name) for f in fields(StepFacts)))


FALLBACKS = {
    "empty": (facts(0), LIMITS),
    "prefill": (facts(2, prefill=True), LIMITS),
    "mixed": (mixed(facts(1), facts(1, prefill=True)), LIMITS),
    "non_uniform_drafts": (mixed(facts(1, 3), facts(1, 4)), LIMITS),
    "draft_length_unsupported": (facts(1, 2), LIMITS),
    "too_many_rows": (facts(65), LIMITS),
    "unprepared_rows": (facts(5), replace(LIMITS, prepared=(1, 2, 4))),
    "context_too_long": (facts(1, 0, context=100), LIMITS),
}


def test_every_named_reason_is_in_the_table() -> None:
    assert set(FALLBACKS) == set(FALLBACK_REASONS) - {REASON_SWITCH_OFF}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_a_declined_step_says_why(reason: str) -> None:
    plan = plan_step(*FALLBACKS[reason])
    assert (plan.path, plan.reason, plan.specialized) == ("stock", reason, False)
    assert plan.padded_rows == plan.rows


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts(1, 8), "draft_length_unsupported"),
        (facts(64, 7), "too_many_rows"),
        (facts(64), None),
        (facts(8, 7), None),
        (facts(9, 7), "too_many_rows"),
        (facts(1, 7, context=92), None),
        (facts(1, 7, context=93), "context_too_long"),
        (facts(1, context=0), "prefill"),  # nothing cached: there is no state to continue
        (mixed(facts(1, 0), facts(1, 7)), "non_uniform_drafts"),
        (replace(facts(2), query_lens=(1, 2)), "non_uniform_drafts"),
    ],
)
def test_edges(given: StepFacts, reason: str | None) -> None:
    assert plan_step(given, LIMITS).reason == reason


def test_more_drafts_than_state_slots_are_declined() -> None:
    assert plan_step(facts(1, 5), replace(LIMITS, draft_length=4)).reason == "draft_length_unsupported"


@pytest.mark.parametrize("query_len", [1 + d for d in DRAFT_LENGTHS])
def test_every_whole_number_of_requests_up_to_64_rows_is_served(query_len: int) -> None:
    sizes = prepared_rows(query_len)
    assert all(m % query_len == 0 and m <= MAX_ROWS for m in sizes)
    for requests in range(1, MAX_ROWS // query_len + 1):
        plan = plan_step(facts(requests, query_len - 1), LIMITS)
        assert plan.specialized
        assert plan.padded_rows == min(m for m in sizes if m >= requests * query_len)
        assert plan.padded_requests * query_len == plan.padded_rows
        assert plan.query_len == query_len


def test_plain_steps_are_padded_to_the_prepared_sizes() -> None:
    padded = {requests: plan_step(facts(requests), LIMITS).padded_rows for requests in range(1, 65)}
    assert padded == {n: next(m for m in BASE_ROWS if m >= n) for n in range(1, 65)}


def test_two_phases_from_16_rows_on() -> None:
    assert [plan_step(facts(n), LIMITS).two_phase for n in (8, 9, 64)] == [False, True, True]


def test_splits_depend_on_batch_and_deployment_but_not_on_the_contexts_of_the_step() -> None:
    plans = [plan_step(facts(4, context=c), LIMITS) for c in (1, 90)]
    assert plans[0].kv_splits == plans[1].kv_splits
    long = replace(LIMITS, max_context=8192)
    assert (kv_splits(1, long), kv_splits(64, long)) == (32, 3)


def test_the_digest_covers_every_field() -> None:
    plan = plan_step(facts(3), LIMITS)
    changed = {"path": "x", "reason": "x", "kind": "x", "two_phase": True}
    for f in fields(plan):
        other = replace(plan, **{f.name: changed.get(f.name, 999)})
        assert other.digest() != plan.digest(), f.name
    assert plan_step(facts(3), LIMITS).digest() == plan.digest()


def test_facts_hold_nothing_that_could_differ_between_ranks() -> None:
    """Every field is a host-side tuple; tensors, and so anything computed on a rank, cannot get in."""
    assert {f.name: f.type for f in fields(StepFacts)} == {
        "query_lens": "tuple[int, ...]",
        "context_lens": "tuple[int, ...]",
        "prefill": "tuple[bool, ...]",
        "drafts": "tuple[int, ...]",
    }
