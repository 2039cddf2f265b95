"""Cases of embedding, attention residual, projections, dense MLP, o_proj and its reduction, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kimi_k3.decode.numerics.bounded import Bounded
from kimi_k3.decode.numerics.families import Draw
from kimi_k3.decode.numerics.rig import ZERO, Inputs, OpCase, Rig, Shape
from kimi_k3.decode.plan import TWO_PHASE_ROWS

STORED = 2  #: blocks mixed by the cases of the reduction

Outputs = Mapping[str, Tensor]
Oracle = Mapping[str, Bounded]
Drawing = Callable[[Shape, Draw], Inputs]


def over_ranks(x: Bounded, tp: int) -> Bounded:
    """The same value on every rank: [..] -> [R, ..]."""
    return x.map("expand", tp, *x.value.shape)


def owned(x: Bounded, tp: int) -> Bounded:
    """[R src, M, H] by column owner: [R owner, R src, M, W]."""
    return x.map("unflatten", -1, (tp, -1)).map("permute", 2, 0, 1, 3)


def live_rows(shape: Shape, x: Tensor, dim: int = 1) -> Tensor:
    return x.narrow(dim, 0, shape.live)


# -- embed -------------------------------------------------------------------------------------------------------


def _draw_embed(s: Shape, d: Draw) -> Inputs:
    c = s.config
    shard = c.vocab_size // s.tp
    ids = torch.arange(s.rows) * 37 % (s.ranks * shard)
    ids[0], ids[-1] = 0, s.ranks * shard - 1
    return {"ids": ids, "weight": d.activation("embed", s.ranks, shard, c.hidden_size)}


def _run_embed(r: Rig, i: Inputs) -> Outputs:
    out = r.out(r.shape.ranks, r.shape.rows, r.shape.config.hidden_size)
    r.call("embed", i["ids"], i["weight"], out)
    return {"out": r.live(out)}


def _oracle_embed(s: Shape, i: Inputs) -> Oracle:
    return {"out": over_ranks(Bounded.of(i["weight"].flatten(0, 1)[i["ids"][: s.live]]), s.ranks)}


# -- attention residual ------------------------------------------------------------------------------------------


def mixed(prefix: Bounded, blocks: Tensor, query: Tensor, eps: float) -> Bounded:
    """prefix [M, H], blocks [M, n, H] -> mixture [M, H], before any rounding."""
    sources = Bounded.cat([Bounded.of(blocks), prefix.map("unsqueeze", 1)], 1)
    dots = (sources * Bounded.of(query)).sum(-1)
    scale = (sources * sources).sum(-1).scaled(1 / sources.value.shape[-1]).shifted(eps).rsqrt(eps)
    weights = (dots * scale).softmax(-1)
    return (weights.map("unsqueeze", -1) * sources).sum(1)


def _draw_site(s: Shape, d: Draw) -> Inputs:
    h = s.config.hidden_size
    norm, proj = d.norm("norm", h), d.weight("proj", h)
    return {
        "prefix": d.activation("prefix", s.rows, h),
        "blocks": d.activation("blocks", s.rows, s.config.num_blocks, h),
        "query": norm.float() * proj.float(),
        "gamma": d.norm("gamma", h),
    }


def _draw_attn_res(s: Shape, d: Draw) -> Inputs:
    return {**_draw_site(s, d), "delta": d.activation("delta", s.rows, s.config.hidden_size) + 0.0}


def _attn_res_case(s: Shape, label: str, stored: int, opens: bool, final: bool) -> OpCase:
    eps = s.config.rms_norm_eps

    def run(r: Rig, i: Inputs) -> Outputs:
        h = s.config.hidden_size
        prefix, blocks = (r.padded(i[k], 0).repeat(s.ranks, *[1] * i[k].dim()) for k in ("prefix", "blocks"))
        delta = r.full_box(i["delta"].repeat(s.ranks, 1, 1), 1)
        writable = torch.zeros(blocks.shape, dtype=torch.bool)
        if opens:
            writable[:, :, stored] = True
        r.guard(blocks, writable)
        tap, out = r.out(s.ranks, s.rows, h), r.out(s.ranks, s.rows, h)
        r.call("attn_res", delta, prefix, blocks, i["query"], i["gamma"], stored, opens, final, tap, out)
        found = {"out": out, "prefix": prefix, "tap": tap, **({"block": blocks[:, :, stored]} if opens else {})}
        return {**{name: r.live(x) for name, x in found.items()}, "armed": r.not_idle(delta, 1)}

    def oracle(s: Shape, i: Inputs) -> Oracle:
        old, blocks, delta = (live_rows(s, i[k], 0) for k in ("prefix", "blocks", "delta"))
        prefix = (Bounded.of(old) + Bounded.of(delta)).rounded()
        mixture = mixed(prefix, blocks[:, :stored], i["query"], eps) if stored else prefix
        if final:
            mixture = mixture.rounded()
        out = (mixture.rms(eps) * Bounded.of(i["gamma"])).rounded()
        found = {"out": out, "prefix": prefix, "tap": prefix, **({"block": prefix} if opens else {})}
        return {**{name: over_ranks(x, s.ranks) for name, x in found.items()}, "armed": ZERO}

    text = "prefix + delta, " + ("mixture, " if final else "") + "output rounded; mixture and norm FP32"
    return OpCase("attn_res", s, _draw_attn_res, run, oracle, text, label)


# -- projections -------------------------------------------------------------------------------------------------


def _projection_draw(rows: int, columns: int, replicated: int = 0) -> Drawing:
    def draw(s: Shape, d: Draw) -> Inputs:
        weight = d.weight("weight", s.ranks, rows, columns)
        weight[:, :replicated] = weight[0, :replicated].clone()
        return {"x": d.activation("x", s.rows, columns), "weight": weight}

    return draw


def _in_proj_case(s: Shape, kind: str) -> OpCase:
    c, d = s.config, s.config.kda_width // s.tp
    if kind == "kda":
        rows, replicated = 4 * d + c.kda_head_dim + c.kda_num_heads // s.tp, 0
    else:
        replicated = c.q_lora_rank + c.kv_row
        rows = replicated + c.mla_width // s.tp
    rows += -rows % 16

    def run(r: Rig, i: Inputs) -> Outputs:
        out = r.out(s.ranks, s.rows, rows)
        r.call("in_proj", r.padded(i["x"], 0).repeat(s.ranks, 1, 1), i["weight"], replicated, out)
        return {"out": r.live(out)}

    def oracle(s: Shape, i: Inputs) -> Oracle:
        x = Bounded.of(live_rows(s, i["x"], 0).repeat(s.ranks, 1, 1))
        return {"out": x.linear(i["weight"]).rounded()}

    draw = _projection_draw(rows, c.hidden_size, replicated)
    return OpCase("in_proj", s, draw, run, oracle, "output rounded, FP32 accumulation", f"-{kind}")


def _gate_up_case(s: Shape, op: str, width: int) -> OpCase:
    c = s.config

    def run(r: Rig, i: Inputs) -> Outputs:
        out = r.out(s.ranks, s.rows, width)
        r.call(op, r.padded(i["x"], 0).repeat(s.ranks, 1, 1), i["weight"], out)
        return {"out": r.live(out)}

    def oracle(s: Shape, i: Inputs) -> Oracle:
        x = Bounded.of(live_rows(s, i["x"], 0).repeat(s.ranks, 1, 1))
        both = x.linear(i["weight"]).rounded()
        return {"out": both[..., :width].situ(both[..., width:], c.situ_beta, c.situ_linear_beta).rounded()}

    draw = _projection_draw(2 * width, c.hidden_size)
    return OpCase(op, s, draw, run, oracle, "gate, up and SiTU output rounded")


def _draw_partial(width: int) -> Drawing:
    def draw(s: Shape, d: Draw) -> Inputs:
        weight = d.weight("weight", s.ranks, s.config.hidden_size, width)
        return {"x": d.activation("x", s.ranks, s.rows, width), "weight": weight}

    return draw


def _partial_case(s: Shape, op: str, width: int) -> OpCase:
    """Row-parallel product published to the column owners, or to everyone (o_proj, few rows)."""
    one_shot = op == "oproj_publish" and s.rows < TWO_PHASE_ROWS
    columns = s.config.hidden_size // (1 if one_shot else s.tp)

    def run(r: Rig, i: Inputs) -> Outputs:
        box = r.empty_box(s.tp, s.ranks, s.cap, columns, dim=2)
        r.call(op, r.padded(i["x"]), i["weight"], box)
        return {"box": r.live(box, 2)}

    def oracle(s: Shape, i: Inputs) -> Oracle:
        partial = Bounded.of(live_rows(s, i["x"])).linear(i["weight"]).rounded()
        return {"box": over_ranks(partial, s.tp) if one_shot else owned(partial, s.tp)}

    draw = _draw_partial(width)
    return OpCase(op, s, draw, run, oracle, "each rank's partial rounded, FP32 accumulation")


# -- reductions --------------------------------------------------------------------------------------------------


def reduced(partials: Tensor) -> Bounded:
    """[R src, M, N] -> rounded sum over ranks [M, N]."""
    return Bounded.of(partials).sum(0).rounded()


def partial_box(r: Rig, partials: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mailboxes holding ``partials`` [R src, M, N] for the step's reduction: one shot, or two-phase with its gather."""
    s = r.shape
    if s.rows < TWO_PHASE_ROWS:
        return r.full_box(partials.repeat(s.tp, 1, 1, 1), 2), None
    owners = partials.unflatten(-1, (s.tp, -1)).permute(2, 0, 1, 3)
    return r.full_box(owners, 2), r.empty_box(s.tp, s.cap, partials.shape[-1], dim=1)


def _reduce_case(s: Shape, label: str, opens: bool) -> OpCase:
    eps = s.config.rms_norm_eps

    def draw(s: Shape, d: Draw) -> Inputs:
        return {**_draw_site(s, d), "partials": d.activation("partials", s.tp, s.rows, s.config.hidden_size) + 0.0}

    def run(r: Rig, i: Inputs) -> Outputs:
        prefix, blocks = (r.padded(i[k], 0).repeat(s.tp, *[1] * i[k].dim()) for k in ("prefix", "blocks"))
        r.guard(blocks)
        box, gather = partial_box(r, i["partials"])
        out = r.out(s.tp, s.rows, s.config.hidden_size)
        site = (i["query"], i["gamma"], STORED, opens)
        r.call("oproj_reduce_attnres", box, gather, prefix, blocks, *site, out)
        armed = r.not_idle(box, 2) + (0 if gather is None else r.not_idle(gather, 1))
        return {"out": r.live(out), "prefix": r.live(prefix), "armed": armed}

    def oracle(s: Shape, i: Inputs) -> Oracle:
        total = reduced(live_rows(s, i["partials"]))
        prefix = total if opens else (Bounded.of(live_rows(s, i["prefix"], 0)) + total).rounded()
        mixture = mixed(prefix, live_rows(s, i["blocks"], 0)[:, :STORED], i["query"], eps)
        out = (mixture.rms(eps) * Bounded.of(i["gamma"])).rounded()
        return {"out": over_ranks(out, s.tp), "prefix": over_ranks(prefix, s.tp), "armed": ZERO}

    text = "sum over ranks, prefix + sum, output rounded"
    return OpCase("oproj_reduce_attnres", s, draw, run, oracle, text, label)


def _draw_reduce(s: Shape, d: Draw) -> Inputs:
    return {"partials": d.activation("partials", s.tp, s.rows, s.config.hidden_size) + 0.0}


def _run_dense_reduce(r: Rig, i: Inputs) -> Outputs:
    s = r.shape
    box = r.full_box(i["partials"].unflatten(-1, (s.tp, -1)).permute(2, 0, 1, 3), 2)
    delta = r.empty_box(s.tp, s.cap, s.config.hidden_size, dim=1)
    r.call("dense_reduce", box, delta, s.rows)
    return {"delta": r.live(delta), "armed": r.not_idle(box, 2)}


def _oracle_dense_reduce(s: Shape, i: Inputs) -> Oracle:
    return {"delta": over_ranks(reduced(live_rows(s, i["partials"])), s.tp), "armed": ZERO}


# -- prefetch ----------------------------------------------------------------------------------------------------


def _draw_prefetch(s: Shape, d: Draw) -> Inputs:
    return {"weight": d.weight("weight", s.ranks, 32, s.config.hidden_size)}


def _run_prefetch(r: Rig, i: Inputs) -> Outputs:
    r.call("prefetch", "case", [i["weight"]])
    return {"weight": i["weight"]}


def _oracle_prefetch(s: Shape, i: Inputs) -> Oracle:
    return {"weight": Bounded.of(i["weight"])}


def cases(s: Shape) -> Iterator[OpCase]:
    yield from kernel_cases(s)
    yield _reduce_case(s, "-inner", False)
    yield _reduce_case(s, "-opens", True)
    yield OpCase("dense_reduce", s, _draw_reduce, _run_dense_reduce, _oracle_dense_reduce, "sum over ranks rounded")


def kernel_cases(s: Shape) -> Iterator[OpCase]:
    """Of the ops that one rank alone can run: none of them reads what other ranks published."""
    c, stored = s.config, s.config.num_blocks
    dense, shared = c.intermediate_size // s.tp, c.shared_intermediate_size // s.tp
    yield OpCase("embed", s, _draw_embed, _run_embed, _oracle_embed, "exact")
    yield _attn_res_case(s, "-first", 0, True, False)
    yield _attn_res_case(s, "-opens", stored - 1, True, False)
    yield _attn_res_case(s, "-inner", stored, False, False)
    yield _attn_res_case(s, "-final", stored, False, True)
    yield _in_proj_case(s, "kda")
    yield _in_proj_case(s, "mla")
    yield _partial_case(s, "oproj_publish", c.kda_width // s.tp)
    yield _gate_up_case(s, "dense_gate_up", dense)
    yield _partial_case(s, "dense_down_push", dense)
    yield _gate_up_case(s, "shared_gate_up", shared)
    yield _partial_case(s, "shared_down_push", shared)
    yield OpCase("prefetch", s, _draw_prefetch, _run_prefetch, _oracle_prefetch, "changes nothing")
