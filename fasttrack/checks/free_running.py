"""Free-running greedy text at the scope's batches: where it leaves the reference's, repeats itself, or is cut off.

The reference is the oracle where the engine has one; else stock in other company (requests in reverse order, two
batches instead of one), which shows how much stock differs from itself. Both arms are held against the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fasttrack.checks.base import Context, Unit, evidence, sha256_tokens
from fasttrack.checks.schedule import together
from fasttrack.errors import EvidenceError
from fasttrack.records import CellKey, FreeRunRecord
from fasttrack.target import Completion, EngineInfo, Request, Sampling

ARMS = ("stock", "optimized")
#: A text is repetitive when it ends in a cycle of at most so many tokens, seen at least so often.
LONGEST_CYCLE, CYCLES = 8, 4
RECOMPOSED = "stock recomposed"


def run(unit: Unit, ctx: Context) -> None:
    """``unit.params``: ``batches``, the requests of each, a claimed size; ``tokens`` per request."""
    assert unit.cell is not None
    sizes: Sequence[int] = unit.params["batches"]
    for number, requests in enumerate(sizes):
        cell = unit.cell.model_copy(update={"requests": requests})
        _batch(unit, ctx, cell, number, int(unit.params["tokens"]))
        ctx.progress(number + 1, len(sizes), "batches")


def _batch(unit: Unit, ctx: Context, cell: CellKey, number: int, tokens: int) -> None:
    name = f"{unit.name}/{number}"
    bucket = ctx.scope.bucket(cell.context)

    def asked(info: EngineInfo) -> list[Request]:
        # Sequences end where they want to: a rise of cut-off answers is one of the things looked for.
        sampling = Sampling(temperature=0.0, logprobs=1)
        return together(cell.requests, tokens, bucket, info, ctx.seed(name), sampling=sampling)

    kind, reference = _reference(ctx, cell, name, asked)
    for arm in ARMS:
        engine, info = ctx.engine_for(arm, cell)
        requests = asked(info)
        done = engine.generate(requests, run=f"{name}/{arm}")
        ctx.write_steps(engine.drain_ledger(), arm=arm, cell=cell, info=info)
        for request, completion in zip(requests, done, strict=True):
            ctx.record(
                FreeRunRecord,
                arm=arm,
                cell=cell,
                evidence=evidence(info),
                batch=str(number),
                request=completion.id,
                reference=kind,
                prompt_sha256=sha256_tokens(request.prompt),
                prompt_tokens=len(request.prompt),
                **describe(completion, reference[completion.id]),
            )


def _reference(ctx: Context, cell: CellKey, name: str, asked: object) -> tuple[str, Mapping[str, list[int]]]:
    assert callable(asked)
    try:
        engine, info = ctx.engine("oracle", tp=1, cell=cell)
        groups = [asked(info)]
        kind = "oracle"
    except EvidenceError:
        engine, info = ctx.engine_for("stock", cell)
        backwards = list(reversed(asked(info)))
        middle = -(-len(backwards) // 2)
        groups = [backwards[:middle], backwards[middle:]]
        kind = RECOMPOSED
    found = {}
    for place, group in enumerate(groups):
        if group:
            done = engine.generate(group, run=f"{name}/reference{place}")
            found.update({c.id: list(c.token_ids) for c in done})
    engine.drain_ledger()
    return kind, found


def describe(completion: Completion, reference: Sequence[int]) -> dict[str, object]:
    """The fields of a :class:`FreeRunRecord` that compare a completion with the reference's tokens."""
    tokens = list(completion.token_ids)
    agreed = 0
    for one, other in zip(tokens, reference, strict=False):
        if one != other:
            break
        agreed += 1
    return {
        "tokens": len(tokens),
        "agreed": agreed,
        "diverged": agreed < max(len(tokens), len(reference)),
        "repetitive": repetitive(tokens),
        "truncated": completion.finish_reason == "length",
        "nonfinite": sum(not math.isfinite(value) for value in completion.logprobs or ()),
    }


def repetitive(tokens: Sequence[int]) -> bool:
    """Whether the text ends in the same few tokens over and over."""
    for period in range(1, LONGEST_CYCLE + 1):
        need = period * CYCLES
        tail = list(tokens[-need:])
        if len(tail) == need and all(tail[i] == tail[i % period] for i in range(need)):
            return True
    return False
