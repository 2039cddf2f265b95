"""Cases of the MoE front, routing, experts and tail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kimi_k3.decode.numerics.bounded import Bounded
from kimi_k3.decode.numerics.families import Draw
from kimi_k3.decode.numerics.residual import live_rows, over_ranks, owned, partial_box, reduced
from kimi_k3.decode.numerics.rig import ZERO, Inputs, OpCase, Rig, Shape
from kimi_k3.decode.plan import TWO_PHASE_ROWS
from kimi_k3.reference.mxfp4 import dequantize
from kimi_k3.reference.weights import MXFP4Tensor

SCORE_GAP = 1e-6  #: experts whose keys are closer may be chosen in either order

Outputs = Mapping[str, Tensor]
Oracle = Mapping[str, Bounded]


# -- front -------------------------------------------------------------------------------------------------------


def _widths(s: Shape) -> tuple[int, int, int]:
    """Router rows, their padded count, latent rows of one rank."""
    experts = s.config.num_experts // s.tp
    return experts, experts + -experts % 16, s.config.routed_expert_hidden_size // s.tp


def _draw_front(s: Shape, d: Draw) -> Inputs:
    experts, padded, latent = _widths(s)
    weight = d.weight("weight", s.ranks, padded + latent, s.config.hidden_size)
    weight[:, experts:padded] = 0
    return {"x": d.activation("x", s.rows, s.config.hidden_size), "weight": weight}


def _run_front(r: Rig, i: Inputs) -> Outputs:
    s, c = r.shape, r.shape.config
    experts, _, width = (s.ranks * n for n in _widths(s))  # columns that the ranks here publish
    logits = r.empty_box(s.tp, s.cap, c.num_experts, dim=1, dtype=s.precision.compute, columns=experts)
    latent = r.empty_box(s.tp, s.cap, c.routed_expert_hidden_size, dim=1, columns=width)
    r.call("moe_front", r.padded(i["x"], 0).repeat(s.ranks, 1, 1), i["weight"], logits, latent)
    return {"logits": r.live(logits)[..., :experts], "latent": r.live(latent)[..., :width]}


def _oracle_front(s: Shape, i: Inputs) -> Oracle:
    experts, padded, _ = _widths(s)
    y = Bounded.of(live_rows(s, i["x"], 0).repeat(s.ranks, 1, 1)).linear(i["weight"])

    def gathered(part: Bounded) -> Bounded:
        return over_ranks(part.map("transpose", 0, 1).map("flatten", 1), s.tp)

    return {"logits": gathered(y[..., :experts]), "latent": gathered(y[..., padded:].rounded())}


# -- routing -----------------------------------------------------------------------------------------------------


def _draw_route(s: Shape, d: Draw) -> Inputs:
    c = s.config
    bias = d.coded(c.num_experts) / 64 if d.family == "coded" else d.normal("bias", c.num_experts, std=0.05)
    return {
        "logits": d.activation("logits", s.rows, c.num_experts, dtype=torch.float32) + 0.0,
        "latent": d.activation("latent", s.rows, c.routed_expert_hidden_size) + 0.0,
        "bias": bias,
    }


def _run_route(r: Rig, i: Inputs) -> Outputs:
    s, c = r.shape, r.shape.config
    k = c.num_experts_per_token
    logits = r.full_box(i["logits"].repeat(s.tp, 1, 1), 1)
    box = r.full_box(i["latent"].repeat(s.tp, 1, 1), 1)
    latent = r.out(s.tp, s.rows, c.routed_expert_hidden_size)
    ids, weights = r.out(s.tp, s.rows, k, dtype=torch.int64), r.out(s.tp, s.rows, k)
    order = r.out(s.tp, s.rows * k, dtype=torch.int64)
    counts = r.out(s.tp, c.num_experts, dtype=torch.int64)
    r.call("route", logits, box, i["bias"], latent, ids, weights, order, counts)
    return {
        "ids": r.live(ids),
        "weights": r.live(weights),
        "latent": r.live(latent),
        "units": _unit_errors(ids, order, counts),
        "armed": r.not_idle(logits, 1) + r.not_idle(box, 1),
    }


def _unit_errors(ids: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """What is wrong with the unit table: pairs missing, out of expert order, or miscounted, [1]."""
    pairs = ids.flatten(1)
    complete = order.sort(dim=-1).values != torch.arange(pairs.shape[1])
    experts = pairs.gather(1, order.clamp(0, pairs.shape[1] - 1))
    unordered = experts[:, 1:] < experts[:, :-1]
    expected = torch.zeros_like(counts).scatter_add_(1, pairs, torch.ones_like(pairs))
    return (complete.sum() + unordered.sum() + (counts != expected).sum()).view(1)


def _oracle_route(s: Shape, i: Inputs) -> Oracle:
    c, k = s.config, s.config.num_experts_per_token
    logits, bias = i["logits"][: s.live].double(), i["bias"].double()
    scores = Bounded.of(logits).sigmoid()
    keys = scores.value + bias
    best = keys.sort(dim=-1, descending=True, stable=True)
    ids = best.indices[:, :k]
    # A choice is free where a neighbour in the order is this close, unless both have the very same logit and bias.
    same = (logits.gather(1, best.indices).diff(dim=1) == 0) & (bias[best.indices].diff(dim=1) == 0)
    tied = (best.values.diff(dim=1).abs() <= SCORE_GAP) & ~same
    free = torch.zeros(len(keys), k + 1, dtype=torch.bool)
    free[:, 1:] = tied[:, :k]
    free[:, :-1] |= tied[:, :k]
    freedom = torch.where(free[:, :k], torch.inf, 0.0)

    chosen = Bounded(scores.value.gather(1, ids), scores.error.gather(1, ids))
    weights = (chosen * chosen.sum(-1, keepdim=True).reciprocal()).scaled(c.routed_scaling_factor).rounded()
    weights.error += freedom.amax(-1, keepdim=True)  # another last expert changes every weight of its row
    return {
        "ids": over_ranks(Bounded(ids.double(), freedom), s.tp),
        "weights": over_ranks(weights, s.tp),
        "latent": over_ranks(Bounded.of(i["latent"][: s.live]), s.tp),
        "units": ZERO,
        "armed": ZERO,
    }


# -- experts -----------------------------------------------------------------------------------------------------


def _expert_sizes(s: Shape) -> tuple[int, int]:
    """Live and padded intermediate columns of one rank."""
    live = s.config.moe_intermediate_size // s.tp
    return live, live + -live % s.config.mxfp4_group


def _routing(s: Shape, d: Draw) -> Inputs:
    """A choice of experts that leaves some unused and overloads others; equal on all ranks."""
    c, k = s.config, s.config.num_experts_per_token
    skew = d.normal("skew", c.num_experts, std=2.0)
    ids = (d.normal("choice", s.rows, c.num_experts) + skew).topk(k, -1).indices.repeat(s.tp, 1, 1)
    pairs = ids.flatten(1)
    counts = torch.zeros(s.tp, c.num_experts, dtype=torch.int64).scatter_add_(1, pairs, torch.ones_like(pairs))
    return {"ids": ids, "order": pairs.argsort(dim=-1, stable=True), "counts": counts}


def _scales(d: Draw, *shape: int) -> Tensor:
    return d.bytes("scale", *shape, low=120, high=127)


def _draw_fc1(s: Shape, d: Draw) -> Inputs:
    c, (live, padded) = s.config, _expert_sizes(s)
    packed = d.bytes("packed", s.tp, c.num_experts, 2, padded, c.routed_expert_hidden_size // 2)
    packed[:, :, :, live:] = 0
    return {
        **_routing(s, d),
        "latent": d.activation("latent", s.rows, c.routed_expert_hidden_size),
        "packed": packed.flatten(2, 3),
        "scale": _scales(d, s.tp, c.num_experts, 2 * padded, c.routed_expert_hidden_size // c.mxfp4_group),
    }


def _run_fc1(r: Rig, i: Inputs) -> Outputs:
    s, k = r.shape, r.shape.config.num_experts_per_token
    hidden = r.out(s.tp, s.rows * k, _expert_sizes(s)[1])
    latent = r.padded(i["latent"], 0).repeat(s.tp, 1, 1)
    r.call("fc1", latent, i["order"], i["counts"], i["packed"], i["scale"], hidden)
    return {"hidden": hidden[:, : s.live * k]}


def _oracle_fc1(s: Shape, i: Inputs) -> Oracle:
    c, padded = s.config, _expert_sizes(s)[1]
    weight = dequantize(MXFP4Tensor(i["packed"], i["scale"]), torch.float64)  # [R, E, 2 I, L]
    rows = []
    for row in range(s.live):
        chosen = weight[:, i["ids"][0, row]].flatten(1, 2)  # [R, K 2 I, L]
        x = Bounded.of(i["latent"][row].repeat(s.tp, 1, 1))
        both = x.linear(chosen).map("view", s.tp, -1, 2, padded)
        rows.append(both[:, :, 0].situ(both[:, :, 1], c.situ_beta, c.situ_linear_beta).rounded())
    return {"hidden": Bounded.cat(rows, 1)}


def _draw_fc2(s: Shape, d: Draw) -> Inputs:
    c, k, (live, padded) = s.config, s.config.num_experts_per_token, _expert_sizes(s)
    hidden = d.activation("hidden", s.tp, s.rows * k, padded)
    hidden[..., live:] = 0
    weights = torch.softmax(d.normal("weights", s.rows, k), -1).bfloat16()
    return {
        **_routing(s, d),
        "hidden": hidden,
        "weights": weights.repeat(s.tp, 1, 1),
        "packed": d.bytes("packed", s.tp, c.num_experts, c.routed_expert_hidden_size, padded // 2),
        "scale": _scales(d, s.tp, c.num_experts, c.routed_expert_hidden_size, padded // c.mxfp4_group),
    }


def _run_fc2(r: Rig, i: Inputs) -> Outputs:
    s, k = r.shape, r.shape.config.num_experts_per_token
    one_shot = s.rows < TWO_PHASE_ROWS
    box = r.empty_box(s.tp, s.tp, s.cap, s.config.routed_expert_hidden_size // (1 if one_shot else s.tp), dim=2)
    hidden = i["hidden"].clone()
    hidden[:, s.live * k :] = r.poison
    routing = (r.padded(i["weights"]), i["order"], i["counts"])
    r.call("fc2_publish", hidden, *routing, i["packed"], i["scale"], box)
    return {"box": r.live(box, 2)}


def _oracle_fc2(s: Shape, i: Inputs) -> Oracle:
    k = s.config.num_experts_per_token
    weight = dequantize(MXFP4Tensor(i["packed"], i["scale"]), torch.float64)  # [R, E, L, I]
    rows = []
    for row in range(s.live):
        chosen = weight[:, i["ids"][0, row]]  # [R, K, L, I]
        hidden = Bounded.of(i["hidden"][:, row * k : (row + 1) * k]).map("unsqueeze", 2)
        outputs = hidden.linear(chosen).map("squeeze", 2)  # [R, K, L]
        total = (outputs * Bounded.of(i["weights"][:, row]).map("unsqueeze", -1)).sum(1)
        rows.append(total.rounded().map("unsqueeze", 1))
    partial = Bounded.cat(rows, 1)
    return {"box": over_ranks(partial, s.tp) if s.rows < TWO_PHASE_ROWS else owned(partial, s.tp)}


# -- tail --------------------------------------------------------------------------------------------------------


def _draw_tail(s: Shape, d: Draw) -> Inputs:
    c = s.config
    return {
        "latent": d.activation("latent", s.tp, s.rows, c.routed_expert_hidden_size) + 0.0,
        "shared": d.activation("shared", s.tp, s.rows, c.hidden_size) + 0.0,
        "norm": d.norm("norm", c.routed_expert_hidden_size),
        "up": d.weight("up", s.tp, c.hidden_size // s.tp, c.routed_expert_hidden_size),
    }


def _run_tail(r: Rig, i: Inputs) -> Outputs:
    s = r.shape
    box, gather = partial_box(r, i["latent"])
    shared = r.full_box(i["shared"].unflatten(-1, (s.tp, -1)).permute(2, 0, 1, 3), 2)
    delta = r.empty_box(s.tp, s.cap, s.config.hidden_size, dim=1)
    r.call("moe_tail", box, gather, shared, i["norm"], i["up"], delta, s.rows)
    armed = r.not_idle(box, 2) + r.not_idle(shared, 2) + (0 if gather is None else r.not_idle(gather, 1))
    return {"delta": r.live(delta), "armed": armed}


def _oracle_tail(s: Shape, i: Inputs) -> Oracle:
    latent = reduced(live_rows(s, i["latent"]))
    normed = (latent.rms(s.config.rms_norm_eps) * Bounded.of(i["norm"])).rounded()
    routed = normed.linear(i["up"].flatten(0, 1)).rounded()
    delta = (routed + reduced(live_rows(s, i["shared"]))).rounded()
    return {"delta": over_ranks(delta, s.tp), "armed": ZERO}


def front_case(s: Shape) -> OpCase:
    return OpCase("moe_front", s, _draw_front, _run_front, _oracle_front, "logits FP32, latent columns rounded")


def cases(s: Shape) -> Iterator[OpCase]:
    yield front_case(s)
    route = "weights rounded; ids exact where the gap to a neighbour exceeds 1e-6"
    yield OpCase("route", s, _draw_route, _run_route, _oracle_route, route)
    yield OpCase("fc1", s, _draw_fc1, _run_fc1, _oracle_fc1, "SiTU output rounded, gate and up FP32")
    yield OpCase("fc2_publish", s, _draw_fc2, _run_fc2, _oracle_fc2, "weighted sum over experts rounded once per rank")
    tail = "latent sum, its norm, up-projection, shared sum, total rounded"
    yield OpCase("moe_tail", s, _draw_tail, _run_tail, _oracle_tail, tail)
