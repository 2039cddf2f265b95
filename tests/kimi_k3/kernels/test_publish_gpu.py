"""Published projections on a GPU: coded inputs name the row, the K block and the mailbox that a value came from.

The bodies run on a CPU as well, where the reference publishes through the addresses of the table.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.bench_inputs import Peers
from kimi_k3.kernels.shapes import ProjectionShape

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
GPU = [pytest.mark.gpu, NO_GPU]
OPS = ("o_proj", "moe_front", "shared_down", "dense_down")
ROWS = (1, 3, 8, 9, 16, 31, 64)
CANARIES = 3  #: rows of the mailboxes behind the published ones
CODES = ("row low", "row high", "block")


def coded(shape: ProjectionShape, m: int, code: str, device: str) -> tuple[Tensor, Tensor]:
    """x has one hot block of 64 per token; a weight is the lower or upper part of its row's index, or its block's."""
    row, block = torch.arange(shape.n, device=device), torch.arange(shape.k, device=device) // 64
    value = {"row low": (1 + row % 128)[:, None], "row high": (1 + row // 128)[:, None], "block": (1 + block)[None]}
    hot = (torch.arange(m, device=device) * 5 + 3) % (shape.k // 64)
    x = (block[None] == hot[:, None]).bfloat16() / 64
    return x, value[code].expand(shape.n, shape.k).bfloat16().contiguous()


def by_hand(shape: ProjectionShape, live: int, peers: Peers, x: Tensor, w: Tensor) -> None:
    """What the kernel does, on a CPU: every pair of columns to its address."""
    y, y32 = sp.reference(shape, x, w, live)
    for token in range(len(x)):
        if y32 is not None:
            for t in range(peers.targets):
                _copy(int(peers.table[t, 1]) + 4 * token * peers.pitch[1], (y32[token] + 0.0).contiguous())
        parts = (y + 0.0)[token].split(peers.owner_width or y.shape[1])
        for t in range(peers.targets):
            _copy(int(peers.table[t, 0]) + 2 * token * peers.pitch[0], parts[t if peers.owner_width else 0])


def _copy(to: int, values: Tensor) -> None:
    values = values.contiguous()
    ctypes.memmove(to, values.data_ptr(), values.numel() * values.element_size())


def publish(shape: ProjectionShape, live: int, peers: Peers, x: Tensor, w: Tensor) -> None:
    if x.device.type == "cpu":
        by_hand(shape, live, peers, x, w)
        return
    op = sp.StreamProjection(shape, (len(x),), targets=peers.targets, live=live, owner_width=peers.owner_width)
    op.check(x, w, table=peers.table)
    op.run(x, w, table=peers.table, pitch=peers.pitch)
    torch.cuda.synchronize()


def same(peers: Peers, y: Tensor, y32: Tensor | None) -> None:
    """Bit for bit, the words that nothing may write included."""
    boxes = [peers.boxes] if peers.logits is None else [peers.boxes, peers.logits]
    for got, wanted in zip(boxes, peers.published(y, y32), strict=True):
        bits = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
        wrong = (got.view(bits) != wanted.view(bits)).nonzero()
        assert len(wrong) == 0, f"{len(wrong)} wrong, first at [rank, row, column] {wrong[0].tolist()}: " + (
            f"{float(got[tuple(wrong[0])])}, expected {float(wanted[tuple(wrong[0])])}"
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("device", "size"),
    [
        ("cpu", "small-tp8"),
        *[pytest.param("cuda", f"{model}-tp{tp}", marks=GPU) for model in ("small", "kimi-k3") for tp in (8, 16)],
    ],
)
def test_coded_values_arrive_where_they_belong(device: str, size: str, op: str) -> None:
    shape, live = sp.cases()[f"{size}-{op}"]
    ranks = int(size.rpartition("tp")[2])
    for m in ROWS if device == "cuda" else (1, 16):
        for rank, code in zip((0, ranks // 2 + 1, ranks - 1), CODES, strict=True):
            peers = Peers(shape, live, m, ranks, rank, device, m + CANARIES)
            x, w = coded(shape, m, code, device)
            publish(shape, live, peers, x, w)
            same(peers, *sp.reference(shape, x, w, live))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("op", OPS)
def test_no_published_word_is_idle(op: str, device: str) -> None:
    """-0 arrives as +0: a pair with it is the idle word of a peer that polls."""
    shape, live = sp.cases()[f"small-tp8-{op}"]
    for m in (1, 16):
        peers = Peers(shape, live, m, 8, 2, device)
        x, w = sp.make_inputs(shape, m, 3, "adversarial", device)
        peers.boxes.view(torch.int16).fill_(-(2**15))
        publish(shape, live, peers, x, w)
        sent = peers.boxes[:, :, peers.first : peers.first + (shape.n - shape.fp32_rows)]
        assert not bool((sent.contiguous().view(torch.int16) == -(2**15)).any())
        first = sent[:, 0].float()  # row 0 of x is -0 throughout, unless it is the last row as well
        assert m == 1 or bool((first == 0).all())


def test_the_bodies_notice_a_wrong_owner_and_a_stray_word() -> None:
    shape, live = sp.cases()["small-tp8-shared_down"]
    peers = Peers(shape, live, 2, 8, 0, "cpu", 2 + CANARIES)
    x, w = coded(shape, 2, "row low", "cpu")
    publish(shape, live, peers, x, w)
    wanted = sp.reference(shape, x, w, live)
    same(peers, *wanted)
    right = peers.boxes.clone()
    peers.boxes.copy_(right.roll(1, 0))
    with pytest.raises(AssertionError, match=r"wrong, first at \[rank, row, column\] \[0, 0, "):
        same(peers, *wanted)
    peers.boxes.copy_(right)
    peers.boxes[3, 2, 0] = 1.0
    with pytest.raises(AssertionError, match=r"1 wrong, first at \[rank, row, column\] \[3, 2, 0\]: 1.0, expected nan"):
        same(peers, *wanted)
