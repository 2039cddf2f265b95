"""Kimi Delta Attention: short convolution, per-channel decay gate, delta-rule recurrence, gated output norm.

The recurrence exists twice: token by token (decode, verify) and in chunks (prefill). Both read and write the
state as the cache stores it, ``[heads, v, k]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import NULL_SLOT
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.layout import RowGroup
from kimi_k3.reference.numerics import RowParallel, l2_normalize, linear, rms_norm
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.weights import KDAWeights

O_NORM_EPS = 1e-5  #: a class default of the released model, not read from its configuration
CHUNK = 16  #: tokens per chunk of a prefill
PAIR_BUDGET = 1 << 26  #: pairwise decay factors held at once


def decay_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay in (lower_bound, 0): ``lower_bound * sigmoid(exp(a_log) * (raw + dt_bias))``.

    ``raw`` [..., heads, d], ``a_log`` [heads], ``dt_bias`` [heads, d].
    """
    return lower_bound * torch.sigmoid(a_log.exp().unsqueeze(-1) * (raw + dt_bias))


def short_conv(window: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: ``window`` [n, taps - 1 + q, C], ``weight`` [C, taps] -> [n, q, C].

    The last tap multiplies the current token; taps are added oldest first. Not rounded.
    """
    taps = weight.shape[1]
    q = window.shape[1] - taps + 1
    out = window[:, :q] * weight[:, 0]
    for tap in range(1, taps):
        out = out + window[:, tap : tap + q] * weight[:, tap]
    return F.silu(out)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of every request. ``q, k, v, g`` [n, heads, d], ``beta`` [n, heads], ``state`` [n, heads, v, k].

    Decay first, then the delta-rule correction ``u``, and the output reads the updated state. Returns
    ``(o, state, u)``.
    """
    state = state * g.exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), state, u


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``t`` tokens in order: ``q, k, v, g`` [n, t, heads, d], ``beta`` [n, t, heads].

    Returns outputs [n, t, heads, d], the state after each token [n, t, heads, v, k], and the corrections
    [n, t, heads, d].
    """
    outputs, states, corrections = [], [], []
    for t in range(q.shape[1]):
        out, state, u = recurrent_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(out)
        states.append(state)
        corrections.append(u)
    return torch.stack(outputs, 1), torch.stack(states, 1), torch.stack(corrections, 1)


def chunked_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same recurrence in chunks. Returns outputs [n, t, heads, d] and the final state [n, heads, v, k].

    Within a chunk, with ``G`` the inclusive cumulative sum of ``g``, the corrections ``U`` solve a unit
    lower-triangular system. Decays enter only as ``exp(G_t - G_s)`` with ``s <= t``, so nothing overflows.
    """
    n, length, heads, dim = q.shape
    longest = max(chunk, PAIR_BUDGET // (n * heads * dim * chunk) // chunk * chunk)
    if length > longest:  # the pairwise decays of a long prompt would not fit: carry the state over in between
        outputs = []
        for start in range(0, length, longest):
            end = start + longest
            out, state = chunked_kda(
                q[:, start:end], k[:, start:end], v[:, start:end], g[:, start:end], beta[:, start:end], state, chunk
            )
            outputs.append(out)
        return torch.cat(outputs, 1), state
    pad = -length % chunk

    def chunks(x: Tensor) -> Tensor:  # [n, t, heads, d] -> [n, heads, chunks, chunk, d]; zero rows change nothing
        return F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)

    q, k, v, g = chunks(q), chunks(k), chunks(v), chunks(g)
    beta = chunks(beta.unsqueeze(-1))
    total = g.cumsum(-2)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    span = total.unsqueeze(-2) - total.unsqueeze(-3)  # [..., t, s, d]
    weighted = span.masked_fill_(~causal.unsqueeze(-1), -torch.inf).exp_() * k.unsqueeze(-3)
    a = (weighted @ k.unsqueeze(-1)).squeeze(-1).tril(-1)
    b = (weighted @ q.unsqueeze(-1)).squeeze(-1)
    decayed_k = k * total.exp()
    decayed_q = q * total.exp()
    solved = torch.linalg.solve_triangular(
        beta * a, beta * torch.cat([v, decayed_k], -1), upper=False, unitriangular=True
    )
    corrections, reads = solved.split(dim, -1)
    last = total[..., -1:, :]
    writes = k * (last - total).exp()
    outputs = []
    for c in range(q.shape[2]):
        u = corrections[:, :, c] - reads[:, :, c] @ state.mT
        outputs.append(decayed_q[:, :, c] @ state.mT + b[:, :, c] @ u)
        state = state * last[:, :, c].exp() + u.mT @ writes[:, :, c]
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], state


@dataclass
class VerifyRecord:
    """RecoverSSM: what a step leaves instead of new states, for ``n`` requests of one layer."""

    requests: Tensor  #: [n] indices into the batch
    slots: Tensor  #: [n]
    u: Tensor  #: [n, q, heads, d] delta-rule corrections
    k: Tensor  #: [n, q, heads, d] keys after the convolution, before their norm
    raw: Tensor  #: [n, q, heads, d] raw decay logits


def fold(
    state: Tensor, record: VerifyRecord, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> Tensor:
    """``state`` [n, heads, v, k] after the first ``accepted`` [n] rows, without running the recurrence again.

    ``S * prod(decays) + sum over rows r of u_r (k_r * product of the decays after r)^T``.
    """
    rows = torch.arange(record.u.shape[1], device=state.device)
    counted = (rows < accepted.unsqueeze(-1))[:, :, None, None]
    g = torch.where(counted, decay_gate(record.raw, a_log, dt_bias, lower_bound), 0.0)
    total = g.sum(1)
    after = total.unsqueeze(1) - g.cumsum(1)
    keys = torch.where(counted, l2_normalize(record.k) * after.exp(), 0.0)
    return state * total.exp().unsqueeze(-2) + torch.einsum("nrhv,nrhk->nhvk", record.u, keys)


@dataclass
class KDAInputs:
    """Projected rows, [T, ...], rounded: what the state update and the output gate need."""

    qkv: Tensor  #: [T, 3 * width] before the convolution
    gate: Tensor  #: [T, width] output-gate logits
    decay: Tensor  #: [T, width] raw decay logits
    beta: Tensor  #: [T, heads] logits


class KDA:
    """One KDA layer. ``weights`` are in the compute dtype."""

    def __init__(self, config: KimiK3Config, weights: KDAWeights, precision: Precision, tp: int = 1) -> None:
        self.heads, self.dim, self.width = config.kda_num_heads, config.kda_head_dim, config.kda_width
        if self.heads % tp:
            raise ValueError(f"{self.heads} KDA heads cannot be sharded over {tp} ranks")
        self.lower_bound = config.gate_lower_bound
        self.history = config.short_conv_kernel_size - 1
        self.precision = precision
        w = weights
        self.in_proj = torch.cat([w.q_proj, w.k_proj, w.v_proj, w.g_proj, w.f_a_proj, w.b_proj])
        self.f_b_proj = w.f_b_proj
        self.conv = torch.cat([w.q_conv, w.k_conv, w.v_conv])  # [3 * width, taps]
        self.a_log = w.a_log
        self.dt_bias = w.dt_bias.unflatten(0, (self.heads, self.dim))
        self.o_norm = w.o_norm
        self.o_proj = RowParallel(w.o_proj, tp, precision)
        #: None: native state slots. A list: RecoverSSM, filled by a forward pass and emptied by :meth:`commit`.
        self.uncommitted: list[VerifyRecord] | None = None

    def __call__(self, x: Tensor, batch: StepBatch, groups: list[RowGroup], conv: Tensor, recurrent: Tensor) -> Tensor:
        """``x`` [T, H] (normalised) -> [T, H]; updates ``conv`` and ``recurrent`` in place."""
        inputs = self.project(x)
        return self.o_proj(self.core(inputs, batch, groups, conv, recurrent))

    def project(self, x: Tensor) -> KDAInputs:
        projected = linear(x, self.in_proj, self.precision)
        widths = [3 * self.width, self.width, self.dim, self.heads]
        qkv, gate, f, beta = projected.split(widths, -1)
        return KDAInputs(qkv, gate, linear(f, self.f_b_proj, self.precision), beta)

    def core(
        self, inputs: KDAInputs, batch: StepBatch, groups: list[RowGroup], conv: Tensor, recurrent: Tensor
    ) -> Tensor:
        """Convolution, recurrence, output norm and gate: [T, width]. Rows of the null slot come out zero."""
        out = torch.zeros_like(inputs.gate)
        if self.uncommitted:
            raise RuntimeError("the last step's rows were not committed")
        for group in groups:
            slots = batch.state_slots[group.requests]
            live = slots[:, 0] > NULL_SLOT
            fresh = (group.context == 0) | ~live
            accepted = batch.accepted[group.requests].clamp(min=1)  # padding may say 0
            if self.uncommitted is not None:
                accepted = torch.ones_like(accepted)  # every step was committed to the start of the first slot
            window = self._window(group.gather(inputs.qkv), conv, slots[:, 0], accepted, fresh)
            self._write_conv(group, window, conv, slots[:, 0], live)
            mixed = self.precision.rounded(short_conv(window, self.conv)).unflatten(-1, (3, self.heads, self.dim))
            q, k, v = l2_normalize(mixed[:, :, 0]) * self.dim**-0.5, l2_normalize(mixed[:, :, 1]), mixed[:, :, 2]
            raw = group.gather(inputs.decay).unflatten(-1, (self.heads, self.dim))
            g, beta = self._gates(group, raw, group.gather(inputs.beta))
            state = self._initial_state(recurrent, slots, accepted, fresh)
            if group.prefill:
                o, state = chunked_kda(q, k, v, g, beta, state)
                recurrent[slots[live, 0]] = state[live].to(recurrent.dtype)
            elif self.uncommitted is not None:
                o, _, u = recurrent_kda(q, k, v, g, beta, state)
                self.uncommitted.append(
                    VerifyRecord(group.requests[live], slots[live, 0], u[live], mixed[live, :, 1], raw[live])
                )
            else:
                o, states, _ = recurrent_kda(q, k, v, g, beta, state)
                targets = slots[:, : group.width]
                written = group.valid & (targets > NULL_SLOT)
                recurrent[targets[written]] = states[written].to(recurrent.dtype)
            gate = group.gather(inputs.gate).unflatten(-1, (self.heads, self.dim))
            y = rms_norm(self.precision.rounded(o), self.o_norm, O_NORM_EPS) * torch.sigmoid(gate)
            y = torch.where(live[:, None, None], self.precision.rounded(y).flatten(-2), 0.0)
            group.scatter(out, y)
        return out

    def _window(self, rows: Tensor, conv: Tensor, slots: Tensor, accepted: Tensor, fresh: Tensor) -> Tensor:
        """Convolution input [n, 3 + q, 3 * width]: the three inputs before the first row, then the rows."""
        taps = (accepted - 1).unsqueeze(-1) + torch.arange(self.history, device=conv.device)
        history = conv[slots.clamp(min=0).unsqueeze(-1), taps].to(rows.dtype)
        return torch.cat([torch.where(fresh[:, None, None], 0.0, history), rows], 1)

    def _write_conv(self, group: RowGroup, window: Tensor, conv: Tensor, slots: Tensor, live: Tensor) -> None:
        """Prefill leaves the last three inputs; decode the two older taps that can still matter and all rows."""
        if group.prefill:
            source = group.lens.unsqueeze(-1) + torch.arange(self.history, device=conv.device)
            kept = live.unsqueeze(-1).expand_as(source)
        else:
            source = torch.arange(1, group.width + self.history, device=conv.device).expand(len(slots), -1)
            kept = (source < (group.lens + self.history).unsqueeze(-1)) & live.unsqueeze(-1)
        request, column = kept.nonzero(as_tuple=True)
        conv[slots[request], column] = window[request, source[request, column]].to(conv.dtype)

    def _gates(self, group: RowGroup, raw: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay [n, q, heads, d] and beta [n, q, heads]; padded rows leave a state alone."""
        g = decay_gate(raw, self.a_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(logits)
        if not group.uniform:
            padded = ~group.valid[:, :, None]
            g = g.masked_fill(padded.unsqueeze(-1), 0.0)
            beta = beta.masked_fill(padded, 0.0)
        return g, beta

    def commit(self, accepted: Tensor, conv: Tensor, recurrent: Tensor) -> None:
        """RecoverSSM: advance the committed states by the accepted rows of the last step, ``accepted`` [B]."""
        if self.uncommitted is None:
            raise RuntimeError("commit belongs to the recover scheme; native state slots need none")
        for record in self.uncommitted:
            count = accepted[record.requests]
            state = recurrent[record.slots].to(self.precision.compute)
            folded = fold(state, record, count, self.a_log, self.dt_bias, self.lower_bound)
            recurrent[record.slots] = folded.to(recurrent.dtype)
            taps = (count - 1).unsqueeze(-1) + torch.arange(self.history, device=conv.device)
            conv[record.slots, : self.history] = conv[record.slots.unsqueeze(-1), taps]
        self.uncommitted.clear()

    def _initial_state(self, recurrent: Tensor, slots: Tensor, accepted: Tensor, fresh: Tensor) -> Tensor:
        """[n, heads, v, k] in the compute dtype: the state after the last accepted token; zero for a new request."""
        initial = slots.gather(1, (accepted - 1).unsqueeze(-1)).squeeze(-1)
        state = recurrent[initial.clamp(min=0)].to(self.precision.compute)
        return torch.where((fresh | (initial <= NULL_SLOT))[:, None, None, None], 0.0, state)
