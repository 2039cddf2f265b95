"""From a gate down to the records it decided by: which types, which columns, most suspicious first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrack.report.text import number, plain, show

Rank = Callable[[Any], Any]


@dataclass(frozen=True)
class View:
    """How records of one type are listed. ``rank`` sorts ascending."""

    columns: tuple[str, ...]
    rank: Rank = lambda record: 0


def _largest(value: float) -> float:
    """Sorts large values first and NaN before everything."""
    return -value if value == value else float("-inf")


VIEWS: dict[str, View] = {
    "numerics": View(
        ("op", "case", "family", "output", "worst", "failing", "nan_outputs", "changed_untouched", "rerun_identical"),
        lambda r: (-(r.failing + r.nan_outputs + r.changed_untouched), r.rerun_identical, _largest(r.worst)),
    ),
    "step": View(
        ("arm", "run", "index", "kind", "requests", "rows", "path", "reason"),
        lambda r: (r.arm != "optimized", r.path == "specialized", len(set(r.rank_hashes)) <= 1),
    ),
    "trace": View(("arm", "run", "index", "ops", "other_ops", "source")),
    "generation": View(("arm", "run", "request", "prompt_tokens", "token_ids", "finish_reason")),
    "fidelity": View(
        ("arm", "cell", "sequence", "positions", "kl_sum", "kl_max", "top1_flips", "near_ties", "nonfinite"),
        lambda r: (-r.nonfinite, _largest(r.kl_sum)),
    ),
    "eval_item": View(
        ("arm", "task", "item", "repeat", "score", "parsed", "finish_reason"), lambda r: (r.task, r.item)
    ),
    "performance": View(("arm", "cell", "metric", "per", "value", "unit_of_measure", "tokens", "prefill_included")),
    "off_state": View(("checkout", "outputs", "outputs_sha256", "modules_loaded")),
    "refusal": View(("deployment", "refused", "reasons"), lambda r: r.refused),
    "engine": View(("arm", "cell", "engine", "switch", "devices", "modules_loaded")),
    "feature": View(("feature", "variant", "held", "specialized_steps", "stock_steps"), lambda r: r.held),
    "published": View(("name", "metric", "value", "unit_of_measure")),
}

#: gate -> record types, in the order they are listed. A gate not named here lists every type of its check.
TYPES: dict[str, tuple[str, ...]] = {
    "isolation.scope_coverage": ("step",),
    "isolation.probes": ("refusal", "step"),
    "isolation.witnesses": ("trace", "step"),
    "isolation.rank_agreement": ("step",),
    "isolation.off_is_off": ("off_state",),
    "isolation.a_a": ("generation",),
    "isolation.refusals": ("refusal",),
    "evals.fidelity": ("fidelity",),
    "evals.task_scores": ("eval_item",),
    "performance.accounting": ("performance", "step", "generation"),
    "performance.speedup": ("performance", "engine"),
}


def records_of_gate(gate: str, records: Iterable[Any]) -> list[Any]:
    """The records of the gate's check and types, most suspicious first within a type."""
    check = gate.partition(".")[0]
    own = [record for record in records if record.unit == check or record.unit.startswith(check + "/")]
    if gate in ("isolation.rank_agreement", "isolation.witnesses"):
        own = list(records)
    wanted = TYPES.get(gate) or tuple(dict.fromkeys(record.type for record in own))
    found: list[Any] = []
    for kind in wanted:
        same = [record for record in own if record.type == kind]
        found += sorted(same, key=VIEWS[kind].rank) if kind in VIEWS else same
    return found


def rows(records: Sequence[Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Type -> (header, rows) for printing; every value on one line."""
    found: dict[str, tuple[list[str], list[list[str]]]] = {}
    for record in records:
        columns = ("unit", *VIEWS[record.type].columns) if record.type in VIEWS else ("unit", "arm", "cell")
        header, lines = found.setdefault(record.type, (list(columns), []))
        lines.append([_text(getattr(record, column)) for column in header])
    return found


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return plain(show(value) if isinstance(value, (dict, list, bool)) or value is None else value, 100)
