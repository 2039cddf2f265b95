"""What a gate is: a pure function of scope and records that gives a verdict with the numbers that decided it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from fasttrack.records import CellKey, StepRecord

if TYPE_CHECKING:
    from fasttrack.manifest.model import Context, Manifest, Probe, Tier
    from fasttrack.target import TargetDescription

Verdict = Literal["pass", "fail", "inconclusive", "not_run"]
R = TypeVar("R")
FAR_SHARE = 0.9  #: of a context bucket, from its shortest context: what lies beyond is its far end


@dataclass(frozen=True)
class Scope:
    """What was claimed and how much of it was run: the manifest, its tier, and the target's own description."""

    manifest: Manifest
    tier: str
    description: TargetDescription

    @property
    def knobs(self) -> Tier:
        return self.manifest.tier(self.tier)

    def cells(self) -> list[CellKey]:
        """The tier's cells, each once: a named cell repeats a cell of the scope with other lengths."""
        return list(dict.fromkeys(cell.key for cell in self.manifest.cells(self.tier)))

    def probes(self) -> list[Probe]:
        return self.manifest.probes_for(self.tier)

    def bucket(self, context: str) -> Context:
        return self.manifest.contexts[context]

    @property
    def max_rows(self) -> int:
        """Rows of the largest claimed step, whatever the tier."""
        return max(key.rows for key in self.manifest.all_cells())

    def is_step_of(self, step: StepRecord, cell: CellKey) -> bool:
        """``step`` is one of the steps ``cell`` speaks of: its kind at exactly its requests, rows and context."""
        bucket = self.bucket(cell.context)
        return (
            (step.kind, step.tp, step.dcp, step.requests) == (cell.step, cell.tp, cell.dcp, cell.requests)
            and step.draft_length == cell.draft_length
            and step.rows == cell.rows
            and bucket.min <= step.context_max <= bucket.max
        )


@dataclass(frozen=True)
class Number:
    """One number that decided, beside the limit it was held against, e.g. ``Number("worst", 0.7, "bound", "<= 1")``."""

    name: str
    value: float | int | str
    unit: str
    limit: str


def far_from(shortest: int, longest: int) -> int:
    """Contexts of so many tokens or more lie at the far end of a bucket of ``shortest`` to ``longest`` tokens."""
    return shortest + int(FAR_SHARE * (longest - shortest))


def crossing_prompt(output_tokens: int, shortest: int, longest: int, page: int) -> int | None:
    """Prompt length of a far context whose second decode step writes the first row of a cache page; None where the
    bucket holds no such context. The last of ``output_tokens`` is never fed back, the first comes from prefill."""
    length = (longest - output_tokens) // page * page - 1
    fits = length >= max(1, shortest) and length + output_tokens >= far_from(shortest, longest)
    return length if fits and output_tokens >= 3 else None


class GateResult(BaseModel):
    """``reason`` is one sentence; ``numbers`` are what it rests on."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    gate: str
    verdict: Verdict
    reason: str
    numbers: list[Number] = []


Gate = Callable[[Scope, Sequence[Any]], GateResult]


def select(records: Iterable[Any], kind: type[R], **equal: Any) -> list[R]:
    """The records of class ``kind`` whose fields have the values of ``equal``."""
    return [r for r in records if isinstance(r, kind) and all(getattr(r, k) == v for k, v in equal.items())]


def units_of(records: Iterable[Any], prefix: str) -> list[Any]:
    """The records of the work units whose name is ``prefix`` or lies below it."""
    return [r for r in records if r.unit == prefix or r.unit.startswith(prefix + "/")]


def group_by(records: Iterable[R], key: Callable[[R], Any]) -> dict[Any, list[R]]:
    groups: dict[Any, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def some(names: Iterable[object], most: int = 3) -> str:
    """``names`` for a sentence: the first few, and how many more. Sets are sorted: their order is not stable."""
    listed = sorted(map(str, names)) if isinstance(names, (set, frozenset)) else [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def configuration_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], ignore: Iterable[str] = ()
) -> list[str]:
    """Keys whose values differ, as ``key: a / b``."""
    keys = [k for k in dict.fromkeys([*one, *other]) if k not in set(ignore)]
    return [f"{k}: {one.get(k)!r} / {other.get(k)!r}" for k in keys if one.get(k) != other.get(k)]
