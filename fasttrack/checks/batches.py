"""Which batches the deployments of one step kind and context run: sizes are claimed ones, work is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fasttrack.records import CellKey

Sizes = Mapping[CellKey, Sequence[int]]  #: deployment (a cell of one request) -> claimed requests
#: One teacher-forced batch: ``requests`` at once and ``tokens`` of each; of all, the last ``far`` end near the far
#: end of the context bucket; ``late`` arrive after as many have ended, ``pause`` steps later, into their slots.
Batch = dict[str, int]
MOST_FORCED = 8  #: requests of a batch that is there for its numbers: few, so that what differs is not the neighbours
#: Tokens per sequence of batches with more requests, or beyond the sequences asked for: they are there so that no
#: claimed size goes unseen, which a few positions show.
CROWD_TOKENS = 3
CHANGING_TOKENS = 6  #: at least, where requests come and go: each of both companies needs steps of its own
MOST_BATCHES = 6  #: per deployment, besides one of every claimed size
MOST_FAR = 2  #: sequences of a batch near the far end of the bucket: a long prefill is the dearest part of a batch
FAR_BATCHES = 2  #: batches with such sequences, per deployment


def forced(deployments: Sizes, sequences: int, tokens: int) -> dict[CellKey, list[Batch]]:
    """Teacher-forced batches with about ``sequences`` sequences over all deployments, besides those of few tokens."""
    share = -(-sequences // max(1, len(deployments)))
    return {cell: forced_of_one(sizes, share, tokens) for cell, sizes in deployments.items()}


def forced_of_one(sizes: Sequence[int], sequences: int, tokens: int) -> list[Batch]:
    """Every claimed size once: those up to :data:`MOST_FORCED` in full as long as they fit, then the largest of these
    again, then whatever fits; what does not fit gets few tokens.

    Requests come and go in every batch of one, and in the first of the largest size up to :data:`MOST_FORCED`.
    """
    sizes = sorted(set(sizes))
    small = [size for size in sizes if size <= MOST_FORCED] or [sizes[0]]
    plan: list[int] = []
    for size in small:
        if sum(plan) + size <= sequences and len(plan) < MOST_BATCHES:
            plan.append(size)
    while sum(1 + (n == 1) for n in plan) < MOST_BATCHES:  # in a batch of one, two sequences follow each other
        fitting = [size for size in small if max(2, size) <= sequences - sum(max(2, n) for n in plan)]
        if not fitting:
            break
        plan.append(fitting[-1])
    plan = plan or [small[0]]
    batches = [_batch(n, tokens) for n in plan]
    batches += [_batch(n, min(tokens, CROWD_TOKENS)) for n in sizes if n not in plan]
    changing = next((b for b in batches if b["requests"] == small[-1]), batches[0])
    for batch in batches:
        if batch is changing or batch["requests"] == 1:
            batch["tokens"] = max(batch["tokens"], min(tokens, CHANGING_TOKENS))
            batch.update(_late(batch["requests"], batch["tokens"], small))
    for batch in [b for b in batches if b["late"]][:FAR_BATCHES]:
        batch["far"] = min(MOST_FAR, batch["late"])
    return batches


def _batch(requests: int, tokens: int) -> Batch:
    return {"requests": requests, "tokens": tokens, "far": 0, "late": 0, "pause": 0}


def _late(requests: int, tokens: int, sizes: Sequence[int]) -> Batch:
    """Half of the requests, or the only one, end early and are replaced: at once, or, where what is left in between
    is a claimed size as well, after some steps without them."""
    late = -(-requests // 2)
    return {"late": late, "pause": tokens // 6 if requests - late in sizes else 0}


def free(deployments: Sizes, requests: int) -> dict[CellKey, list[int]]:
    """Free-running batches: every claimed size of every deployment once, then the largest sizes in turn until there
    are ``requests`` requests over all deployments."""
    plan = {cell: sorted(set(sizes)) for cell, sizes in deployments.items()}
    turns = sorted(deployments, key=lambda cell: -max(deployments[cell]))
    for turn in range(MOST_BATCHES * len(turns)):
        if sum(map(sum, plan.values())) >= requests:
            break
        cell = turns[turn % len(turns)]
        plan[cell].append(max(deployments[cell]))
    return plan
