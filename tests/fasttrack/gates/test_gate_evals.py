"""Forced logits and routing on made-up records: what passes, what fails, and what is not decided."""

import math
import random

import pytest
from harness import toy_scope

from fasttrack.gates import GATES
from fasttrack.gates.base import crossing_prompt
from fasttrack.records import (
    CellKey,
    EngineRecord,
    Evidence,
    FidelityRecord,
    NotMeasuredRecord,
    RoutingRecord,
    StepRecord,
)

PROOF = Evidence(kind="emulated")
CELL = CellKey(step="decode", tp=2, requests=4)


def unit_of(cell):
    return f"evals/fidelity/decode/tp{cell.tp}"


def step(path="specialized", cell=CELL):
    return StepRecord(
        unit=unit_of(cell),
        arm="optimized",
        evidence=PROOF,
        run="r",
        index=1,
        kind="decode",
        requests=4,
        rows=4,
        padded_rows=0,
        draft_length=0,
        tp=cell.tp,
        dcp=1,
        context_max=9,
        path=path,
        reason=None if path == "specialized" else "not_pure_decode",
        ops={},
    )


def sequences(ratio, n=16, spread=0.1, cell=CELL, exact=False, seed=1, **last):
    """Stock and optimised records whose errors have this ratio; ``last`` changes one optimised record."""
    rng, records = random.Random(seed), [step(cell=cell)]
    for i in range(n):
        base = 1e-3 * rng.lognormvariate(0, 0.3)
        for arm, error in (("stock", base), ("optimized", base * ratio * rng.lognormvariate(0, spread))):
            own = last if arm == "optimized" and i == 0 else {}
            values = {
                "kl_sum": 32 * error**2,
                "kl_max": error**2,
                "log_error_sum": 32 * math.log(error),
                "largest_error": 5 * base,
                "top1_flips": 1,
                "near_ties": 1,
                "nonfinite": 0,
                **own,
            }
            records.append(
                FidelityRecord(
                    unit=unit_of(cell),
                    arm=arm,
                    cell=cell,
                    evidence=PROOF,
                    sequence=str(i),
                    positions=32,
                    abs_error_sum=1.0,
                    abs_error_max=0.1,
                    exact=exact,
                    **{"context": 60 if i % 4 == 0 else 41, "late": i % 4 == 0, **values},
                )
            )
    return records


def fidelity(records, **scope):
    """The gate under a scope that claims what the records are about."""
    tp = sorted({r.cell.tp for r in records if isinstance(r, FidelityRecord)}) or [2]
    return GATES["evals.fidelity"](
        toy_scope(**{"scope": [{"name": "own", "tp": tp, "requests": [4]}], **scope}), records
    )


@pytest.mark.parametrize(
    ("records", "expected", "word"),
    [
        (sequences(1.0), "pass", "at most 1.1"),
        (sequences(0.2), "pass", "at most 1.1"),
        (sequences(1.3), "fail", "times stock's error"),
        (sequences(1.09, n=4, spread=0.4), "inconclusive", "bound"),
        (sequences(1.0, n=1), "inconclusive", "bound"),
        (sequences(1.0, largest_flip=1.0), "fail", "across a gap of 1 nats"),
        (sequences(1.0, largest_flip=0.001), "pass", "at most 1.1"),
        (sequences(1.0, nonfinite=2), "fail", "non-finite"),
        (sequences(1.0, kl_sum=math.inf), "fail", "times stock's error"),
        (sequences(1.0)[:-1], "inconclusive", "1 sequences in one arm only"),
    ],
)
def test_fidelity(records, expected, word):
    result = fidelity(records)
    assert result.verdict == expected, result.reason
    assert word in result.reason


def with_claims(*requests):
    return {"scope": [{"name": "own", "tp": [2], "requests": list(requests)}]}


def batch(requests, ratio=1.0, n=4, **changes):
    """A batch of other size with its step, sequences numbered apart from those of ``sequences``."""
    cell = CELL.model_copy(update={"requests": requests})
    records = [step(cell=cell).model_copy(update={"requests": requests, "rows": requests})]
    return records + [
        r.model_copy(update={"sequence": f"{requests}-{r.sequence}", **changes})
        for r in sequences(ratio, n=n, cell=cell, seed=requests)[1:]
    ]


def test_a_claimed_batch_without_a_sequence_is_no_pass():
    assert fidelity([*sequences(1.0), *batch(2)], **with_claims(2, 4)).verdict == "pass"
    for records in (sequences(1.0), [*sequences(1.0), *batch(2)[1:]], [*sequences(1.0), batch(2)[0]]):
        result = fidelity(records, **with_claims(2, 4))
        assert result.verdict == "inconclusive"
        assert "claimed batch of decode/tp2/r2" in result.reason
    numbers = {n.name: n for n in fidelity([*sequences(1.0), *batch(2)], **with_claims(2, 4)).numbers}
    assert numbers["claimed batches covered decode/short"].unit == "of 2 cells (requests 2, 4)"


def test_a_step_kind_or_precision_without_a_sequence_is_no_pass():
    verify = [{"name": "own", "tp": [2], "requests": [4]}]
    verify.append({"name": "dspark", "step": "verify", "tp": [2], "requests": [1], "draft_length": [3]})
    assert "no forced sequence of verify/short" in fidelity(sequences(1.0), scope=verify).reason
    exact = {"engine": {"kind": "embedded", "exact_options": {"precision": "high"}}}
    assert "no forced sequence of decode/short/exact" in fidelity(sequences(1.0), **exact).reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"context": 41}, "near the end of its contexts of up to 64 tokens"),
        ({"late": False}, "that took over from another request"),
        ({"context": 64, "positions": 12}, "across a cache page"),
    ],
)
def test_contexts_pages_and_successors_that_were_not_seen_are_no_pass(changes, word):
    config = {"max_context": 512, "page_size": 16}
    fields = {"evidence": PROOF, "engine": "embedded", "switch": {}, "devices": [], "checkpoint": "", "config": config}
    told = EngineRecord(unit=unit_of(CELL), arm="optimized", **fields)
    assert fidelity([told, *sequences(1.0)]).verdict == "pass"
    records = [r.model_copy(update=changes) if isinstance(r, FidelityRecord) else r for r in sequences(1.0)]
    result = fidelity([told, *records])
    assert result.verdict == "inconclusive"
    assert word in result.reason


@pytest.mark.parametrize(
    ("output_tokens", "shortest", "longest", "prompt"),
    [(13, 1, 64, 47), (5, 1, 64, None), (2, 1, 64, None), (13, 48, 64, None), (6, 1, 256, 239), (3, 1, 16, None)],
)
def test_a_page_is_crossed_where_the_far_end_has_room_for_it(output_tokens, shortest, longest, prompt):
    """Five tokens cannot both cross into the page of row 48 and end far; a bucket from 48 on begins behind it."""
    assert crossing_prompt(output_tokens, shortest, longest, page=16) == prompt


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_wrong_in_one_batch_size_alone_is_not_lost_in_the_mean(exact):
    """Two sequences of a hundred: they move the mean of all by less than the margin."""
    ratio, n = (200.0, 100) if exact else (8.0, 100)
    many, few = sequences(1.0, n=n, exact=exact), batch(2, ratio, n=2, exact=exact)
    many += [*sequences(1.0), *batch(2)] if exact else []
    result = fidelity([*many, *few], **with_claims(2, 4))
    assert result.verdict == "fail"
    assert "tp2/dl0/dcp1 2 requests" in result.reason
    assert fidelity([*many, *batch(2, n=2, exact=exact)], **with_claims(2, 4)).verdict == "pass"


@pytest.mark.parametrize(("changes", "name"), [({"context": 60}, "far contexts"), ({"late": True}, "after others")])
def test_what_is_wrong_in_far_contexts_or_after_others_alone_is_named(changes, name):
    many = [
        r.model_copy(update={"context": 41, "late": False}) if hasattr(r, "late") else r for r in sequences(1.0, n=100)
    ]
    few = [r.model_copy(update={"context": 41, "late": False, **changes}) for r in batch(4, 8.0, n=3)[1:]]
    result = fidelity([*many, *few])
    assert result.verdict == "fail"
    assert name in result.reason


def test_one_tie_in_a_small_group_is_no_breach_of_it():
    tie = batch(2, n=2, exact=True)
    worst = next(i for i, r in enumerate(tie) if r.arm == "optimized" and hasattr(r, "kl_sum"))
    tie[worst] = tie[worst].model_copy(update={"log_error_sum": tie[worst].log_error_sum + 32 * math.log(300)})
    assert fidelity([*sequences(1.0, n=60, exact=True), *tie], **with_claims(2, 4)).verdict != "fail"


def test_sound_groups_are_not_called_wrong_by_chance():
    verdicts = []
    for seed in range(40):
        parts = [sequences(1.0, n=64, spread=0.25, seed=seed)]
        for size in (1, 2, 8, 16):
            own = [
                r.model_copy(update={"sequence": f"{size}-{r.sequence}"}) if hasattr(r, "late") else r
                for r in sequences(
                    1.0,
                    n=max(2, size),
                    spread=0.25,
                    seed=1000 * size + seed,
                    cell=CELL.model_copy(update={"requests": size}),
                )
            ]
            own[0] = own[0].model_copy(update={"requests": size, "rows": size})
            parts.append(own)
        verdicts.append(fidelity([r for part in parts for r in part], **with_claims(1, 2, 4, 8, 16)).verdict)
    assert verdicts.count("pass") >= 38


def test_deployments_are_pooled_to_pass_and_looked_at_one_by_one_to_fail():
    few = {"n": 9, "spread": 0.15}
    both = [r for tp in (2, 4) for r in sequences(0.98, cell=CELL.model_copy(update={"tp": tp}), seed=tp, **few)]
    assert fidelity(both).verdict == "pass"
    assert fidelity(both[: len(both) // 2]).verdict == "inconclusive"
    broken = CELL.model_copy(update={"tp": 4})
    mixed = [*sequences(0.9, n=64), *sequences(1.4, n=8, cell=broken)]
    result = fidelity(mixed)
    assert result.verdict == "fail"
    assert "tp4" in result.reason
    assert "tp2" not in result.reason


def test_exact_arithmetic_has_its_own_margin_and_hides_behind_nothing():
    exact = sequences(1.8, exact=True)
    assert fidelity([*sequences(1.0), *exact]).verdict == "pass"
    assert fidelity([*sequences(1.0), *sequences(30.0, exact=True)]).verdict == "fail"
    assert fidelity(exact, margins={"fidelity_exact": 0.1}).verdict == "fail"


def scattered(*ratios, n=0):
    """Exact sequences with these error ratios, then ``n`` sound ones."""
    records = sequences(1.0, n=len(ratios) + n, spread=0.05, exact=True)
    for r in records:
        if isinstance(r, FidelityRecord) and r.arm == "optimized" and int(r.sequence) < len(ratios):
            own = r.log_error_sum + 32 * math.log(ratios[int(r.sequence)])
            records[records.index(r)] = r.model_copy(update={"log_error_sum": own})
    return records


def test_a_gross_breach_needs_few_sequences_and_one_tie_among_many_is_none():
    assert fidelity(scattered(20.0, 5000.0)).verdict == "fail"
    assert fidelity(scattered(1000.0)).verdict == "fail"
    assert fidelity(scattered(300.0, n=10)).verdict != "fail"
    assert fidelity(scattered(4.0, 1.0)).verdict == "inconclusive"


def test_many_sound_deployments_do_not_make_one_fail_by_chance():
    """Twenty deployments exactly at the limit: without Holm's correction about one of them would be called a breach."""
    verdicts = []
    for seed in range(40):
        records = []
        for tp in range(1, 21):
            cell = CELL.model_copy(update={"tp": tp})
            records += sequences(1.1, n=12, spread=0.1, cell=cell, seed=100 * seed + tp)
        verdicts.append(fidelity(records).verdict)
    assert verdicts.count("fail") <= 5
    assert verdicts.count("pass") <= 6


def test_a_more_accurate_arm_with_exact_stock_passes_and_a_worse_one_fails():
    floor = 0.5 * 32 * math.log(1e-15)
    equal = [
        r.model_copy(update={"kl_sum": 0.0, "log_error_sum": floor}) if isinstance(r, FidelityRecord) else r
        for r in sequences(1.0)
    ]
    assert fidelity(equal).verdict == "pass"
    worse = [
        r.model_copy(update={"log_error_sum": floor + 32.0}) if r.arm == "optimized" and hasattr(r, "kl_sum") else r
        for r in equal
    ]
    assert fidelity(worse).verdict == "fail"


def test_old_records_without_errors_per_position_are_judged_by_the_whole_sequence():
    def old(ratio):
        return [
            r.model_copy(update={"log_error_sum": None}) if isinstance(r, FidelityRecord) else r
            for r in sequences(ratio)
        ]

    assert fidelity(old(1.0)).verdict == "pass"
    assert fidelity(old(1.3)).verdict == "fail"


def test_stock_steps_say_nothing_about_the_optimised_path():
    for steps in ([], [step("stock")]):
        result = fidelity([*steps, *sequences(1.0)[1:]])
        assert result.verdict == "inconclusive"
        assert "step" in result.reason


def test_an_engine_that_cannot_is_quoted():
    said = NotMeasuredRecord(unit="u", evidence=PROOF, what="fidelity", reason="vLLM returns no full log-probabilities")
    result = fidelity([said])
    assert result.verdict == "not_run"
    assert "vLLM returns no full" in result.reason


def choices(stock, optimized, n=16, exact=False, cell=CELL):
    """Routing records with so many sets per sequence unlike the oracle's, of 100."""
    records = [step(cell=cell)]
    for i in range(n):
        for arm, own in (("stock", stock), ("optimized", optimized)):
            differ = own(i) if callable(own) else own
            records.append(
                RoutingRecord(
                    unit=unit_of(cell),
                    arm=arm,
                    cell=cell,
                    evidence=PROOF,
                    sequence=str(i),
                    choices=100,
                    sets_differ=differ,
                    experts_differ=differ,
                    experts=8,
                    layers={3: differ} if differ else {},
                    exact=exact,
                )
            )
    return records


@pytest.mark.parametrize(
    ("records", "expected", "word"),
    [
        (choices(20, 20), "pass", "1.25"),
        (choices(20, 2), "pass", "1.25"),
        (choices(20, 40), "fail", "640 of 1600"),
        (choices(0, 0, exact=True), "pass", "1.25"),
        (choices(0, 1, exact=True), "fail", "16 of 1600"),
        (choices(0, lambda i: int(i == 0), n=40, exact=True), "pass", "1.25"),
        (choices(0, lambda i: int(i == 0), exact=True), "inconclusive", "1 of 1600"),
        (choices(lambda i: i % 7, lambda i: (i + 3) % 7, n=6), "inconclusive", "unlike the oracle's"),
        (choices(20, 20)[:-1], "inconclusive", "one arm only"),
        (choices(20, 20)[1:], "inconclusive", "no step"),
        ([], "not_run", "tells no chosen experts"),
    ],
)
def test_routing(records, expected, word):
    result = GATES["evals.routing"](toy_scope(), records)
    assert result.verdict == expected, result.reason
    assert word in result.reason


def test_routing_names_the_layer():
    result = GATES["evals.routing"](toy_scope(), choices(20, 40))
    assert "most in layer 3" in result.numbers[0].unit
