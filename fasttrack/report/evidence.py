"""What the evidence covers: the sequences behind fidelity, and who served the ops of specialised steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fasttrack.records import CellKey, FidelityRecord
from fasttrack.report.coverage import optimized_steps
from fasttrack.report.text import count, listing, number

if TYPE_CHECKING:
    from fasttrack.gates import Scope


@dataclass(frozen=True)
class FidelityRow:
    """Teacher-forced sequences of one deployment, step kind, context bucket and precision."""

    what: str  #: "decode, TP 8, short"
    options: str  #: "as claimed", or "exact": under the engine's exact options
    batches: str  #: claimed batch sizes of the tier that sequences ran in
    sequences: int
    positions: int
    contexts: str  #: tokens of the sequences at their ends
    divergence: str  #: nats a token, optimised / stock
    flips: str  #: best tokens unlike the oracle's, optimised / stock
    providers: str  #: of the ops of these specialised steps


def fidelity_rows(scope: Scope, records: Sequence[Any]) -> list[FidelityRow]:
    """One row per deployment that was teacher-forced, in the order of the records."""
    found: dict[tuple[CellKey, bool], list[FidelityRecord]] = {}
    for record in records:
        if isinstance(record, FidelityRecord) and record.cell is not None:
            found.setdefault((record.cell.model_copy(update={"requests": 1}), record.exact), []).append(record)
    claimed: dict[CellKey, set[int]] = {}
    for cell in scope.cells():
        claimed.setdefault(cell.model_copy(update={"requests": 1}), set()).add(cell.requests)
    return [_row(key, exact, own, claimed.get(key, set()), records) for (key, exact), own in found.items()]


def _row(
    key: CellKey, exact: bool, own: Sequence[FidelityRecord], claimed: set[int], records: Sequence[Any]
) -> FidelityRow:
    arms = {arm: [r for r in own if r.arm == arm] for arm in ("optimized", "stock")}
    ours = arms["optimized"]
    ran = {r.cell.requests for r in ours if r.cell is not None}
    units = {r.unit for r in own}
    served = Counter(
        name
        for step in optimized_steps(records)
        if step.unit in units and step.path == "specialized"
        for name in set(step.providers.values())
    )
    contexts = [r.context for r in ours if r.context is not None]
    drafts = f", DL {key.draft_length}" if key.draft_length else ""
    dcp = f", DCP {key.dcp}" if key.dcp != 1 else ""
    sizes = ", ".join(map(str, sorted(ran & claimed)))
    return FidelityRow(
        what=f"{key.step}, TP {key.tp}{drafts}{dcp}, {key.context}",
        options="exact" if exact else "as claimed",
        batches=f"{len(ran & claimed)} of {len(claimed)} ({sizes})" if claimed else sizes or "none",
        sequences=len(ours),
        positions=sum(r.positions for r in ours),
        contexts=f"{min(contexts)} to {max(contexts)}" if contexts else "not recorded",
        divergence=" / ".join(_mean(arm) for arm in arms.values()),
        flips=" / ".join(str(sum(r.top1_flips for r in arm)) for arm in arms.values()),
        providers=listing(sorted(served)) or "none named",
    )


def _mean(records: Sequence[FidelityRecord]) -> str:
    """KL divergence per position."""
    positions = sum(r.positions for r in records)
    return number(math.fsum(r.kl_sum for r in records) / positions, 4) if positions else "-"


def provider_groups(records: Iterable[Any]) -> list[tuple[str, list[str]]]:
    """(who served, ops) of specialised steps, e.g. ``("torch in 1204 steps", ["k3::head"])``; alike ops share a row."""
    found: dict[str, Counter[str]] = {}
    for step in optimized_steps(records):
        if step.path == "specialized":
            for op, provider in step.providers.items():
                found.setdefault(op, Counter())[provider] += 1
    groups: dict[str, list[str]] = {}
    for op, served in sorted(found.items()):
        text = ", ".join(f"{name} in {count(served[name], 'step')}" for name in sorted(served))
        groups.setdefault(text, []).append(op)
    return list(groups.items())
