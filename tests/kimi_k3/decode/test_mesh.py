"""Mailboxes and reductions of lock-step ranks."""

from __future__ import annotations

import pytest
import torch

from kimi_k3.decode import mesh
from kimi_k3.decode.mesh import Mailboxes, MissingPublication
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.precision import PRECISIONS

BF16 = PRECISIONS["bf16"]
TP, ROWS, WIDTH, CAP = 8, 5, 16, 7


def partials(seed: int = 0) -> torch.Tensor:
    return torch.randn(TP, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def box(*shape: int) -> torch.Tensor:
    return torch.full(shape, mesh.IDLE, dtype=torch.bfloat16)


def one_shot(values: torch.Tensor) -> torch.Tensor:
    target = box(TP, TP, CAP, WIDTH)
    mesh.publish_partial(target, values)
    return mesh.all_reduce(target, None, ROWS, BF16, "test").expand(TP, -1, -1)


def two_phase(values: torch.Tensor) -> torch.Tensor:
    target, gather = box(TP, TP, CAP, WIDTH // TP), box(TP, CAP, WIDTH)
    mesh.publish_partial(target, values)
    return mesh.all_reduce(target, gather, ROWS, BF16, "test").expand(TP, -1, -1)


def test_one_shot_and_two_phase_give_the_same_bits() -> None:
    assert torch.equal(one_shot(partials()), two_phase(partials()))


def test_sums_are_taken_in_rank_order() -> None:
    values = torch.zeros(TP, ROWS, WIDTH)
    values[0], values[1], values[2] = 2.0**25, 1.0, -(2.0**25)  # FP32: (a + 1) - a is 0, (a - a) + 1 is 1
    fp32 = PRECISIONS["fp32"]
    target = torch.full((TP, TP, CAP, WIDTH), mesh.IDLE)
    mesh.publish_partial(target, values)
    assert torch.equal(mesh.all_reduce(target, None, ROWS, fp32, "test"), torch.zeros(1, ROWS, WIDTH))


def test_the_sum_is_rounded_once() -> None:
    values = partials()
    expected = values.float()[0]
    for rank in range(1, TP):
        expected = expected + values[rank].float()
    assert torch.equal(one_shot(values)[3], expected.bfloat16().float())


@pytest.mark.parametrize("reduce", [one_shot, two_phase])
def test_a_missing_rank_shows_as_nan(reduce: object) -> None:
    target = box(TP, TP, CAP, WIDTH)
    mesh.publish_partial(target, partials())
    target[:, 3] = mesh.IDLE  # rank 3 published nothing
    assert mesh.all_reduce(target, None, ROWS, BF16, "test").isnan().all()
    target[:] = 0
    target[2, 3, 1] = mesh.IDLE
    with pytest.raises(MissingPublication, match=r"attention: no publication at index \[2, 3, 1, 0\]"):
        mesh.all_reduce(target, None, ROWS, BF16, "attention", debug=True)


def test_readers_re_arm_and_only_the_rows_they_read() -> None:
    boxes = Mailboxes.allocate(TINY_A, BF16, TP, CAP)
    assert boxes.check_armed() == []
    boxes.attention[:, :, :] = 1
    mesh.take(boxes.attention, ROWS, 2, "attention", False)
    left = TP * TP * (CAP - ROWS) * TINY_A.hidden_size
    assert boxes.check_armed() == [f"attention: {left} words"]
    boxes.reset()
    assert boxes.check_armed() == []


def test_published_zeros_are_positive() -> None:
    target = box(TP, TP, CAP, WIDTH)
    mesh.publish_all(target, torch.full((TP, ROWS, WIDTH), -0.0, dtype=torch.bfloat16))
    assert not target[:, :, :ROWS].signbit().any()


def test_ranks_compute_for_themselves_once_any_bit_differs() -> None:
    copies = torch.zeros(TP, ROWS, WIDTH, dtype=torch.bfloat16)
    assert mesh.agreeing(copies, copies) == slice(0, 1)
    copies[5, 2, 1] = -0.0
    assert mesh.agreeing(copies) == slice(None)
    nan = torch.full((TP, ROWS, WIDTH), float("nan"))
    assert mesh.agreeing(nan) == slice(0, 1)


def test_a_diverged_copy_stays_diverged_through_a_reduction() -> None:
    target = box(TP, TP, CAP, WIDTH)
    mesh.publish_all(target, partials())
    target[6, 0, 0, 0] += 8  # one link delivered something else to rank 6
    total = mesh.all_reduce(target, None, ROWS, BF16, "test")
    assert total.shape[0] == TP
    assert [torch.equal(total[rank], total[0]) for rank in range(TP)] == [True] * 6 + [False, True]
