"""Isolation gates on a real run of the toy target, and on that run with one thing changed."""

from dataclasses import replace

import pytest
from harness import toy_scope as make_scope

from fasttrack.gates import GATES
from fasttrack.records import (
    GenerationRecord,
    OffStateRecord,
    RefusalRecord,
    StepRecord,
    TraceRecord,
)

ISOLATION = [name for name in GATES if name.startswith("isolation.")]


def change(records, kind, update, where=lambda r: True, most=1):
    """A copy of ``records`` in which the first ``most`` records of ``kind`` that fit have other fields."""
    left, changed = most, []
    for record in records:
        if left and isinstance(record, kind) and where(record):
            left -= 1
            fields = update(record) if callable(update) else update
            record = record.model_copy(update=fields)
        changed.append(record)
    assert left < most, "nothing was changed"
    return changed


def verdict(gate, scope, records):
    result = GATES[f"isolation.{gate}"](scope, records)
    return result.verdict, result.reason


@pytest.mark.parametrize("name", ISOLATION)
def test_an_honest_run_passes(name, toy_scope, toy_records):
    result = GATES[name](toy_scope, toy_records["isolation"])
    assert result.verdict == "pass", result.reason
    assert result.numbers


def specialised(record):
    return record.path == "specialized" and record.unit.startswith("isolation/cell")


def test_one_stock_step_in_scope_fails_and_is_named(toy_scope, toy_records):
    records = change(toy_records["isolation"], StepRecord, {"path": "stock", "reason": "not_pure_decode"}, specialised)
    got, reason = verdict("scope_coverage", toy_scope, records)
    assert got == "fail"
    assert "decode/tp1/r1" in reason
    assert "not_pure_decode" in reason


def test_a_cell_that_no_step_hit_exactly_is_not_covered(toy_scope, toy_records):
    records = [
        r.model_copy(update={"rows": r.rows + 1}) if isinstance(r, StepRecord) and r.requests == 16 else r
        for r in toy_records["isolation"]
    ]
    got, reason = verdict("scope_coverage", toy_scope, records)
    assert got == "inconclusive"
    assert "decode/tp1/r16" in reason


def test_a_cell_refused_at_start_fails(toy_scope, toy_records):
    refusal = next(r for r in toy_records["isolation"] if isinstance(r, RefusalRecord))
    refusal = refusal.model_copy(update={"unit": "isolation/cell/decode/tp1/r1/dl0/dcp1/short", "reasons": ["no GPU"]})
    got, reason = verdict("scope_coverage", toy_scope, [*toy_records["isolation"], refusal])
    assert got == "fail"
    assert "no GPU" in reason


def in_probe(name):
    return lambda r: r.unit == f"isolation/probe/{name}" and getattr(r, "kind", "") != "prefill"


@pytest.mark.parametrize(
    ("kind", "update", "where", "word"),
    [
        (StepRecord, {"path": "specialized", "reason": None}, in_probe("m17"), "m17"),
        (StepRecord, {"reason": "not_pure_decode"}, in_probe("m17"), "not_pure_decode"),
        (RefusalRecord, {"refused": False, "reasons": []}, in_probe("tp3"), "tp3"),
        (StepRecord, {"path": "specialized", "kind": "mixed"}, specialised, "mixed"),
    ],
)
def test_probes_fail_when_something_outside_runs_specialised(kind, update, where, word, toy_scope, toy_records):
    got, reason = verdict("probes", toy_scope, change(toy_records["isolation"], kind, update, where))
    assert got == "fail"
    assert word in reason


def test_probes_want_the_path_back_after_a_mixed_step(toy_scope, toy_records):
    run = [r for r in toy_records["isolation"] if isinstance(r, StepRecord) and r.unit == "isolation/probe/mixed"]
    mixed = next(s.index for s in run if s.kind == "mixed")
    dropped = {id(s) for s in run if s.index > mixed}
    got, reason = verdict("probes", toy_scope, [r for r in toy_records["isolation"] if id(r) not in dropped])
    assert got == "fail"
    assert "after the mixed one" in reason


@pytest.mark.parametrize("name", ["m17", "prefill", "mixed", "tp3"])
def test_a_probe_that_was_not_observed_is_no_pass(name, toy_scope, toy_records):
    records = [r for r in toy_records["isolation"] if r.unit != f"isolation/probe/{name}"]
    got, reason = verdict("probes", toy_scope, records)
    assert got == "inconclusive"
    assert name in reason


def traced(path):
    return lambda r: isinstance(r, TraceRecord) and bool(r.ops) == (path == "specialized")


@pytest.mark.parametrize(
    ("kind", "update", "where", "word"),
    [
        (TraceRecord, {"ops": {}}, traced("specialized"), "saw no target op"),
        (
            TraceRecord,
            {"ops": {"toy::head": 1, "toy::update": 2}},
            traced("specialized"),
            "toy::update 1 in the ledger",
        ),
        (TraceRecord, {"ops": {"toy::head": 1}}, traced("stock"), "is stock in the ledger"),
        (
            StepRecord,
            {"ops": {"toy::hidden": 1}},
            lambda r: r.path == "specialized",
            "ran toy::hidden, which the target does not describe",
        ),
        (TraceRecord, {"index": 99}, traced("stock"), "not in the ledger"),
    ],
)
def test_witnesses_that_disagree_fail(kind, update, where, word, toy_scope, toy_records):
    got, reason = verdict("witnesses", toy_scope, change(toy_records["isolation"], kind, update, where))
    assert got == "fail"
    assert word in reason


def test_witnesses_want_a_profiled_step_of_every_cell_and_probe(toy_scope, toy_records):
    for unit in ("isolation/cell/decode/tp2/r4/dl0/dcp1/short", "isolation/probe/mixed"):
        kept = [r for r in toy_records["isolation"] if not (isinstance(r, TraceRecord) and r.unit == unit)]
        assert verdict("witnesses", toy_scope, kept)[0] == "inconclusive"


def test_a_step_that_changes_what_nobody_owns_fails(toy_scope, toy_records):
    records = toy_records["isolation"]
    counted = [r.model_copy(update={"unowned_changed": 0}) if isinstance(r, StepRecord) else r for r in records]
    result = GATES["isolation.witnesses"](toy_scope, counted)
    assert result.verdict == "pass"
    assert "no step changed state that nobody owns" in result.reason
    stray = change(counted, StepRecord, {"unowned_changed": 3}, lambda r: r.unit.startswith("isolation/probe"))
    got, reason = verdict("witnesses", toy_scope, stray)
    assert got == "fail"
    assert "changed 3 cache rows or state slots that none of its requests owns" in reason
    deaf = change(counted, StepRecord, {"unowned_changed": None}, lambda r: specialised(r) and _is_traced(r, records))
    got, reason = verdict("witnesses", toy_scope, deaf)
    assert got == "inconclusive"
    assert "state not counted" in reason


def test_an_engine_that_can_count_state_must(toy_scope, toy_records):
    records = toy_records["isolation"]
    assert verdict("witnesses", toy_scope, records)[0] == "pass"  # the toy engine cannot
    kind = toy_scope.manifest.engine.kind
    able = replace(toy_scope, description=replace(toy_scope.description, counts_state=(kind,)))
    got, reason = verdict("witnesses", able, records)
    assert got == "inconclusive"
    assert "state not counted" in reason


@pytest.mark.parametrize(
    ("update", "word"),
    [
        (lambda r: {"slots": [0, *r.slots[1:]]}, "wrote the null slot"),
        (lambda r: {"slots": [r.slots[0]] * len(r.slots)}, "wrote a state slot twice"),
        (lambda r: {"slots": r.slots[1:]}, "wrote 15 state slots for 16 requests with 16 rows"),
        (lambda r: {"slots": []}, "wrote 0 state slots for 16 requests"),
        (
            lambda r: {"providers": {**r.providers, "toy::head": "elsewhere"}},
            "toy::head served by elsewhere, not torch",
        ),
        (lambda r: {"providers": {}}, "served by nobody"),
    ],
)
def test_a_ledger_that_contradicts_itself_fails(update, word, toy_scope, toy_records):
    def large(r):
        return specialised(r) and r.requests == 16

    got, reason = verdict("witnesses", toy_scope, change(toy_records["isolation"], StepRecord, update, large))
    assert got == "fail"
    assert word in reason


def test_an_op_that_changes_hands_within_a_unit_fails_where_providers_are_not_told(toy_scope, toy_records):
    quiet = replace(toy_scope, description=replace(toy_scope.description, providers=()))
    records = change(
        toy_records["isolation"], StepRecord, {"providers": {"toy::head": "a", "toy::update": "b"}}, specialised
    )
    assert "served by torch, before by a" in verdict("witnesses", quiet, records)[1]
    silent = [r.model_copy(update={"slots": [], "providers": {}}) if isinstance(r, StepRecord) else r for r in records]
    assert verdict("witnesses", quiet, silent)[0] == "pass", "an engine may keep a shorter ledger"


def test_gpu_steps_are_judged_by_kernels(toy_scope, toy_records):
    """A replayed graph calls no op on the CPU; its kernels are launched all the same."""
    records = []
    for record in toy_records["isolation"]:
        if isinstance(record, TraceRecord) and record.ops:
            kernel = record.model_copy(update={"ops": {"toy_": 2}, "source": "torch.profiler/cuda"})
            records += [record.model_copy(update={"ops": {}}), kernel]
        else:
            records.append(record)
    assert verdict("witnesses", toy_scope, records)[0] == "pass"
    blind = [r for r in records if getattr(r, "source", "") != "torch.profiler/cuda"]
    assert verdict("witnesses", toy_scope, blind)[0] == "fail"
    counted = change(
        records,
        StepRecord,
        lambda r: {"ops": {**r.ops, "toy_": 3}},
        lambda r: specialised(r) and _is_traced(r, records),
    )
    assert "toy_ 3 in the ledger, 2 in the trace" in verdict("witnesses", toy_scope, counted)[1]


def _is_traced(step, records):
    return any(isinstance(r, TraceRecord) and (r.run, r.index) == (step.run, step.index) for r in records)


def test_ranks_that_diverge_or_say_nothing_fail(toy_scope, toy_records):
    def two(r):
        return r.tp == 2 and specialised(r)

    records = toy_records["isolation"]
    apart = change(records, StepRecord, lambda r: {"rank_hashes": [r.rank_hashes[0], "other"]}, two)
    assert verdict("rank_agreement", toy_scope, apart)[0] == "fail"
    silent = change(records, StepRecord, lambda r: {"rank_hashes": r.rank_hashes[:1]}, two)
    assert verdict("rank_agreement", toy_scope, silent)[0] == "fail"
    constant = [r.model_copy(update={"rank_hashes": ["0"] * r.tp}) if isinstance(r, StepRecord) else r for r in records]
    assert verdict("rank_agreement", toy_scope, constant)[0] == "inconclusive"


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"modules_loaded": ["fake_target.fast"]}, "fake_target.fast"),
        ({"outputs_sha256": "0" * 64}, "Outputs change"),
        ({"environment_added": ["TOY_FAST"]}, "TOY_FAST"),
        ({"files_opened": ["fake_target.fast (fast.py)"]}, "Opened with the switch off: fake_target.fast"),
    ],
)
def test_off_that_is_not_off_fails(update, word, toy_scope, toy_records):
    got, reason = verdict("off_is_off", toy_scope, change(toy_records["isolation"], OffStateRecord, update))
    assert got == "fail"
    assert word in reason


def test_one_process_alone_proves_nothing(toy_scope, toy_records):
    records = [r for r in toy_records["isolation"] if getattr(r, "checkout", "") != "complete"]
    assert verdict("off_is_off", toy_scope, records)[0] == "inconclusive"
    empty = [r.model_copy(update={"outputs": 0}) if isinstance(r, OffStateRecord) else r for r in records]
    assert verdict("off_is_off", toy_scope, empty)[0] == "inconclusive"


def test_stock_in_the_process_of_the_run_must_be_what_it_is_elsewhere(toy_scope, toy_records):
    def here(r):
        return r.checkout == "this-process"

    records = toy_records["isolation"]
    changed = change(records, OffStateRecord, {"outputs_sha256": "0" * 64}, here)
    got, reason = verdict("off_is_off", toy_scope, changed)
    assert got == "fail"
    assert "in the process that has run the optimised path" in reason
    without = [r for r in records if not (isinstance(r, OffStateRecord) and here(r))]
    assert verdict("off_is_off", toy_scope, without)[0] == "inconclusive"
    idle = [r for r in records if not (isinstance(r, StepRecord) and r.unit == "isolation/off_state")]
    got, reason = verdict("off_is_off", toy_scope, idle)
    assert got == "inconclusive", "the optimised path never ran there"
    withheld = change(records, OffStateRecord, {"environment_withheld": ["TOY_MODE"]})
    assert any(n.unit == "TOY_MODE" for n in GATES["isolation.off_is_off"](toy_scope, withheld).numbers)


def test_stock_that_differs_from_itself_fails(toy_scope, toy_records):
    for update in (lambda r: {"token_ids": [*r.token_ids[:-1], 1]}, lambda r: {"logprobs": [*r.logprobs[:-1], -9.0]}):
        got, reason = verdict("a_a", toy_scope, change(toy_records["isolation"], GenerationRecord, update))
        assert got == "fail"
        assert "request r0" in reason


def test_equal_constants_are_no_evidence(toy_scope, toy_records):
    records = [
        r.model_copy(update={"token_ids": [5] * len(r.token_ids)}) if isinstance(r, GenerationRecord) else r
        for r in toy_records["isolation"]
    ]
    assert verdict("a_a", toy_scope, records)[0] == "inconclusive"


def test_a_refusal_that_hides_reasons_fails(toy_scope, toy_records):
    def combined(r):
        return r.unit == "isolation/refusals" and r.deployment["violations"] == 2

    records = toy_records["isolation"]
    hidden = change(records, RefusalRecord, lambda r: {"reasons": r.reasons[:1]}, combined)
    assert "gave 1 of 2 reasons" in verdict("refusals", toy_scope, hidden)[1]
    started = change(records, RefusalRecord, {"refused": False, "reasons": []}, combined)
    assert verdict("refusals", toy_scope, started)[0] == "fail"


def test_no_probes_is_not_a_pass(toy_records):
    assert verdict("probes", make_scope(probes=[]), toy_records["isolation"])[0] == "not_run"
