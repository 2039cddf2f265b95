"""The executor against the stock path: hidden states, caches, padding, verify, changes of path, the ledger."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_steps import (
    PAGE,
    Requests,
    all_tensors,
    model,
    prompts,
    same_bits,
    specialized,
    spoiled_after,
    spoiled_before,
    stock,
    worst,
)
from torch import Tensor

from kimi_k3.decode.deployment import UnsupportedDeployment
from kimi_k3.decode.executor import Executor
from kimi_k3.decode.ledger import rank_hashes
from kimi_k3.decode.mesh import MissingPublication
from kimi_k3.decode.registry import Provider
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import FP8, Precision

TP = [1, 2, 8, 16]


@pytest.mark.parametrize("preset", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("requests", [1, 5, 19])
def test_hidden_states_and_caches_equal_the_stock_path_in_fp64(preset: str, tp: int, requests: int) -> None:
    run = Requests(model("fp64", preset), requests)
    first = run.prefill(prompts(requests))
    other = run.fork()
    executor = other.executor(tp, debug=True)
    for token_shift in range(3):
        batch = run.batch([[(t + token_shift) % 500] for t in first])
        expected = run.model.forward(batch, run.caches)
        found = executor.run(executor.plan(batch), batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        run.accept([1] * requests)
        assert executor.boxes.check_armed() == []
        assert executor.last_step is not None
        assert executor.last_step.ranks_agree
    assert worst(run.caches, other.caches) < 1e-11


@pytest.mark.parametrize("draft_length", [3, 7])
@pytest.mark.parametrize("tp", [1, 8])
def test_verify_steps_with_every_number_of_accepted_tokens(draft_length: int, tp: int) -> None:
    """Native slots: the next step starts from the state and taps of the last accepted row, whichever it was."""
    query_len = 1 + draft_length
    run = Requests(model(), query_len, draft_length=draft_length, max_tokens=64)
    run.prefill(prompts(query_len))
    other = run.fork()
    executor = other.executor(tp)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        # A step without drafts must honour the accepted count as well.
        width = 1 if step == 1 else query_len
        batch = run.batch(torch.randint(0, 500, (query_len, width), generator=generator).tolist())
        plan = executor.plan(batch)
        assert plan.specialized, plan.reason
        expected = run.model.forward(batch, run.caches)
        torch.testing.assert_close(executor.run(plan, batch), expected, rtol=0, atol=1e-11)
        run.accept([1 + (r + step) % width for r in range(query_len)])
    assert worst(run.caches, other.caches) < 1e-11


def test_stock_and_specialised_steps_may_alternate() -> None:
    """Only the caches carry information between steps, in the stock layout."""
    run = Requests(model(), 5)
    first = run.prefill(prompts(5))
    twin, switching = run.fork(), run.fork()
    expected = run.decode(first, 12, stock(run))
    executors = [switching.executor(tp) for tp in (8, 16)]
    steps = iter(range(100))

    def alternate(batch: Any) -> Tensor:
        which = next(steps) % 3
        return stock(switching)(batch) if which == 2 else specialized(executors[which])(batch)

    assert switching.decode(first, 12, alternate) == expected
    assert twin.decode(first, 12, specialized(twin.executor(1))) == expected


@pytest.mark.parametrize(("requests", "draft_length"), [(5, 0), (9, 0), (33, 0), (3, 3), (5, 7)])
def test_padding_rows_write_nothing(requests: int, draft_length: int) -> None:
    """Everything but the live requests' own slots and rows keeps its bits, NaN in unused memory included."""
    run = Requests(model("bf16"), requests, draft_length=draft_length)
    first = run.prefill(prompts(requests))
    executor = run.executor(8)
    before = copy.deepcopy(run.caches)
    batch = run.batch([[token] * (1 + draft_length) for token in first])
    plan = executor.plan(batch)
    assert plan.padded_rows >= plan.rows
    executor.run(plan, batch)
    slots, rows = batch.state_slots.flatten(), batch.slot_mapping
    written = 0
    for layer, old in before.recurrent.items():
        kept = torch.ones(len(old), dtype=torch.bool)
        kept[slots] = False
        assert same_bits(run.caches.recurrent[layer][kept], old[kept])
        kept[slots], kept[batch.state_slots[:, 0]] = True, False
        assert same_bits(run.caches.conv[layer][kept], before.conv[layer][kept])
        written += int((run.caches.recurrent[layer][slots] != old[slots]).any())
    for layer, old in before.kv.items():
        kept = torch.ones(old.shape[0] * PAGE, dtype=torch.bool)
        kept[rows] = False
        assert same_bits(run.caches.kv[layer].flatten(0, 1)[kept], old.flatten(0, 1)[kept])
    assert written == len(before.recurrent)  # the comparison above was about something


def test_the_result_does_not_depend_on_padding_or_earlier_steps() -> None:
    """Two executors, one of them dirty from a larger step: same bits for the same step."""
    run = Requests(model("bf16"), 3)
    first = run.prefill(prompts(3))
    big = Requests(model("bf16"), 40)
    dirty = run.fork()
    executor = dirty.executor(8)
    crowd = executor.__class__(big.model, big.caches, tp=8)
    crowd_batch = big.batch([[t] for t in big.prefill(prompts(40, seed=3))])
    crowd.run(crowd.plan(crowd_batch), crowd_batch)
    step = executor.prepare(executor.plan(run.batch([[t] for t in first])))
    for buffer in (step.x, step.out, step.blocks, step.partial, step.latent, step.kda_local, step.mla_local):
        buffer.fill_(float("nan"))
    clean = run.executor(8)
    batch = run.batch([[t] for t in first])
    assert same_bits(executor.run(executor.plan(batch), batch), clean.run(clean.plan(batch), batch))


def test_a_smaller_step_after_a_larger_one_leaves_the_others_alone() -> None:
    """Both are padded to 16 rows: what the larger one left in the input tensors must not be acted upon."""
    run = Requests(model("bf16"), 16)
    first = run.prefill(prompts(16))
    executor = run.executor(8)
    batch = run.batch([[t] for t in first])
    executor.run(executor.plan(batch), batch)
    run.accept([1] * 16)
    few = run.batch([[t] for t in first[:9]])
    before = copy.deepcopy(run.caches)
    executor.run(executor.plan(few), few)
    inputs = executor.prepare(executor.plan(few)).inputs
    assert inputs.slots[9:].tolist() == [[0]] * 7
    assert inputs.slot_mapping[9:].tolist() == [-1] * 7
    assert inputs.lens[9:].tolist() == inputs.ids[9:].tolist() == [0] * 7
    assert inputs.accepted[9:].tolist() == [1] * 7
    idle = [slot for slots in run.slots[9:] for slot in slots]
    pages = [page for pages in run.pages[9:] for page in pages]
    for layer, old in before.recurrent.items():
        assert same_bits(run.caches.recurrent[layer][idle], old[idle])
        assert same_bits(run.caches.conv[layer][idle], before.conv[layer][idle])
    for layer, old in before.kv.items():
        assert same_bits(run.caches.kv[layer][pages], old[pages])


def test_steps_are_repeatable_bit_for_bit() -> None:
    run = Requests(model("bf16"), 9)
    first = run.prefill(prompts(9))
    batch = run.batch([[t] for t in first])
    results = []
    for _ in range(3):
        fork = run.fork()
        executor = fork.executor(16)
        results.append(executor.run(executor.plan(batch), batch))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_bf16_differs_from_fp64_no_more_than_the_stock_path_does(kv: torch.dtype) -> None:
    precise = Requests(model(), 16)
    tokens = prompts(16, 8)
    precise.prefill(tokens)
    errors = {"stock": [], "specialized": []}  # type: dict[str, list[Tensor]]
    low = Model(TINY_A, model().weights, Precision(kv=kv))
    arms = {name: Requests(low, 16) for name in errors}
    for arm in arms.values():
        arm.prefill(tokens)
    executor = arms["specialized"].executor(8)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        rows = torch.randint(0, 500, (16, 1), generator=generator).tolist()
        exact = precise.model.forward(precise.batch(rows), precise.caches)
        batch = arms["stock"].batch(rows)
        found = {
            "stock": low.forward(batch, arms["stock"].caches),
            "specialized": specialized(executor)(arms["specialized"].batch(rows)),
        }
        for name, arm in arms.items():
            errors[name].append((found[name].double() - exact).square().mean())
            arm.accept([1] * 16)
        precise.accept([1] * 16)
    rms = {name: float(torch.stack(e).mean().sqrt()) for name, e in errors.items()}
    assert rms["specialized"] < 1.1 * rms["stock"]
    assert rms["specialized"] > 1e-4  # rounding happened


def test_taps_equal_the_stock_paths() -> None:
    run = Requests(model(), 3)
    first = run.prefill(prompts(3))
    fork = run.fork()
    executor = fork.executor(8)
    batch = run.batch([[t] for t in first])
    layers = (1, 3, 6, 7)
    expected, taps = run.model.forward(batch, run.caches, layers)
    found, own = executor.run(executor.plan(batch), batch, layers)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(own, taps, rtol=0, atol=1e-11)


def test_a_declined_step_runs_on_the_stock_path_and_says_so() -> None:
    run = Requests(model(), 2)
    rows = prompts(2)
    expected = run.fork()
    executor = run.executor(8)
    batch = run.batch(rows, prefill=True)
    plan = executor.plan(batch)
    hidden = executor.run(plan, batch)
    assert torch.equal(hidden, expected.model.forward(batch, expected.caches))
    did = executor.last_step
    assert did is not None
    assert (did.path, did.reason, did.ops, did.providers) == ("stock", "prefill", {}, {})
    assert did.slots == [slots[0] for slots in run.slots]


def test_the_ledger_tells_cell_slots_rows_and_prefetch_points() -> None:
    run = Requests(model("bf16"), 3, draft_length=3)
    first = run.prefill(prompts(3))
    executor = run.executor(16)
    batch = run.batch([[t] * 4 for t in first])
    executor.run(executor.plan(batch), batch)
    did = executor.last_step
    assert did is not None
    cell = (did.kind, did.requests, did.rows, did.padded_rows, did.draft_length, did.tp, did.dcp, did.context_max)
    assert cell == ("verify", 3, 12, 16, 3, 16, 1, 10)
    assert (did.path, did.reason) == ("specialized", None)
    assert did.slots == [slot for slots in run.slots for slot in slots]
    assert did.kv_rows == batch.slot_mapping.tolist()
    assert set(did.providers.values()) == {"torch"}
    assert set(did.providers) == set(did.ops)
    assert len(did.rank_hashes) == 16
    assert did.prefetch_points == []  # more than eight rows
    small = run.batch([[first[0]] * 4])
    executor.run(executor.plan(small), small)
    assert executor.last_step is not None
    calls = {op: n for op, n in executor.last_step.ops.items() if op != "kimi_k3::prefetch"}
    assert calls == did.ops  # of this step alone
    assert executor.last_step.prefetch_points[:2] == ["oproj_to_front@0", "oproj_to_front@1"]
    assert "experts_to_in_proj@1" in executor.last_step.prefetch_points


def one_step(overrides: dict[str, Provider], **options: Any) -> Executor:
    run = Requests(model("bf16"), 2)
    first = run.prefill(prompts(2))
    executor = run.executor(8, overrides=overrides, **options)
    batch = run.batch([[t] for t in first])
    executor.run(executor.plan(batch), batch)
    return executor


def test_a_rank_that_diverges_has_another_hash() -> None:
    def other_link(args: tuple[Any, ...]) -> None:
        args[-1][5, :, 0] += 1.0  # rank 5's copy of the normalised input

    did = one_step(spoiled_after("oproj_reduce_attnres", other_link)).last_step
    assert did is not None
    assert [h != did.rank_hashes[0] for h in did.rank_hashes] == [rank == 5 for rank in range(8)]
    healthy = one_step({}).last_step
    assert healthy is not None
    assert healthy.ranks_agree


def test_one_rank_with_another_cache_row_has_another_hash() -> None:
    did = one_step(spoiled_after("mla_query", lambda args: args[-2][3].zero_())).last_step
    assert did is not None
    assert [h != did.rank_hashes[0] for h in did.rank_hashes] == [rank == 3 for rank in range(8)]


def test_a_missing_publication_is_seen() -> None:
    drop = spoiled_after("oproj_publish", lambda args: args[-1][:, 2].fill_(float("nan")))
    with pytest.raises(MissingPublication, match="attention"):
        one_step(drop, debug=True)


def test_mailboxes_are_idle_again_after_an_aborted_step() -> None:
    run = Requests(model(), 2)
    first = run.prefill(prompts(2))
    fork = run.fork()
    failing = {"left": 1}

    def fail(args: tuple[Any, ...]) -> None:
        failing["left"] -= 1
        if failing["left"] == 0:
            raise RuntimeError("aborted")

    executor = run.executor(8, overrides=spoiled_before("fc1", fail))
    batch = run.batch([[t] for t in first])
    with pytest.raises(RuntimeError, match="aborted"):
        executor.run(executor.plan(batch), batch)
    assert executor.boxes.check_armed() == []
    for spoiled, kept in zip(all_tensors(run.caches), all_tensors(fork.caches), strict=True):
        spoiled.copy_(kept)  # the step had already written states
    clean = fork.executor(8)
    assert torch.equal(executor.run(executor.plan(batch), batch), clean.run(clean.plan(batch), batch))


def test_a_mailbox_left_dirty_is_named_in_debug_mode() -> None:
    dirty = spoiled_after("moe_tail", lambda args: args[2][0, 0, 0].zero_())
    with pytest.raises(RuntimeError, match=r"not re-armed after the step: shared: 16 words"):
        one_step(dirty, debug=True)


def test_a_refused_deployment_names_every_reason() -> None:
    run = Requests(model(), 1)
    with pytest.raises(UnsupportedDeployment) as caught:
        Executor(run.model, run.caches, tp=3, dcp=2, draft_length=8, deployment={"lora": True})
    found = {reason.partition(":")[0] for reason in caught.value.reasons}
    assert {"tensor_parallel", "context_parallel", "draft_length", "lora", "kda_heads"} <= found


def test_contexts_beyond_the_limit_and_unprepared_batches_fall_back() -> None:
    run = Requests(model(), 3)
    first = run.prefill(prompts(3))
    batch = run.batch([[t] for t in first])
    assert run.executor(8, max_context=6).plan(batch).reason == "context_too_long"
    assert run.executor(8, max_context=7).plan(batch).reason is None
    assert run.executor(8, prepared=(1, 2)).plan(batch).reason == "unprepared_rows"


def test_the_hash_covers_the_plan() -> None:
    run = Requests(model(), 1)
    first = run.prefill(prompts(1))
    plan = run.executor(8).plan(run.batch([[t] for t in first]))
    copies = [torch.ones(8, 1, 4)]
    assert rank_hashes(plan, copies, 8) == rank_hashes(plan, copies, 8)
    assert rank_hashes(plan, copies, 8)[0] != rank_hashes(replace(plan, kv_splits=99), copies, 8)[0]
