"""KDA decode core: the torch reference of the kernel's signature, test inputs, and the derived error limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

HEAD, TAPS = 128, 3
NORM_EPS, L2_EPS, LOWER_BOUND = 1e-5, 1e-6, -5.0

REL = 2.0**-19  #: an exponential, sigmoid, reciprocal or rsqrt, a few of them in a row: each within a few 2^-22
DOTS = 4 * 2.0**-24 * HEAD**0.5  #: a dot product of 128 terms, relative to the product of the norms

Kind = Literal["coded", "random", "adversarial"]


@dataclass
class Inputs:
    """Everything the kernel takes, in its order. Tables, states and ``out`` are the caller's own buffers.

    ``projected`` [requests tokens, pitch] bf16 = q | k | v | gate (heads 128 each) | f (128) | beta (heads) | pad;
    ``f_b`` [heads 128, 128] bf16; ``conv_weight`` [3 (q, k, v), 4 taps oldest first, heads 128] fp32;
    ``a_log`` [heads], ``dt_bias`` [heads 128], ``norm_weight`` [128] fp32; ``slots`` [requests] or [requests, columns];
    ``accepted`` [requests]; ``conv_state`` [slots, 3 + draft length, 3 heads 128] bf16;
    ``state`` [slots, heads, 128 v, 128 k] fp32; ``out`` [requests tokens, heads 128] bf16.
    """

    projected: Tensor
    f_b: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    slots: Tensor
    accepted: Tensor | None
    conv_state: Tensor
    state: Tensor
    out: Tensor
    tokens: int = 1

    def clone(self) -> Inputs:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        copies: dict[str, Any] = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
        return Inputs(**copies)

    def apply(
        self, *, compute: torch.dtype = torch.float32, rounded: bool = True, limits: Limits | None = None
    ) -> Tensor:
        """:func:`reference` on these tensors."""
        i = self
        return reference(
            i.projected, i.f_b, i.conv_weight, i.a_log, i.dt_bias, i.norm_weight, i.slots, i.accepted, i.conv_state,
            i.state, i.out, i.tokens, compute=compute, rounded=rounded, limits=limits,
        )  # fmt: skip


@dataclass
class Limits:
    """Elementwise bounds of |kernel - fp64 reference|, filled by :func:`reference` where asked."""

    out: Tensor = field(default_factory=lambda: torch.empty(0))  #: [rows, heads 128], without the final rounding
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)  #: (slots, bound [n, heads, v, k]) per token


def moved_bytes(requests: int, tokens: int, heads: int, pitch: int) -> int:
    """Bytes that a step must move: state in, states out, history, inputs, outputs, and the weights once."""
    width = heads * HEAD
    state = heads * HEAD * HEAD * 4 * (1 + tokens)
    history = 3 * width * 2 * (TAPS + TAPS - 1 + tokens)
    rows = tokens * (4 * width + HEAD + heads + width) * 2
    return requests * (state + history + rows) + width * HEAD * 2 + 3 * 4 * width * 4 + width * 4


def reference(
    projected: Tensor,
    f_b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    accepted: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    out: Tensor,
    tokens: int = 1,
    *,
    compute: torch.dtype = torch.float32,
    rounded: bool = True,
    limits: Limits | None = None,
) -> Tensor:
    """Same arguments and mutations as the kernel; returns the unrounded output [rows, heads 128] in ``compute``.

    ``rounded``: raw decay logits pass through BF16, the kernel's one intermediate rounding. ``limits``: filled.
    """
    heads = a_log.shape[0]
    width = heads * HEAD
    n = slots.shape[0]
    table = slots.reshape(n, -1).long()
    taken = torch.ones(n, dtype=torch.long, device=table.device)
    if accepted is not None:
        taken = accepted.long().clamp(1, table.shape[1])
    first, start = table[:, 0], table.gather(1, (taken - 1)[:, None])[:, 0]
    live = ((first > 0) & (start > 0)).nonzero()[:, 0]
    rows = projected.view(n, tokens, -1)[live].to(compute)
    exact = torch.zeros(n, tokens, width, dtype=compute, device=out.device)
    bounds = torch.zeros_like(exact)
    m = live.shape[0]
    if m:
        table, taken, first, start = table[live], taken[live], first[live], start[live]
        index = (taken - 1)[:, None] + torch.arange(TAPS, device=table.device)
        history = conv_state[first[:, None], index]  # [m, 3, 3 width]
        window = torch.cat([history.to(compute), rows[:, :, : 3 * width]], 1)
        taps = conv_weight.to(compute).permute(1, 0, 2).reshape(TAPS + 1, 3 * width)
        terms = [window[:, j : j + tokens] * taps[j] for j in range(TAPS + 1)]
        y = terms[0] + terms[1] + terms[2] + terms[3]
        y = y * torch.sigmoid(y)
        q, k, v = y.view(m, tokens, 3, heads, HEAD).unbind(2)
        q_scale = torch.rsqrt((q * q).sum(-1, keepdim=True) + L2_EPS) * HEAD**-0.5
        k_scale = torch.rsqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
        q, k = q * q_scale, k * k_scale
        if limits is not None:  # convolution: four products summed in FP32, SiLU has slope at most 1.1
            dy = 4 * 2.0**-24 * sum(t.abs() for t in terms) + REL * y.abs()
            dq, dk, dv = dy.view(m, tokens, 3, heads, HEAD).unbind(2)
            dq, dk = dq * q_scale, dk * k_scale  # then the norm: relative, by the vector's own relative error
            dq = dq + q.abs() * (REL + dq.norm(dim=-1, keepdim=True) * HEAD**0.5)
            dk = dk + k.abs() * (REL + dk.norm(dim=-1, keepdim=True))
        z = rows[:, :, 3 * width : 4 * width].view(m, tokens, heads, HEAD)
        raw = rows[:, :, 4 * width : 4 * width + HEAD] @ f_b.to(compute).mT
        if rounded:
            raw = raw.to(torch.bfloat16).to(compute)
        beta = torch.sigmoid(rows[:, :, 4 * width + HEAD : 4 * width + HEAD + heads])
        raw, bias = raw.view(m, tokens, heads, HEAD), dt_bias.to(compute).view(heads, HEAD)
        decay = torch.exp(LOWER_BOUND * torch.sigmoid(a_log.to(compute).exp()[:, None] * (raw + bias)))
        s = state[start].to(compute)
        error = torch.zeros_like(s)  # bound of what s may already be wrong by
        tail = rows[:, :, : 3 * width].to(conv_state.dtype)
        conv_state[first, :2] = history[:, 1:]
        conv_state[first, 2 : 2 + tokens] = tail
        for t in range(tokens):
            s = s * decay[:, t, :, None, :]
            r = (s @ k[:, t, :, :, None])[..., 0]
            u = beta[:, t, :, None] * (v[:, t] - r)
            if limits is not None:
                error = error * decay[:, t, :, None, :] + REL * s.abs()
                norm = s.norm(dim=-1)
                dr = (REL + DOTS) * norm + error.norm(dim=-1) + norm * dk[:, t].norm(dim=-1)[..., None]
                du = beta[:, t, :, None] * (dr + dv[:, t] + REL * v[:, t].abs()) + REL * u.abs()
                error = error + du[..., None] * k[:, t, :, None, :].abs()
                error = error + u.abs()[..., None] * dk[:, t, :, None, :]
            s = s + u[..., None] * k[:, t, :, None, :]
            o = (s @ q[:, t, :, :, None])[..., 0]
            rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + NORM_EPS)
            gate = norm_weight.to(compute) * torch.sigmoid(z[:, t])
            exact[live, t] = (o * rstd * gate).flatten(-2)
            if limits is not None:
                do = (error.norm(dim=-1) + (REL + DOTS) * (norm + u.abs())) * HEAD**-0.5
                do = do + (norm + u.abs()) * dq[:, t].norm(dim=-1)[..., None]
                mean = (do * do).mean(-1, keepdim=True).sqrt()  # the norm's own error: relative, at most mean / rms
                dy = (do + o.abs() * (REL + mean * rstd)) * rstd * gate.abs()
                bounds[live, t] = dy.flatten(-2)
                limits.state.append((table[:, t], error.clone()))
            write = table[:, t] > 0
            state[table[write, t]] = s[write].to(state.dtype)
    out.copy_(exact.view(n * tokens, width))
    if limits is not None:
        limits.out = bounds.view(n * tokens, width)
    return exact.view(n * tokens, width)


def make_inputs(
    requests: int,
    heads: int,
    pitch: int,
    *,
    tokens: int = 1,
    draft_length: int = 0,
    native: bool = False,
    kind: Kind = "coded",
    seed: int = 0,
    padding: int = 0,
    device: str = "cpu",
    index_dtype: torch.dtype = torch.int32,
    accepted: int | None = None,
) -> Inputs:
    """Inputs with permuted slots. ``native``: a table of 1 + draft_length slots a request, else one slot.

    ``coded``: F_B and f are multiples of powers of two small enough that every summation order gives the same raw
    logits, so the one intermediate rounding cannot flip. ``adversarial``: zero rows, saturated gates, extreme decays,
    huge and tiny inputs. The last ``padding`` requests are padding, with the null slot or a negative one. Unused slots
    and ``out`` are NaN; so are the rows of padding requests.
    """
    g = torch.Generator().manual_seed(seed)
    width, columns = heads * HEAD, 1 + draft_length

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    projected = normal(requests * tokens, pitch)
    f_b = normal(width, HEAD, scale=HEAD**-0.5)
    a_log = torch.rand(heads, generator=g) * 2.5 - 1
    dt_bias = normal(width) * 2 - 1
    if kind != "random":
        f_b = torch.randint(-8, 9, (width, HEAD), generator=g) / 64.0
        f = torch.randint(-16, 17, (requests * tokens, HEAD), generator=g) / 16.0
        projected[:, 4 * width : 4 * width + HEAD] = f
    conv_weight = normal(3, 4, width, scale=0.5)
    norm_weight = 1 + normal(HEAD, scale=0.1)
    per = columns if native else 1
    total = requests * per + 3
    order = (torch.randperm(total - 1, generator=g) + 1)[: requests * per].view(requests, per)
    conv_state = normal(total, TAPS + draft_length, 3 * width)
    state = normal(total, heads, HEAD, HEAD, scale=0.3)
    if kind == "adversarial":
        rows = projected.view(requests, tokens, pitch)
        rows[0, :, :width] = 0.0  # q is zero wherever the history is
        rows[0, :, width : 2 * width] = -0.0
        conv_state[order[0, 0]] = 0.0
        pick = min(1, requests - 1)
        rows[pick, :, 3 * width : 3 * width + HEAD] = torch.tensor([300.0, -300.0]).repeat(HEAD // 2)
        rows[pick, :, 4 * width + HEAD : 4 * width + HEAD + heads] = 60.0 - 120.0 * (torch.arange(heads) % 2)
        pick = min(2, requests - 1)
        rows[pick, :, : 3 * width] *= 1e-20
        conv_state[order[pick, 0]] *= 1e-20
        pick = min(3, requests - 1)
        rows[pick, :, : 3 * width] *= 1e4
        a_log[0], a_log[-1] = 5.0, -8.0
        dt_bias[: HEAD // 2], dt_bias[HEAD // 2 : HEAD] = -40.0, 40.0
        state[order[min(4, requests - 1), 0]] = 0.0
    taken = None
    if native:
        taken = torch.randint(1, columns + 1, (requests,), generator=g)
        if accepted is not None:
            taken[:] = accepted
    dead = range(requests - padding, requests)
    for i in dead:
        order[i] = 0 if i % 2 else -1
        projected.view(requests, tokens, pitch)[i] = torch.nan
        if taken is not None:
            taken[i] = 0
    used = torch.zeros(total, dtype=torch.bool)
    used[order[order > 0]] = True
    conv_state[~used], state[~used] = torch.nan, torch.nan
    if not native and draft_length:
        conv_state[:, TAPS:] = torch.nan  # beyond what plain decode may look at
    slots = order if native else order[:, 0]
    bf, fp = torch.bfloat16, torch.float32
    out = torch.full((requests * tokens, width), torch.nan, dtype=bf)
    return Inputs(
        projected=projected.to(device, bf),
        f_b=f_b.to(device, bf),
        conv_weight=conv_weight.to(device, fp),
        a_log=a_log.to(device, fp),
        dt_bias=dt_bias.to(device, fp),
        norm_weight=norm_weight.to(device, fp),
        slots=slots.to(index_dtype).contiguous().to(device),
        accepted=None if taken is None else taken.to(device, index_dtype),
        conv_state=conv_state.to(device, bf),
        state=state.to(device, fp),
        out=out.to(device),
        tokens=tokens,
    )


def half_ulp(y: Tensor) -> Tensor:
    """Half a BF16 ulp of y, elementwise, in y's dtype (normal range; at least half the smallest subnormal's ulp)."""
    _, exponent = torch.frexp(y.abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.full_like(y, 0.5), exponent - 8)


def compare(got: Inputs, before: Inputs) -> dict[str, float]:
    """Largest error of ``got`` (after the kernel) over its limit, from ``before`` (the same inputs, untouched).

    ``out`` and ``state`` are at most 1 when the kernel is right; ``state_relative`` is the largest error norm of a
    state; ``untouched`` counts elements that changed without being allowed to, ``history`` wrong elements of the
    convolution history, ``nan`` NaNs in the output.
    """
    want, limits = before.clone(), Limits()
    want.state = want.state.double()
    exact = want.apply(compute=torch.float64, limits=limits)
    bound = limits.out + half_ulp(exact.abs() + limits.out)
    result = {"out": float(((got.out.double() - exact).abs() / bound.clamp(min=1e-45)).nan_to_num(torch.inf).max())}
    worst, written = 0.0, torch.zeros(before.state.shape[0], dtype=torch.bool, device=got.state.device)
    relative = 0.0
    for slots, error in limits.state:
        keep = slots > 0
        written[slots[keep]] = True
        ref = want.state[slots[keep]]
        delta = (got.state[slots[keep]].double() - ref).abs()
        floor = 2.0**-24 * ref.abs() + 1e-38
        worst = max(worst, float((delta / (error[keep] + floor)).nan_to_num(torch.inf).max()) if keep.any() else 0.0)
        if keep.any():
            norms = ref.flatten(1).norm(dim=1).clamp(min=1e-30)
            relative = max(relative, float((delta.flatten(1).norm(dim=1) / norms).max()))
    result["state"], result["state_relative"] = worst, relative
    same = got.state.view(torch.int32)[~written] == before.state.view(torch.int32)[~written]
    result["untouched"] = float((~same).sum())
    bits = got.conv_state.view(torch.int16) != want.conv_state.view(torch.int16)
    result["history"] = float(bits.sum())
    result["nan"] = float(got.out.isnan().sum())
    return result
