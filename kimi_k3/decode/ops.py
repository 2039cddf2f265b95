"""The ops of the schedule: ``torch.library`` operators with a provider behind each one.

Every op is a ``kimi_k3::<name>`` operator, so a profiler sees it on a CPU and a GPU alike. Its first argument is the
handle of an :class:`OpContext`, which knows the model, the ranks and who serves each op; the rest are tensors and
small integers. Outputs are written in place into buffers of the caller: nothing is allocated for results, and what
an op must not write can be checked. Ranks are a leading tensor dimension of everything rank-local.

Notation: R ranks, M rows, B requests, H hidden, L latent, E experts, K chosen experts, W = H / R, h local heads,
d local width of the heads, I local intermediate, cap mailbox rows (>= M). Activations are in the activation dtype
of the precision, "fp32" stands for its compute dtype. Mailboxes are described in ``mesh.py``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import Precision

if TYPE_CHECKING:
    from kimi_k3.decode.registry import Provider

NAMESPACE = "kimi_k3"

#: name -> arguments after the context handle, in ``torch.library`` schema syntax. What each op does and where it
#: rounds is said in :data:`ROUNDING` and in the providers' docstrings.
SCHEMAS: dict[str, str] = {
    # ids [M] int64, weight [R, V / R, H] -> out [R, M, H]
    "embed": "Tensor ids, Tensor weight, Tensor(a!) out",
    # delta [R, cap, H] mailbox of the previous feed-forward (None before layer 0), prefix [R, M, H],
    # blocks [R, M, n, H], query [H] fp32, gamma [H] -> out [R, M, H], tap [R, M, H]: the updated prefix, for a drafter
    "attn_res": "Tensor(a!)? delta, Tensor(b!) prefix, Tensor(c!) blocks, Tensor query, Tensor gamma, int stored, "
    "bool opens, bool final, Tensor(d!)? tap, Tensor(e!) out",
    # x [R, M, H], weight [R, rows, H], its first `replicated` rows equal on all ranks -> out [R, M, rows]
    "in_proj": "Tensor x, Tensor weight, int replicated, Tensor(a!) out",
    # projected [R, M, rows] = q | k | v | gate (d each) | f_a | beta (h) | pad; f_b [R, d, F],
    # conv_weight [R, 3, d, taps], a_log [R, h], dt_bias [R, d], o_norm [head_dim], conv [slots, taps - 1 + DL, 3 A],
    # recurrent [slots, heads, v, k], slots [B, 1 + DL], accepted [B] -> out [R, M, d]
    "kda_core": "Tensor projected, Tensor f_b, Tensor conv_weight, Tensor a_log, Tensor dt_bias, Tensor o_norm, "
    "Tensor(a!) conv, Tensor(b!) recurrent, Tensor slots, Tensor accepted, Tensor(c!) out",
    # projected [R, M, rows] = q_a | kv latent | k_rope | gate (d) | pad; q_b [R, h (nope + rope), q_lora],
    # w_uk [R, h, nope, lora], kv [pages, page, row], slot_mapping [M]
    # -> rows [R, M, row]: each rank's cache rows, query [R, M, h, row]; under context parallelism query is the mailbox
    # [R dst, R src, cap, h, row]
    "mla_query": "Tensor projected, Tensor q_norm, Tensor kv_norm, Tensor q_b, Tensor w_uk, Tensor(a!) kv, "
    "Tensor slot_mapping, Tensor lens, Tensor(b!) rows, Tensor(c!) query",
    # query as above, block_tables [B, pages], lens [M] tokens a row sees (0 = padding)
    # -> partial [splits, R, M, h, lora] fp32, lse [splits, R, M, h] fp32, natural log; under context parallelism the
    # mailboxes [R src, R owner, cap, h, lora] (rounded) and [R src, R owner, cap, h]
    "mla_core": "Tensor(a!) query, Tensor kv, Tensor block_tables, Tensor lens, Tensor(b!) partial, Tensor(c!) lse",
    # partial, lse and projected as above, w_uv [R, h, v, lora] -> out [R, M, d]
    "mla_value": "Tensor(a!) partial, Tensor(b!) lse, Tensor lens, Tensor w_uv, Tensor projected, Tensor(c!) out",
    # x [R, M, d], weight [R, H, d]
    # -> box: partial sums, one shot [R dst, R src, cap, H] or two-phase [R owner, R src, cap, W]
    "oproj_publish": "Tensor x, Tensor weight, Tensor(a!) box",
    # box as above, gather [R, cap, H] (two-phase only)
    # -> prefix [R, M, H] updated (replaced where the layer opens a block), out [R, M, H]
    "oproj_reduce_attnres": "Tensor(a!) box, Tensor(b!)? gather, Tensor(c!) prefix, Tensor blocks, Tensor query, "
    "Tensor gamma, int stored, bool opens, Tensor(d!) out",
    # x [R, M, H], weight [R, 2 I, H] gate rows then up rows -> out [R, M, I]
    "dense_gate_up": "Tensor x, Tensor weight, Tensor(a!) out",
    # h [R, M, I], weight [R, H, I] -> box [R owner, R src, cap, W]
    "dense_down_push": "Tensor h, Tensor weight, Tensor(a!) box",
    # box as above -> delta [R, cap, H]
    "dense_reduce": "Tensor(a!) box, Tensor(b!) delta, int rows",
    # x [R, M, H], weight [R, pad16(E / R) + L / R, H] -> logits_box [R, cap, E] fp32, latent_box [R, cap, L]
    "moe_front": "Tensor x, Tensor weight, Tensor(a!) logits_box, Tensor(b!) latent_box",
    # bias [E] -> latent [R, M, L], ids [R, M, K] int64 best first, weights [R, M, K], and the unit table: the pairs
    # (row, slot), numbered row * K + slot, in expert order: order [R, M K] int64, with counts [R, E] int64
    "route": "Tensor(a!) logits_box, Tensor(b!) latent_box, Tensor bias, Tensor(c!) latent, Tensor(d!) ids, "
    "Tensor(e!) weights, Tensor(f!) order, Tensor(g!) counts",
    # packed [R, E, 2 I, L / 2] uint8 gate rows then up rows, scale [R, E, 2 I, L / 32] uint8 -> hidden [R, M K, I]
    "fc1": "Tensor latent, Tensor order, Tensor counts, Tensor packed, Tensor scale, Tensor(a!) hidden",
    # packed [R, E, L, I / 2], scale [R, E, L, I / 32]
    # -> box: one shot [R dst, R src, cap, L] or two-phase [R owner, R src, cap, L / R]
    "fc2_publish": "Tensor hidden, Tensor weights, Tensor order, Tensor counts, Tensor packed, Tensor scale, "
    "Tensor(a!) box",
    "shared_gate_up": "Tensor x, Tensor weight, Tensor(a!) out",  # as dense_gate_up
    "shared_down_push": "Tensor h, Tensor weight, Tensor(a!) box",  # as dense_down_push
    # latent_box as fc2_publish's, gather [R, cap, L] (two-phase only), shared_box as dense_down_push's, norm [L],
    # up [R, W, L] -> delta [R, cap, H]
    "moe_tail": "Tensor(a!) latent_box, Tensor(b!)? gather, Tensor(c!) shared_box, Tensor norm, Tensor up, "
    "Tensor(d!) delta, int rows",
    # weights the next ops will read; moves data towards the cache, changes nothing
    "prefetch": "str point, Tensor[] weights",
}

#: Where each op rounds to the activation dtype besides storing its output; everything between is fp32. Differences to
#: the stock path: the KDA convolution stays fp32; o_proj, fc2 and shared partials are rounded per rank; routing weights
#: are rounded; gate and up of the experts are not.
ROUNDING: dict[str, tuple[str, ...]] = {
    "embed": (),
    "attn_res": ("prefix + delta", "mixture before the final norm (final site only)"),
    "in_proj": (),
    "kda_core": ("raw decay logits f_b x f_a", "stored convolution taps"),
    "mla_query": ("normalised q_a row", "q_b output", "normalised kv latent"),
    "mla_core": ("each rank's partial latent (context parallelism only)",),
    "mla_value": ("merged latent", "latent x w_uv"),
    "oproj_publish": (),
    "oproj_reduce_attnres": ("sum over ranks", "prefix + sum"),
    "dense_gate_up": ("gate", "up"),
    "dense_down_push": (),
    "dense_reduce": (),
    "moe_front": (),
    "route": (),
    "fc1": (),
    "fc2_publish": (),
    "shared_gate_up": ("gate", "up"),
    "shared_down_push": (),
    "moe_tail": ("sum over ranks", "normalised latent", "up-projection", "shared sum over ranks"),
    "prefetch": (),
}


@dataclass(eq=False)
class OpContext:
    """What the ops of one executor share: shapes, precision, providers, and the calls counted so far."""

    config: KimiK3Config
    precision: Precision
    tp: int
    dcp: int = 1  #: ranks over which the cached sequence is spread: 1 or tp
    interleave: int = 1  #: consecutive tokens that one rank owns under context parallelism
    debug: bool = False  #: readers of mailboxes raise on missing publications
    providers: dict[str, Provider] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    chosen: list[Tensor] | None = None  #: rank 0's expert ids [M, K] of every ``route``, while somebody wants them
    handle: int = field(init=False)
    _prepared: dict[tuple[int, str], tuple[Tensor, Any]] = field(default_factory=dict)
    _side: torch.cuda.Stream | None = None
    _forked: bool = False

    def __post_init__(self) -> None:
        self.handle = next(_HANDLES)
        _CONTEXTS[self.handle] = self

    def prepared(self, weight: Tensor, form: str, build: Callable[[Tensor], Any]) -> Any:
        """A provider's own form of a static weight, built once per tensor and ``form``."""
        key = (weight.data_ptr(), form)
        found = self._prepared.get(key)
        if found is None:
            # The weight itself is kept as well: its address stays taken for as long as it is a key.
            found = self._prepared[key] = (weight, build(weight))
        return found[1]

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Launches inside go to a side stream, behind what the current stream holds by now, until :meth:`join`."""
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        self._side.wait_stream(torch.cuda.current_stream(device))
        self._forked = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """The current stream waits for the side stream, if anything was launched there. Once, at the end of a step: a
        graph cannot be captured with open ends."""
        if self._forked and self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._forked = False


_ROUTE_IDS = 4  #: place of ``ids`` among the arguments of ``route``
_HANDLES = count(1)
_CONTEXTS: weakref.WeakValueDictionary[int, OpContext] = weakref.WeakValueDictionary()


def _dispatch(op: str, handle: int, *args: Any) -> None:
    context = _CONTEXTS[handle]
    context.calls[op] += 1
    context.providers[op].run(context, *args)
    if op == "route" and context.chosen is not None:
        context.chosen.append(args[_ROUTE_IDS][0].clone())


def _no_data(*args: Any) -> None:
    return None


def _define(schemas: Mapping[str, str]) -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for op, schema in schemas.items():
        library.define(f"{op}(int ctx, {schema}) -> ()")
        for key in ("CPU", "CUDA"):
            library.impl(op, partial(_dispatch, op), key)
        library.impl(op, _no_data, "Meta")
    return library


_LIBRARY = _define(SCHEMAS)  #: must stay alive: the operators disappear with it


def overload(op: str) -> Callable[..., None]:
    """The operator itself; call it with a context's handle first."""
    found: Callable[..., None] = getattr(torch.ops.kimi_k3, op).default
    return found
