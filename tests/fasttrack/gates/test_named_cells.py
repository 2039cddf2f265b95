"""Named cells on made-up records: exact counts pass, every count that is off is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_target import TARGET
from harness import TOY

from fasttrack.gates import GATES, Scope
from fasttrack.manifest.model import Manifest, NamedCell
from fasttrack.records import Evidence, GenerationRecord, PerformanceRecord, StepRecord
from fasttrack.target import Limits

EMULATED = Evidence(kind="emulated", device="cpu")
DSPARK = {
    "name": "published",
    "tp": 2,
    "requests": 2,
    "draft_length": 7,
    "acceptance": "synthetic(6)",
    "input_tokens": 1,
    "output_tokens": 1000,
}
PLAIN = {"name": "published", "tp": 2, "requests": 3, "input_tokens": 1, "output_tokens": 20}


def scope_of(cell: dict[str, Any], steps: int | None = None) -> Scope:
    tiers = {"smoke": {"minutes": 1, "named_steps": steps}}
    manifest = Manifest.model_validate({**TOY, "named_cells": [cell], "tiers": tiers})
    limits = Limits(tensor_parallel=(1, 2, 4), max_rows=16, draft_lengths=(0, 7))
    return Scope(manifest, "smoke", replace(TARGET.describe(), limits=limits))


def run(scope: Scope, accepted: list[int] | None = None) -> list[Any]:
    """What an exact engine records. ``accepted``: drafts that stand in each step, of every request."""
    (cell,) = scope.manifest.named_cells
    tokens, length = cell.tokens(scope.knobs.named_steps), int(cell.acceptance_length or 1)
    records: list[Any] = []
    for arm, path in (("stock", "stock"), ("optimized", "specialized")):
        common = {"unit": f"performance/named/{cell.name}", "arm": arm, "cell": cell.key, "evidence": EMULATED}
        left, counts, run_name = tokens, [1], f"performance/named/{cell.name}/{arm}/0"
        left -= 1
        while left > 0:
            counts.append(min(left, 1 + (accepted[len(counts) - 1] if accepted else length - 1)))
            left -= counts[-1]
        for index, emitted in enumerate(counts):
            prefill = index == 0
            records.append(
                StepRecord(
                    **common,
                    run=run_name,
                    index=index,
                    kind="prefill" if prefill else cell.key.step,
                    requests=cell.requests,
                    rows=cell.requests * (1 if prefill else 1 + cell.draft_length),
                    padded_rows=0,
                    draft_length=0 if prefill else cell.draft_length,
                    tp=2,
                    dcp=1,
                    context_max=9,
                    path="stock" if prefill else path,
                    reason="prefill" if prefill else None,
                    ops={},
                    emitted=emitted * cell.requests,
                    accepted=[]
                    if prefill or not cell.draft_length
                    else [accepted[index - 1] if accepted else length - 1] * cell.requests,
                )
            )
        records += [
            GenerationRecord(
                **common,
                run=run_name,
                request=f"r{i}",
                prompt_sha256="0",
                prompt_tokens=cell.input_tokens,
                token_ids=list(range(tokens)),
                finish_reason="length",
            )
            for i in range(cell.requests)
        ]
        records.append(
            PerformanceRecord(
                **common,
                metric="decode_throughput",
                unit_of_measure="tokens/s",
                value=1.0,
                per="aggregate",
                tokens=tokens - 1,
                prefill_included=False,
                step_kinds={},
                acceptance=cell.acceptance,
                clock="",
            )
        )
    return records


def judge(scope: Scope, records: list[Any]) -> Any:
    return GATES["performance.named_cells"](scope, records)


def changed(records: list[Any], of: type[Any], **update: Any) -> list[Any]:
    """The last record of class ``of`` in the optimised arm, changed."""
    at = max(i for i, r in enumerate(records) if isinstance(r, of) and r.arm == "optimized")
    return [*records[:at], records[at].model_copy(update=update), *records[at + 1 :]]


def test_a_thousand_tokens_at_acceptance_length_6_are_167_steps():
    scope = scope_of(DSPARK)
    records = run(scope)
    steps = [s for s in records if isinstance(s, StepRecord) and s.arm == "optimized" and s.kind == "verify"]
    assert len(steps) == 167
    result = judge(scope, records)
    assert result.verdict == "pass", result.reason
    (number,) = result.numbers
    assert (number.value, number.limit) == (167, "= 167")


def test_plain_cells_emit_one_token_per_step():
    scope = scope_of(PLAIN)
    assert judge(scope, run(scope)).verdict == "pass"


def test_a_capped_run_is_counted_by_its_cap():
    scope = scope_of(DSPARK, steps=8)
    assert scope.manifest.named_cells[0].tokens(8) == 49
    assert judge(scope, run(scope)).numbers[0].value == 8


@pytest.mark.parametrize(
    ("kind", "update", "word"),
    [
        (StepRecord, {"accepted": [4, 5]}, "accepted 4 drafts"),
        (StepRecord, {"accepted": []}, "accepted drafts are recorded"),
        (StepRecord, {"path": "stock"}, "1 stock"),
        (StepRecord, {"requests": 1}, "of 1 requests"),
        (StepRecord, {"kind": "decode"}, "is a decode step"),
        (GenerationRecord, {"token_ids": [1] * 999}, "1000"),
        (GenerationRecord, {"prompt_tokens": 2}, "(2, 1000)"),
        (PerformanceRecord, {"acceptance": "measured"}, "recorded as measured"),
    ],
)
def test_a_count_that_is_off_is_named(kind, update, word):
    scope = scope_of(DSPARK)
    result = judge(scope, changed(run(scope), kind, **update))
    assert result.verdict == "fail"
    assert word in result.reason


def test_one_step_more_or_one_slow_step_fails():
    scope = scope_of(DSPARK)
    slow = run(scope, accepted=[5] * 80 + [4] + [5] * 90)
    result = judge(scope, slow)
    assert result.verdict == "fail"
    fast = judge(scope, run(scope, accepted=[7] + [5] * 170))
    assert "emitted 16 tokens, not 12" in fast.reason


def test_a_fractional_length_is_held_to_its_mean():
    scope = scope_of({**DSPARK, "acceptance": "synthetic(5.5)"})
    assert judge(scope, run(scope, accepted=[4, 5] * 100)).verdict == "pass"
    assert "mean acceptance" in judge(scope, run(scope, accepted=[4] * 220)).reason
    assert "accepted 3 drafts" in judge(scope, run(scope, accepted=[4, 5] * 20 + [3] + [4, 5] * 80)).reason


def test_without_records_or_cells_nothing_is_shown():
    scope = scope_of(DSPARK)
    assert judge(scope, []).verdict == "not_run"
    one_arm = [r for r in run(scope) if r.arm == "stock"]
    assert judge(scope, one_arm).verdict == "not_run"
    assert judge(Scope(Manifest.model_validate(TOY), "smoke", TARGET.describe()), run(scope)).verdict == "not_run"


def test_measured_acceptance_is_not_held_to_a_pace():
    cell = NamedCell.model_validate({**DSPARK, "acceptance": "measured"})
    assert (cell.acceptance_length, cell.tokens(4)) == (None, 5)
    scope = scope_of({**DSPARK, "acceptance": "measured"})
    assert judge(scope, run(scope, accepted=[0, 7, 3] * 200)).verdict == "pass"
