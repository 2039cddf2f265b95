"""What the teacher-forced sequences covered: claimed batches, far contexts, cache pages, requests that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrack.gates.base import Number, Scope, crossing_prompt, far_from, group_by, select, some
from fasttrack.records import CellKey, EngineRecord, FidelityRecord, StepRecord


def longest_context(scope: Scope, records: Sequence[Any], cell: CellKey) -> int:
    """Tokens of the longest context that bucket and engine both allow."""
    told = [r.config.get("max_context") for r in select(records, EngineRecord, arm="optimized")]
    return min([scope.bucket(cell.context).max, *(n for n in told if isinstance(n, int))])


def is_far(scope: Scope, record: FidelityRecord, longest: int) -> bool:
    """The sequence ends at the far end of its bucket."""
    if record.cell is None or record.context is None:
        return False
    return record.context >= far_from(scope.bucket(record.cell.context).min, longest)


def coverage(scope: Scope, records: Sequence[Any], found: Sequence[FidelityRecord]) -> tuple[list[Number], list[str]]:
    """Numbers, and what of the tier's claim ``found`` (fidelity records of one precision) says nothing about.

    Of every cell: a specialised step at exactly its batch, and sequences of it. Of every deployment: a sequence that
    ends at the far end of the context bucket, one whose decode steps cross from one cache page to the next (where
    the engine tells its page size and the bucket has room for it), and one that took over from others.
    """
    own = [r for r in found if r.arm == "optimized"]
    units = {r.unit for r in own}
    within = [r for r in records if r.unit in units]
    steps = select(within, StepRecord, arm="optimized", path="specialized")
    cells = [c for c in scope.cells() if any(_same_kind(c, r.cell) for r in own)]
    missing = [
        str(cell)
        for cell in cells
        if not any(scope.is_step_of(s, cell) for s in steps) or all(r.cell != cell for r in own)
    ]
    sizes = sorted({cell.requests for cell in cells if str(cell) not in missing})
    doubts = [f"no forced sequence at the claimed batch of {some(missing)}"] if missing else []
    reached, crossed, replaced = list[int](), 0, 0
    for deployment, part in group_by(own, _deployment).items():
        told = [r for r in within if r.unit in {p.unit for p in part}]
        assert part[0].cell is not None
        longest = longest_context(scope, told, part[0].cell)
        far = [r.context or 0 for r in part if is_far(scope, r, longest)]
        reached.append(max((r.context or 0 for r in part), default=0))
        pages = [p for p in (r.config.get("page_size") for r in select(told, EngineRecord)) if isinstance(p, int)]
        over = [r for r in part if pages and _crosses(r, pages[0])]
        shortest = scope.bucket(part[0].cell.context).min
        asked = pages and any(crossing_prompt(r.positions + 1, shortest, longest, pages[0]) for r in part if r.late)
        late = [r for r in part if r.late]
        crossed, replaced = crossed + len(over), replaced + len(late)
        lacks = [] if far else [f"near the end of its contexts of up to {longest} tokens"]
        lacks += ["across a cache page"] if asked and not over else []
        lacks += [] if late else ["that took over from another request"]
        doubts += [f"{deployment}: no forced sequence {some(lacks)}"] if lacks else []
    listed = f"of {len(cells)} cells (requests {', '.join(map(str, sizes))})"
    numbers = [
        Number("claimed batches covered", len(cells) - len(missing), listed, "all"),
        Number("shortest of the deployments' longest contexts", min(reached, default=0), "tokens", "far end of bucket"),
        Number("sequences across a cache page", crossed, f"of {len(own)}", ">= 1 per deployment that tells its pages"),
        Number("sequences that took over from others", replaced, f"of {len(own)}", ">= 1 per deployment"),
    ]
    return numbers, doubts


def untouched(scope: Scope, found: Sequence[FidelityRecord]) -> list[str]:
    """Step kinds and contexts of the tier's cells of which ``found`` has no sequence at all, in either precision."""
    kinds = dict.fromkeys((cell.step, cell.context) for cell in scope.cells())
    wanted = [False, True] if scope.manifest.engine.exact_options else [False]
    seen = {(r.cell.step, r.cell.context, r.exact) for r in found if r.cell is not None}
    return [
        f"no forced sequence of {step}/{context}{'/exact' if exact else ''}"
        for step, context in kinds
        for exact in wanted
        if (step, context, exact) not in seen
    ]


def _same_kind(cell: CellKey, other: CellKey | None) -> bool:
    return other is not None and (cell.step, cell.context) == (other.step, other.context)


def _deployment(record: FidelityRecord) -> str:
    cell = record.cell
    return f"{cell.step}/tp{cell.tp}/dl{cell.draft_length}/dcp{cell.dcp}/{cell.context}" if cell else "any"


def _crosses(record: FidelityRecord, page: int) -> bool:
    """A decode step wrote the first row of a page. The last token is never fed back, the first came from prefill."""
    if record.context is None:
        return False
    last = record.context - 2
    return last // page > (last - record.positions) // page and record.positions > 0
