"""Attention residual: the torch reference of the kernel's signature, test inputs, and the derived error limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_k3.kernels.kda_core_cases import half_ulp

EPS = 1e-5
REL = 2.0**-19  #: exponential, reciprocal and rsqrt in a row: each within a few 2^-22

Update = Literal["add", "replace", "none"]
Kind = Literal["random", "adversarial", "coded"]


@dataclass
class Inputs:
    """What the kernel takes, in its order: ``delta``, ``prefix``, ``out``, ``tap`` [rows, hidden] bf16, ``blocks``
    [rows, pitch, hidden] bf16, ``query`` [hidden] fp32 (score norm times projection), ``gamma`` [hidden] bf16."""

    delta: Tensor | None
    prefix: Tensor
    blocks: Tensor
    query: Tensor
    gamma: Tensor
    tap: Tensor | None
    out: Tensor

    def clone(self) -> Inputs:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        copies: dict[str, Any] = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
        return Inputs(**copies)

    def apply(
        self,
        *,
        stored: int,
        update: Update = "add",
        opens: bool = False,
        final: bool = False,
        compute: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """:func:`reference` on these tensors."""
        i = self
        return reference(
            i.delta, i.prefix, i.blocks, i.query, i.gamma, i.tap, i.out,
            stored=stored, update=update, opens=opens, final=final, compute=compute,
        )  # fmt: skip


def moved_bytes(rows: int, hidden: int, stored: int, update: Update, opens: bool, tap: bool) -> int:
    """Bytes that must move: sources and delta read, prefix, block and tap written, output; query and gamma once."""
    vectors = stored + {"add": 3, "replace": 2, "none": 1}[update] + opens + tap + 1
    return rows * vectors * hidden * 2 + hidden * 6


def reference(
    delta: Tensor | None,
    prefix: Tensor,
    blocks: Tensor,
    query: Tensor,
    gamma: Tensor,
    tap: Tensor | None,
    out: Tensor,
    *,
    stored: int,
    update: Update = "add",
    opens: bool = False,
    final: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Same arguments and mutations as the kernel. Returns (unrounded output, bound of its error), [rows, hidden].

    The sum prefix + delta is formed in FP32 whatever ``compute`` is: it is exact up to one FP32 rounding.
    """
    if update == "add":
        assert delta is not None
        prefix.copy_((prefix.float() + delta.float()).to(prefix.dtype))
    elif update == "replace":
        assert delta is not None
        prefix.copy_(delta)
    if opens:
        blocks[:, stored] = prefix
    if tap is not None:
        tap.copy_(prefix)
    sources = torch.cat([blocks[:, :stored], prefix[:, None]], 1).to(compute)
    w = query.to(compute)
    rstd = torch.rsqrt(sources.square().mean(-1) + EPS)
    logits = (sources @ w) * rstd
    prob = torch.softmax(logits, -1)
    mixed = (prob[..., None] * sources).sum(1)
    # error of a logit: a dot product of `hidden` terms; a shift of d there changes a probability by at most d, relative
    terms = 4 * 2.0**-24 * sources.shape[-1] ** 0.5
    shift = (terms * sources.norm(dim=-1) * w.norm() * rstd + REL * logits.abs()).amax(-1)
    if stored == 0:
        shift = torch.zeros_like(shift)
    slack = (prob[..., None] * sources.abs()).sum(1) * (2 * shift + REL)[:, None]
    if stored:
        slack = slack + 2.0**-126 * sources.abs().sum(1)  # a smaller probability may be flushed to zero
    if final:
        half = torch.bfloat16
        rounded = mixed.to(half).to(compute)
        high, low = (mixed + slack).to(half).to(compute), (mixed - slack).to(half).to(compute)
        slack = torch.maximum((high - rounded).abs(), (low - rounded).abs())  # zero unless a rounding can flip
        mixed = rounded
    scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS)
    relative = slack.square().mean(-1, keepdim=True).sqrt() * scale + REL
    exact = mixed * scale * gamma.to(compute)
    bound = (slack + mixed.abs() * relative) * scale * gamma.to(compute).abs()
    out.copy_(exact)
    return exact, bound


def make_inputs(
    rows: int,
    hidden: int,
    *,
    pitch: int = 8,
    stored: int = 8,
    update: Update = "add",
    tap: bool = False,
    kind: Kind = "random",
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """``coded``: source s is the constant 2 s + 1 and the query picks it alone, so a wrong source shows in the value.
    ``adversarial``: zero, huge, tiny and cancelling rows, one dominant logit, equal logits. Blocks that must not be
    read, ``out`` and ``tap`` are NaN."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    delta, prefix, blocks = (
        normal(rows, hidden),
        normal(rows, hidden, scale=2.0),
        normal(rows, pitch, hidden, scale=2.0),
    )
    query, gamma = normal(hidden, scale=2 * hidden**-0.5), 1 + normal(hidden, scale=0.2)
    if kind == "adversarial":
        prefix[0], delta[0] = 0.0, -0.0
        blocks[0] = 0.0
        i = min(1, rows - 1)
        blocks[i, 0] *= 1e15
        i = min(2, rows - 1)
        blocks[i], prefix[i], delta[i] = blocks[i] * 1e-18, prefix[i] * 1e-18, delta[i] * 1e-18
        i = min(3, rows - 1)
        delta[i] = -prefix[i].bfloat16().float()  # the new prefix is exactly zero
        i = min(4, rows - 1)
        blocks[i] = blocks[i, :1]  # equal logits
        query = query * 20.0
    if kind == "coded":
        signs = torch.where(torch.rand(hidden, generator=g) < 0.5, -1.0, 1.0)
        query = signs * (16.0 / hidden)
        blocks = (2.0 * torch.arange(pitch)[None, :, None] + 1) * torch.ones(rows, pitch, hidden)
        blocks *= torch.where((torch.arange(rows)[:, None] % max(1, stored)) == torch.arange(pitch), 1.0, -1.0)[
            ..., None
        ]
        blocks = blocks * signs
        prefix, delta = -64.0 * signs.expand(rows, hidden).clone(), -1.0 * signs.expand(rows, hidden).clone()
    blocks[:, stored:] = torch.nan
    if update == "replace":
        prefix[:] = torch.nan
    nan = torch.full((rows, hidden), torch.nan)
    bf = torch.bfloat16
    return Inputs(
        None if update == "none" else delta.to(bf).to(device),
        prefix.to(bf).to(device),
        blocks.to(bf).to(device),
        query.float().to(device),
        gamma.to(bf).to(device),
        nan.to(bf).to(device) if tap else None,
        nan.to(bf).to(device),
    )


def compare(
    got: Inputs, before: Inputs, *, stored: int, update: Update = "add", opens: bool = False, final: bool = False
) -> dict[str, float]:
    """``out``: largest error over its limit (at most 1 when right); ``bits``: wrong elements of prefix, blocks, tap."""
    want = before.clone()
    exact, bound = want.apply(stored=stored, update=update, opens=opens, final=final, compute=torch.float64)
    bound = bound + half_ulp(exact.abs() + bound)
    worst = float(((got.out.double() - exact).abs() / bound.clamp(min=1e-45)).nan_to_num(torch.inf).max())
    wrong = 0
    for a, b in ((got.prefix, want.prefix), (got.blocks, want.blocks), (got.tap, want.tap)):
        if a is not None and b is not None:
            wrong += int((a.view(torch.int16) != b.view(torch.int16)).sum())
    return {"out": worst, "bits": float(wrong), "nan": float(got.out.isnan().sum())}
