"""Lock-step ranks and their mailboxes.

A rank is an index of the leading tensor dimension; nothing loops over ranks to compute. Ranks exchange data
through mailboxes. The *idle* content of a mailbox is NaN, a value no publisher sends: a reader takes the rows and
re-arms them to idle, so a publication that did not happen shows up as NaN in everything computed from it, as the
place where a GPU would wait for ever. Published values have no negative zero (on a GPU it is part of the idle word).

Sums over ranks are taken in rank order. Below ``plan.TWO_PHASE_ROWS`` rows every rank publishes its partial to all
ranks and everyone adds (one shot); above, partials go to the owner of their columns, which adds, rounds and
publishes the sum to all (two-phase). Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import FP8, Precision

IDLE = float("nan")


class MissingPublication(RuntimeError):
    """A reader found idle words where a rank should have published (debug mode)."""


@dataclass
class Mailboxes:
    """All mailboxes of one executor; ``cap`` rows each. First dimension: the rank whose memory it is."""

    attention: Tensor  #: [R dst, R src, cap, H] o_proj partials, one shot
    attention_owner: Tensor  #: [R owner, R src, cap, W] o_proj partials, two-phase
    attention_gather: Tensor  #: [R dst, cap, H]
    logits: Tensor  #: [R dst, cap, E] compute dtype
    front_latent: Tensor  #: [R dst, cap, L]
    latent: Tensor  #: [R dst, R src, cap, L] expert partials, one shot
    latent_owner: Tensor  #: [R owner, R src, cap, L / R]
    latent_gather: Tensor  #: [R dst, cap, L]
    shared: Tensor  #: [R owner, R src, cap, W] shared-expert and dense partials
    delta: Tensor  #: [R dst, cap, H] feed-forward output
    query: Tensor | None = None  #: [R dst, R src, cap, heads / R, row] context parallelism only, query dtype
    context: Tensor | None = None  #: [R src, R owner, cap, heads / R, lora] partial attention outputs
    context_lse: Tensor | None = None  #: [R src, R owner, cap, heads / R] compute dtype

    @staticmethod
    def allocate(
        config: KimiK3Config, precision: Precision, tp: int, cap: int, device: torch.device | str = "cpu", dcp: int = 1
    ) -> Mailboxes:
        hidden, latent, acts = config.hidden_size, config.routed_expert_hidden_size, precision.activations

        def box(*shape: int, dtype: torch.dtype = acts) -> Tensor:
            return torch.full(shape, IDLE, dtype=dtype, device=device)

        boxes = Mailboxes(
            attention=box(tp, tp, cap, hidden),
            attention_owner=box(tp, tp, cap, hidden // tp),
            attention_gather=box(tp, cap, hidden),
            logits=box(tp, cap, config.num_experts, dtype=precision.compute),
            front_latent=box(tp, cap, latent),
            latent=box(tp, tp, cap, latent),
            latent_owner=box(tp, tp, cap, latent // tp),
            latent_gather=box(tp, cap, latent),
            shared=box(tp, tp, cap, hidden // tp),
            delta=box(tp, cap, hidden),
        )
        if dcp > 1:
            heads = config.num_attention_heads // tp
            query = precision.kv if precision.kv == FP8 else acts
            boxes.query = box(tp, tp, cap, heads, config.kv_row, dtype=query)
            boxes.context = box(tp, tp, cap, heads, config.kv_lora_rank)
            boxes.context_lse = box(tp, tp, cap, heads, dtype=precision.compute)
        return boxes

    def named(self) -> Mapping[str, Tensor]:
        return {name: box for name, box in vars(self).items() if box is not None}

    def check_armed(self) -> list[str]:
        """Mailboxes that are not idle, as ``name: words``; empty between steps."""
        return [f"{name}: {n} words" for name, box in self.named().items() if (n := int((~is_idle(box)).sum()))]

    def reset(self) -> None:
        """Back to idle, after a step that died midway."""
        for box in self.named().values():
            box.fill_(IDLE)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def identical(values: Tensor) -> bool:
    """Whether all ranks' copies ``values`` [R, ...] hold the same bits."""
    bits = values.view(BITS[values.element_size()])
    return torch.equal(bits, bits[:1].expand_as(bits))


def agreeing(*copies: Tensor) -> slice:
    """Which ranks have to compute what all of them compute from replicated data ``copies`` [R, ...].

    Ranks that hold the same bits compute the same bits, so rank 0 does it for all: that saves the time, and a CPU
    library's alignment- or position-dependent order of additions cannot make ranks differ that a GPU keeps alike.
    Where any bit differs between ranks, every rank computes for itself. A GPU is not asked: it would wait.
    """
    if copies[0].shape[0] == 1 or copies[0].device.type != "cpu":
        return slice(None)
    return slice(0, 1) if all(identical(values) for values in copies) else slice(None)


def is_idle(box: Tensor) -> Tensor:
    """Which words hold the idle content."""
    if box.dtype == FP8:  # all bits but the sign set: not a number
        return (box.view(torch.uint8) & 0x7F) == 0x7F
    return box.isnan()


def clean(values: Tensor) -> Tensor:
    """Negative zero becomes positive zero; everything else is unchanged. FP8 keeps it: there it is not idle."""
    return values if values.dtype == FP8 else values + 0.0


def take(box: Tensor, rows: int, dim: int, what: str, debug: bool) -> Tensor:
    """The first ``rows`` rows (along ``dim``) of a mailbox as a copy; re-arms them."""
    view = box.narrow(dim, 0, rows)
    taken = view.clone()
    view.fill_(IDLE)
    if debug and bool(is_idle(taken).any()):
        first = is_idle(taken).nonzero()[0].tolist()
        raise MissingPublication(f"{what}: no publication at index {first} of {list(taken.shape)}")
    return taken


def publish_all(box: Tensor, values: Tensor) -> None:
    """Every rank's ``values`` [R src, M, ...] to all ranks: box [R dst, R src, cap, ...]."""
    box[:, :, : values.shape[1]] = clean(values)


def publish_owner(box: Tensor, values: Tensor) -> None:
    """Column blocks of ``values`` [R src, M, R W] to their owners: box [R owner, R src, cap, W]."""
    owners, _, _, width = box.shape
    box[:, :, : values.shape[1]] = clean(values).unflatten(-1, (owners, width)).permute(2, 0, 1, 3)


def publish_partial(box: Tensor, values: Tensor) -> None:
    """One shot or two-phase, told apart by the width of the mailbox."""
    (publish_all if box.shape[-1] == values.shape[-1] else publish_owner)(box, values)


def publish_columns(box: Tensor, values: Tensor) -> None:
    """Every rank's own columns ``values`` [R, M, N / R] to all ranks: box [R dst, cap, N]; of the first ranks only,
    if no more are here."""
    columns = clean(values).transpose(0, 1).flatten(1)
    box[:, : values.shape[1], : columns.shape[1]] = columns


def fold(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, R src, M, N] -> [R, M, N] in ``dtype``, added in rank order."""
    total = partials[:, 0].to(dtype, copy=True)
    for source in range(1, partials.shape[1]):
        total += partials[:, source]
    return total


def all_reduce(
    box: Tensor, gather: Tensor | None, rows: int, precision: Precision, what: str, debug: bool = False
) -> Tensor:
    """Sum of all ranks' partials on every rank, rounded once: [R, rows, N] in the compute dtype.

    [1, rows, N] where all ranks received the same and so have the same sum.
    """
    taken = take(box, rows, 2, what, debug)
    if gather is None:
        return precision.rounded(fold(taken[agreeing(taken)], precision.compute))
    publish_columns(gather, precision.rounding(fold(taken, precision.compute)))
    received = take(gather, rows, 1, f"{what} gather", debug)
    return received[agreeing(received)].to(precision.compute)
