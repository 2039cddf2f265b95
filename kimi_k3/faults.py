"""Named faults of the optimised path, for arms that a gate must call wrong.

Each fault is planted from outside into one built engine: a wrapper around one op's provider, the executor, or one
function the engine calls. Production modules know nothing of this one, and it changes nothing until a fault is asked
for. Mutations of state, formulas and bookkeeping; each is a defect that a real implementation has had or could have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_k3 import names
from kimi_k3.decode import ledger, mesh
from kimi_k3.decode.ops import NAMESPACE, OpContext
from kimi_k3.decode.providers.torch_mla import EMPTY_LSE
from kimi_k3.decode.providers.torch_residual import project, vector
from kimi_k3.decode.registry import Provider
from kimi_k3.decode.schedule import step_schedule
from kimi_k3.reference import engine as engine_module
from kimi_k3.reference.numerics import rms_norm

Engine = engine_module.EmbeddedEngine
Run = Callable[..., None]

LAYER, HEAD, RANK, EXPERTS = 1, 1, 0, (3, 11)  #: where faults of one layer, head, rank or pair of experts sit


def wrap(engine: Engine, op: str, wrapper: Callable[..., None]) -> None:
    """Serve ``op`` by ``wrapper(real, context, *arguments)``."""
    context: OpContext = engine.executor.context  # type: ignore[union-attr]
    real = context.providers[op]

    def run(own: OpContext, *args: Any) -> None:
        wrapper(real.run, own, *args)

    context.providers[op] = Provider(op, real.name, run)


def _calls(engine: Engine, op: str) -> int:
    """How often a step calls ``op``."""
    return Counter(call.op for call in step_schedule(engine.model.config, names.MAX_ROWS))[op]


# -- state -----------------------------------------------------------------------------------------------------


def slot_after_rejection(engine: Engine) -> None:
    """After a rejection the recurrence starts one slot too far: from the state of the first rejected draft."""
    executor, seen = engine.executor, dict[int, tuple[int, int]]()
    assert executor is not None
    real, caches = executor.run, engine.caches

    def run(plan: Any, batch: Any, aux_layers: Any) -> Any:
        for i, slots in enumerate(batch.state_slots.tolist()):
            accepted, context = int(batch.accepted[i]), batch.context_lens[i]
            before, rows = seen.get(slots[0], (0, 0))
            if before + accepted == context and accepted < rows:
                for state in caches.recurrent.values():
                    state[slots[accepted - 1]] = state[slots[accepted]]
            seen[slots[0]] = context, batch.query_lens[i]
        return real(plan, batch, aux_layers)

    executor.run = run  # type: ignore[method-assign]


def conv_window(engine: Engine) -> None:
    """The convolution's history is read one token too late."""

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        conv, slots, accepted = args[6], args[8], args[9]
        live = slots[:, 0] > 0
        own, first = slots[live, 0], (accepted[live] - 1).clamp(min=0)
        for tap in (0, 1):
            conv[own, first + tap] = conv[own, first + tap + 1]
        real(context, *args)

    wrap(engine, "kda_core", wrapper)


def decay_scaled(engine: Engine) -> None:
    """One head of one layer forgets 0.5 % too much per step."""
    calls, every = [0], _calls(engine, "kda_core")

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        recurrent, slots, accepted = args[7], args[8], args[9]
        if calls[0] % every == LAYER:
            own = slots.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
            recurrent[own[own > 0], HEAD] *= 0.995
        calls[0] += 1
        real(context, *args)

    wrap(engine, "kda_core", wrapper)


def stale_prefix(engine: Engine) -> None:
    """One layer's residual prefix is not written back: later layers read it as it was before."""
    calls, every = [0], _calls(engine, "attn_res")

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        prefix = args[1]
        before = prefix.clone()
        real(context, *args)
        if calls[0] % every == LAYER + 1:
            prefix.copy_(before)
        calls[0] += 1

    wrap(engine, "attn_res", wrapper)


def stale_mailbox(engine: Engine) -> None:
    """One rank's partial sums of one layer are those of the step before."""
    calls, every, kept = [0], _calls(engine, "oproj_publish"), dict[int, Tensor]()

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        x = args[0]
        if calls[0] % every == LAYER:
            fresh, rows = x[RANK].clone(), x.shape[1]
            if rows in kept:
                x[RANK] = kept[rows]
            kept[rows] = fresh
        calls[0] += 1
        real(context, *args)

    wrap(engine, "oproj_publish", wrapper)


# -- attention over several parts ------------------------------------------------------------------------------


def _after_core(engine: Engine, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the log-sum-exps [parts, R, rows, heads] that attention hands on."""

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        real(context, *args)
        lens, lse = args[3], args[5]
        own = lse[:, :, : len(lens)]
        own.copy_(change(own))

    wrap(engine, "mla_core", wrapper)


def lse_base(engine: Engine) -> None:
    """Partial attention hands on logarithms to base 2, and the merge takes them for natural ones."""
    _after_core(engine, lambda lse: torch.where(lse > EMPTY_LSE / 2, lse / math.log(2), lse))


def empty_shard(engine: Engine) -> None:
    """A part without any token takes part in the merge, as if its log-sum-exp were zero."""
    _after_core(engine, lambda lse: torch.where(lse > EMPTY_LSE / 2, lse, 0.0))


def last_shard_dropped(engine: Engine) -> None:
    """The last part that holds tokens is left out of the merge, unless it is the only one."""

    def change(lse: Tensor) -> Tensor:
        filled = lse > EMPTY_LSE / 2
        index = torch.arange(len(lse)).view(-1, 1, 1, 1).expand_as(lse)
        last = torch.where(filled, index, -1).amax(0, keepdim=True)
        return torch.where((index == last) & (filled.sum(0, keepdim=True) > 1), EMPTY_LSE, lse)

    _after_core(engine, change)


# -- sums over ranks and experts -------------------------------------------------------------------------------


def rank_dropped(engine: Engine) -> None:
    """One rank's partial sums of every attention output are lost: zeros arrive instead."""

    def wrapper(real: Run, context: OpContext, x: Tensor, weight: Tensor, box: Tensor) -> None:
        x = x.clone()
        x[RANK] = 0
        real(context, x, weight, box)

    wrap(engine, "oproj_publish", wrapper)


def norm_before_reduction(engine: Engine) -> None:
    """The latent norm is applied to each rank's partial sum, and the results are added."""

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        latent_box, gather, shared_box, norm, up, delta, rows = args
        p = context.precision
        partials = mesh.take(latent_box, rows, 2, "latent", context.debug)
        if gather is None:
            partials = partials[0]  # what every rank received: [R src, M, L]
        else:
            partials = partials.permute(1, 2, 0, 3).flatten(2)  # column blocks of the owners
        eps = context.config.rms_norm_eps
        normed = p.rounded(rms_norm(partials.to(p.compute), vector(context, norm), eps).sum(0, keepdim=True))
        routed = p.rounded(project(context, normed.expand(up.shape[0], -1, -1), up))
        shared = p.rounded(mesh.fold(mesh.take(shared_box, rows, 2, "shared", context.debug), p.compute))
        mesh.publish_columns(delta, p.rounding(routed + shared))

    wrap(engine, "moe_tail", wrapper)


def expert_swapped(engine: Engine) -> None:
    """In one layer, rows routed to one expert go to another and the other way round."""
    calls, every, (one, other) = [0], _calls(engine, "route"), EXPERTS

    def wrapper(real: Run, context: OpContext, *args: Any) -> None:
        real(context, *args)
        if calls[0] % every == LAYER:
            ids, order, counts = args[4], args[6], args[7]
            ids.copy_(torch.where(ids == one, other, torch.where(ids == other, one, ids)))
            pairs = ids.flatten(1)
            order.copy_(pairs.argsort(dim=-1, stable=True))
            counts.zero_().scatter_add_(1, pairs, torch.ones_like(pairs))
        calls[0] += 1

    wrap(engine, "route", wrapper)


# -- sampling and bookkeeping ----------------------------------------------------------------------------------


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def penalty_ignored(engine: Engine) -> None:
    """Penalties are not applied to rows that verify drafts."""
    real_step, real_choose = engine.step, engine_module.choose

    def choose(sampled: Any, *args: Any) -> list[list[int]]:
        requests = [r.state.request for r in sampled]
        for r in sampled:
            if r.drafts:
                params = replace(
                    r.state.request.sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
                )
                r.state.request = replace(r.state.request, sampling=params)
        try:
            return real_choose(sampled, *args)
        finally:
            for r, request in zip(sampled, requests, strict=True):
                r.state.request = request

    def step(run: str, index: int) -> Any:
        with patched(engine_module, "choose", choose):
            return real_step(run, index)

    engine.step = step  # type: ignore[method-assign]


def refuse_every_step(engine: Engine) -> None:
    """The executor finds a reason to decline whatever it is asked."""
    executor = engine.executor
    assert executor is not None
    real = executor.plan

    def plan(batch: Any) -> Any:
        found = real(batch)
        return replace(found, path="stock", reason="unprepared_rows") if found.specialized else found

    executor.plan = plan  # type: ignore[method-assign]


def false_ledger(engine: Engine) -> None:
    """The stock path computes every step that the ledger calls specialised."""
    executor, model = engine.executor, engine.model
    assert executor is not None

    def run(plan: Any, batch: Any, aux_layers: Any) -> Any:
        results = model.forward(batch, engine.caches, aux_layers)
        entry = ledger.record(plan, batch, None)
        calls = Counter(call.op for call in step_schedule(model.config, plan.padded_rows))
        executor.last_step = replace(
            entry,
            path="specialized",
            reason=None,
            ops={f"{NAMESPACE}::{op}": n for op, n in calls.items()},
            providers={f"{NAMESPACE}::{op}": "torch" for op in calls},
        )
        return results

    executor.run = run  # type: ignore[method-assign]


#: Name -> how to plant it. The names are also in ``names.FAULTS``, which needs no torch.
FAULTS: dict[str, Callable[[Engine], None]] = {
    "slot-after-rejection": slot_after_rejection,
    "conv-window": conv_window,
    "decay-scaled": decay_scaled,
    "stale-prefix": stale_prefix,
    "stale-mailbox": stale_mailbox,
    "lse-base": lse_base,
    "empty-shard": empty_shard,
    "last-shard-dropped": last_shard_dropped,
    "rank-dropped": rank_dropped,
    "norm-before-reduction": norm_before_reduction,
    "expert-swapped": expert_swapped,
    "penalty-ignored": penalty_ignored,
    "refuse-every-step": refuse_every_step,
    "false-ledger": false_ledger,
}


def plant(fault: str, engine: Engine) -> None:
    """Put ``fault`` into ``engine``, whose switch must be on; KeyError for an unknown name."""
    FAULTS[fault](engine)
