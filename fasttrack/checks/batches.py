"""Which batches the deployments of one step kind and context run: sizes are claimed ones, work is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fasttrack.records import CellKey

Sizes = Mapping[CellKey, Sequence[int]]  #: deployment (a cell of one request) -> claimed requests
MOST_FORCED = 8  #: requests of a teacher-forced batch: few, so that what differs is not the neighbours
#: Tokens per sequence of the batch with the most requests: it is there for its schedule, not for its numbers.
CROWD_TOKENS = 4
MOST_BATCHES = 6  #: per deployment, besides one of every claimed size


def forced(deployments: Sizes, sequences: int, tokens: int) -> dict[CellKey, list[dict[str, int]]]:
    """Teacher-forced batches (``requests``, ``tokens``) with about ``sequences`` sequences over all deployments."""
    share = -(-sequences // max(1, len(deployments)))
    return {cell: forced_of_one(sizes, share, tokens) for cell, sizes in deployments.items()}


def forced_of_one(sizes: Sequence[int], sequences: int, tokens: int) -> list[dict[str, int]]:
    """Each claimed size up to :data:`MOST_FORCED` once, then the largest of these, then whatever fits; and the
    largest claimed size of all once, with few tokens."""
    small = sorted(size for size in set(sizes) if size <= MOST_FORCED) or [min(sizes)]
    plan: list[int] = []
    for size in (*small, *[small[-1]] * MOST_BATCHES):
        if sum(plan) + size <= sequences and len(plan) < MOST_BATCHES:
            plan.append(size)
    while len(plan) < MOST_BATCHES and (rest := [size for size in small if size <= sequences - sum(plan)]):
        plan.append(rest[-1])
    plan = plan or [small[0]]
    crowd = [max(sizes)] if max(sizes) > small[-1] else []
    return [{"requests": n, "tokens": tokens} for n in plan] + [
        {"requests": n, "tokens": min(tokens, CROWD_TOKENS)} for n in crowd
    ]


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
