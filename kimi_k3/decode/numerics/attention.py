"""Cases of the KDA core and of the MLA query, core and value ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kimi_k3.decode.numerics.bounded import BF16, Bounded, half_ulp
from kimi_k3.decode.numerics.families import Draw
from kimi_k3.decode.numerics.residual import over_ranks
from kimi_k3.decode.numerics.rig import ZERO, Inputs, OpCase, Rig, Shape, bits
from kimi_k3.reference.kda import O_NORM_EPS
from kimi_k3.reference.numerics import cast

PAGE = 4
MAX_PAGES = 6  #: per request
SPLITS = 3

Outputs = Mapping[str, Tensor]
Oracle = Mapping[str, Bounded]


def _padding(r: Rig, out: Tensor) -> Tensor:
    """Rows that must be zero, [R, padding, N]."""
    return out[:, r.shape.live :]


def _zeros(s: Shape, width: int) -> Bounded:
    return Bounded.of(torch.zeros(s.ranks, s.rows - s.live, width))


# -- KDA core ----------------------------------------------------------------------------------------------------


def _draw_kda(s: Shape, d: Draw) -> Inputs:
    c, tp, ranks, q = s.config, s.tp, s.ranks, s.query_len
    width, heads, dim, taps = c.kda_width // tp, c.kda_num_heads // tp, c.kda_head_dim, c.short_conv_kernel_size
    rows = 4 * width + dim + heads
    rows += -rows % 16
    slots = 1 + s.requests * q + 2  # the null slot, everybody's, two that nobody owns
    table = 1 + d.permutation("slots", slots - 1)[: s.requests * q].view(s.requests, q)
    table[s.live_requests :] = 0
    return {
        "projected": d.activation("projected", ranks, s.rows, rows),
        "f_b": d.weight("f_b", ranks, width, dim),
        "conv_weight": d.normal("conv", ranks, 3, width, taps, std=0.5),
        "a_log": d.normal("a_log", ranks, heads, std=0.5),
        "dt_bias": d.normal("dt_bias", ranks, width),
        "o_norm": d.norm("o_norm", dim, dtype=torch.float32),
        "conv": d.activation("history", slots, taps - 1 + q - 1, 3 * ranks * width),
        "recurrent": d.normal("recurrent", slots, ranks * heads, dim, dim, std=0.3),
        "slots": table,
        "accepted": 1 + torch.arange(s.requests) % q,
    }


def _run_kda(r: Rig, i: Inputs) -> Outputs:
    s, table = r.shape, i["slots"]
    kept = s.config.short_conv_kernel_size - 2 + s.query_len  # conv rows a step rewrites
    conv, recurrent = i["conv"].clone(), i["recurrent"].clone()
    live = table[: s.live_requests]
    owned = torch.zeros(len(conv), dtype=torch.bool)
    owned[live.flatten()] = True
    conv[~owned], recurrent[~owned] = r.poison, r.poison  # unused slots, the null slot among them
    writable = torch.zeros(conv.shape, dtype=torch.bool)
    writable[live[:, 0], :kept] = True
    r.guard(conv, writable)
    r.guard(recurrent, owned.view(-1, 1, 1, 1).expand_as(recurrent))
    out = r.out(s.ranks, s.rows, i["f_b"].shape[1])
    static = (i["f_b"], i["conv_weight"], i["a_log"], i["dt_bias"], i["o_norm"])
    r.call("kda_core", r.padded(i["projected"]), *static, conv, recurrent, table, i["accepted"], out)
    return {
        "out": r.live(out),
        "padding": _padding(r, out),
        "recurrent": recurrent[live],
        "conv": conv[live[:, 0], :kept],
    }


def _oracle_kda(s: Shape, i: Inputs) -> Oracle:
    c, tp, ranks, q, n = s.config, s.tp, s.ranks, s.query_len, s.live_requests
    width, dim, heads, taps = c.kda_width // tp, c.kda_head_dim, c.kda_num_heads // tp, c.short_conv_kernel_size
    projected = Bounded.of(i["projected"][:, : s.live])
    qkv, gate = projected[..., : 3 * width], projected[..., 3 * width : 4 * width]
    factors = projected[..., 4 * width : 4 * width + dim]
    beta = projected[..., 4 * width + dim : 4 * width + dim + heads].sigmoid()
    raw = factors.linear(i["f_b"]).rounded() + Bounded.of(i["dt_bias"]).map("unsqueeze", 1)
    rate = Bounded.of(i["a_log"]).exp().map("unsqueeze", -1).map("unsqueeze", 1)
    decay = (raw.map("unflatten", -1, (heads, dim)) * rate).sigmoid().scaled(c.gate_lower_bound).exp()

    outputs, states, histories = [], [], []
    for b in range(n):
        first = int(i["accepted"][b]) - 1
        taken = i["conv"][i["slots"][b, 0], first : first + taps - 1]  # [taps - 1, 3 A]
        history = taken.unflatten(-1, (3, ranks, width)).permute(2, 0, 1, 3).double()  # [R, taps - 1, 3, width]
        rows = qkv[:, b * q : (b + 1) * q].map("unflatten", -1, (3, width))
        window = Bounded.cat([Bounded.of(history), rows], 1)
        new = window.value[:, 1:].permute(1, 2, 0, 3).flatten(1)  # [taps - 2 + q, 3 A]
        histories.append(Bounded.of(new))
        state = Bounded.of(i["recurrent"][i["slots"][b, first]].unflatten(0, (ranks, heads)))
        for t in range(q):
            row = b * q + t
            products = window[:, t : t + taps].map("permute", 0, 2, 3, 1) * Bounded.of(i["conv_weight"])
            mixed = products.sum(-1).silu().map("unflatten", -1, (heads, dim))
            qh, kh, vh = mixed[:, 0].l2().scaled(dim**-0.5), mixed[:, 1].l2(), mixed[:, 2]
            state = state * decay[:, row].map("unsqueeze", -2)
            read = state.matmul(kh.map("unsqueeze", -1)).map("squeeze", -1)
            u = (vh - read) * beta[:, row].map("unsqueeze", -1)
            state = state + u.map("unsqueeze", -1) * kh.map("unsqueeze", -2)
            o = state.matmul(qh.map("unsqueeze", -1)).map("squeeze", -1)
            normed = o.rms(O_NORM_EPS) * Bounded.of(i["o_norm"])
            outputs.append((normed.map("flatten", -2) * gate[:, row].sigmoid()).rounded().map("unsqueeze", 1))
            states.append(state.map("flatten", 0, 1).map("unsqueeze", 0))
    return {
        "out": Bounded.cat(outputs, 1),
        "padding": _zeros(s, width),
        "recurrent": Bounded.cat(states, 0).map("unflatten", 0, (n, q)),
        "conv": Bounded.cat([h.map("unsqueeze", 0) for h in histories], 0),
    }


# -- MLA query ---------------------------------------------------------------------------------------------------


def _pages(s: Shape, d: Draw) -> tuple[Tensor, Tensor]:
    """Shuffled block tables [B, MAX_PAGES] and tokens before the step [B]; one page belongs to nobody."""
    table = d.permutation("pages", s.requests * MAX_PAGES).view(s.requests, MAX_PAGES)
    lengths = 1 + torch.arange(s.requests) * 5 % (MAX_PAGES * PAGE - s.query_len)
    return table, lengths


def _positions(s: Shape, lengths: Tensor) -> Tensor:
    """[B, q]"""
    return lengths.unsqueeze(1) + torch.arange(s.query_len)


def _draw_query(s: Shape, d: Draw) -> Inputs:
    c, tp = s.config, s.tp
    width = c.q_lora_rank + c.kv_row + c.mla_width // tp
    projected = d.activation("projected", tp, s.rows, width + -width % 16)
    projected[..., : c.q_lora_rank + c.kv_row] = projected[0, :, : c.q_lora_rank + c.kv_row]
    table, lengths = _pages(s, d)
    at = _positions(s, lengths)
    mapping = (table.gather(1, at // PAGE) * PAGE + at % PAGE).flatten()
    mapping[s.live :] = -1
    return {
        "projected": projected,
        "q_norm": d.norm("q_norm", c.q_lora_rank),
        "kv_norm": d.norm("kv_norm", c.kv_lora_rank),
        "q_b": d.weight("q_b", tp, s.heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        "w_uk": d.weight("w_uk", tp, s.heads, c.qk_nope_head_dim, c.kv_lora_rank),
        "slot_mapping": mapping,
        "lens": torch.where(mapping >= 0, at.flatten() + 1, 0),
        "pages": torch.tensor([1 + s.requests * MAX_PAGES]),
    }


def _run_query(r: Rig, i: Inputs) -> Outputs:
    s, c = r.shape, r.shape.config
    kv = r.out(int(i["pages"]), PAGE, c.kv_row, dtype=s.precision.kv)
    mapping = i["slot_mapping"]
    writable = torch.zeros(kv.shape, dtype=torch.bool)
    writable.view(-1, c.kv_row)[mapping[: s.live]] = True
    r.guard(kv, writable)
    rows = r.out(s.tp, s.rows, c.kv_row, dtype=kv.dtype)
    if s.dcp > 1:
        query = r.empty_box(s.tp, s.tp, s.cap, s.heads, c.kv_row, dim=2, dtype=s.query_dtype)
    else:
        query = r.out(s.tp, s.rows, s.heads, c.kv_row, dtype=s.query_dtype)
    static = (i["q_norm"], i["kv_norm"], i["q_b"], i["w_uk"])
    r.call("mla_query", r.padded(i["projected"]), *static, kv, mapping, i["lens"], rows, query)
    stored = kv.view(-1, c.kv_row)[mapping[: s.live]]
    return {"query": r.live(query, query.dim() - 3), "rows": r.live(rows), "kv": stored}


def _oracle_query(s: Shape, i: Inputs) -> Oracle:
    c, eps = s.config, s.config.rms_norm_eps
    x = Bounded.of(i["projected"][:, : s.live])
    qa, lora = c.q_lora_rank, c.kv_lora_rank
    normed = (x[..., :qa].rms(eps) * Bounded.of(i["q_norm"])).rounded()
    expanded = normed.linear(i["q_b"]).rounded().map("unflatten", -1, (s.heads, -1))
    nope = expanded[..., : c.qk_nope_head_dim].map("transpose", 1, 2)
    absorbed = nope.matmul(Bounded.of(i["w_uk"])).rounded().map("transpose", 1, 2)
    latent = (x[..., qa : qa + lora].rms(eps) * Bounded.of(i["kv_norm"])).rounded()
    rows = Bounded.cat([latent, x[..., qa + lora : qa + c.kv_row]], -1).stored(s.precision.kv)
    query = Bounded.cat([absorbed, expanded[..., c.qk_nope_head_dim :]], -1).stored(s.query_dtype)
    return {"query": over_ranks(query, s.tp) if s.dcp > 1 else query, "rows": rows, "kv": rows[0]}


# -- MLA core ----------------------------------------------------------------------------------------------------


def _draw_core(s: Shape, d: Draw) -> Inputs:
    c = s.config
    table, lengths = _pages(s, d)
    lens = (_positions(s, lengths) + 1).flatten()
    lens[s.live :] = 0
    return {
        "query": cast(d.activation("query", s.tp, s.rows, s.heads, c.kv_row), s.query_dtype),
        "kv": cast(d.activation("kv", 1 + s.requests * MAX_PAGES, PAGE, c.kv_row), s.precision.kv),
        "block_tables": table,
        "lens": lens,
    }


def _context(s: Shape, i: Inputs, request: int) -> Tensor:
    """Flat cache rows of a request, in order, those of the step included."""
    length = int(i["lens"][(request + 1) * s.query_len - 1])
    at = torch.arange(length)
    return i["block_tables"][request, at // PAGE] * PAGE + at % PAGE


def _run_core(r: Rig, i: Inputs) -> Outputs:
    s, c = r.shape, r.shape.config
    kv, row = i["kv"].clone(), s.config.kv_row
    used = torch.zeros(kv.shape[0] * PAGE, dtype=torch.bool)
    for request in range(s.live_requests):
        used[_context(s, i, request)] = True
    garbage = bits(r.out(1, dtype=kv.dtype)).repeat(row)  # FP8 cannot be filled where a mask says, its bytes can
    bits(kv.view(-1, row))[~used] = garbage
    r.guard(kv)
    heads, lora, compute = s.heads, c.kv_lora_rank, s.precision.compute
    if s.dcp > 1:
        query = r.full_box(i["query"].expand(s.tp, *i["query"].shape), 2)
        partial = r.empty_box(s.tp, s.tp, s.cap, heads, lora, dim=2)
        lse = r.empty_box(s.tp, s.tp, s.cap, heads, dim=2, dtype=compute)
    else:
        query = r.padded(i["query"])
        partial = r.out(SPLITS, s.tp, s.rows, heads, lora, dtype=compute)
        lse = r.out(SPLITS, s.tp, s.rows, heads, dtype=compute)
    r.call("mla_core", query, kv, i["block_tables"], i["lens"], partial, lse)
    # How the keys are split is the provider's affair; what the parts add up to is not. Merged exactly.
    logs, parts = r.live(lse, 2).double(), r.live(partial, 2).double()
    share = torch.softmax(logs, 0).unsqueeze(-1)
    armed = r.not_idle(query, 2) if s.dcp > 1 else torch.zeros(1)
    return {"latent": (share * parts).sum(0), "lse": torch.logsumexp(logs, 0), "armed": armed}


def _oracle_core(s: Shape, i: Inputs) -> Oracle:
    c = s.config
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    flat = i["kv"].view(-1, c.kv_row)
    latents, logs = [], []
    for row in range(s.live):
        keys = Bounded.of(flat[_context(s, i, row // s.query_len)[: int(i["lens"][row])]])
        scores = Bounded.of(i["query"][:, row]).matmul(keys.map("transpose", 0, 1)).scaled(scale)  # [R, h, n]
        latent = scores.softmax(-1).matmul(keys[:, : c.kv_lora_rank])
        if s.dcp > 1:  # each rank's part is rounded; the shares add up to one, and no part exceeds the largest key
            largest = keys.value[:, : c.kv_lora_rank].abs().amax(0).expand_as(latent.value)
            latent = Bounded(latent.value, latent.error + half_ulp(largest, *BF16))
        latents.append(latent.map("unsqueeze", 1))
        total = torch.logsumexp(scores.value, -1)
        worst = scores.error.amax(-1) + 2.0**-20 * (1 + scores.value.abs().amax(-1))
        logs.append(Bounded(total, worst).map("unsqueeze", 1))
    return {"latent": Bounded.cat(latents, 1), "lse": Bounded.cat(logs, 1), "armed": ZERO}


# -- MLA value ---------------------------------------------------------------------------------------------------


def _draw_value(s: Shape, d: Draw) -> Inputs:
    c = s.config
    width = c.q_lora_rank + c.kv_row + c.mla_width // s.tp
    lens = torch.ones(s.rows, dtype=torch.int64)
    lens[s.live :] = 0
    parts, dtype = (s.tp, s.precision.activations) if s.dcp > 1 else (SPLITS, s.precision.compute)
    lse = d.normal("lse", parts, s.tp, s.rows, s.heads, std=2.0)
    lse[-1, :, ::2] = -3e38  # an empty part
    return {
        "partial": d.activation("partial", parts, s.tp, s.rows, s.heads, c.kv_lora_rank, dtype=dtype) + 0.0,
        "lse": lse,
        "lens": lens,
        "w_uv": d.weight("w_uv", s.tp, s.heads, c.v_head_dim, c.kv_lora_rank),
        "projected": d.activation("projected", s.tp, s.rows, width + -width % 16),
    }


def _run_value(r: Rig, i: Inputs) -> Outputs:
    s = r.shape
    out = r.out(s.tp, s.rows, s.config.mla_width // s.tp)
    hold = r.full_box if s.dcp > 1 else r.padded
    partial, lse = hold(i["partial"], 2), hold(i["lse"], 2)
    r.call("mla_value", partial, lse, i["lens"], i["w_uv"], r.padded(i["projected"]), out)
    armed = r.not_idle(partial, 2) + r.not_idle(lse, 2) if s.dcp > 1 else torch.zeros(1)
    return {"out": r.live(out), "padding": _padding(r, out), "armed": armed}


def _oracle_value(s: Shape, i: Inputs) -> Oracle:
    c = s.config
    share = Bounded.of(i["lse"][:, :, : s.live]).softmax(0).map("unsqueeze", -1)
    latent = (share * Bounded.of(i["partial"][:, :, : s.live])).sum(0).rounded()  # [R, M, h, lora]
    value = latent.map("transpose", 1, 2).linear(i["w_uv"]).rounded().map("transpose", 1, 2).map("flatten", 2)
    start = c.q_lora_rank + c.kv_row
    gate = Bounded.of(i["projected"][:, : s.live, start : start + c.mla_width // s.tp])
    out = (value * gate.sigmoid()).rounded()
    return {"out": out, "padding": _zeros(s, c.mla_width // s.tp), "armed": ZERO}


def cases(s: Shape) -> Iterator[OpCase]:
    """KDA and MLA."""
    yield kda_case(s)
    yield from mla_cases(s)


def kda_case(s: Shape) -> OpCase:
    kda = "raw decay logits and output rounded; convolution, gates, recurrence, norm FP32; taps stored as they came"
    return OpCase("kda_core", s, _draw_kda, _run_kda, _oracle_kda, kda)


def mla_cases(s: Shape) -> Iterator[OpCase]:
    """The ops that context parallelism and the dtype of the KV cache change."""
    query = "normalised q_a and latent, q_b output, absorbed query rounded"
    yield OpCase("mla_query", s, _draw_query, _run_query, _oracle_query, query)
    core = "FP32; under context parallelism each rank's part rounded"
    yield OpCase("mla_core", s, _draw_core, _run_core, _oracle_core, core)
    yield OpCase("mla_value", s, _draw_value, _run_value, _oracle_value, "merged latent, value, product rounded")
