"""``gates.json``: the verdicts a run wrote down, and whether they follow from its records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fasttrack import SCHEMA_VERSION
from fasttrack.bundle.files import canonical_json, parse_json, printable
from fasttrack.errors import BundleError

if TYPE_CHECKING:
    from fasttrack.bundle.content import Run
    from fasttrack.gates import GateResult, Scope

GATES = "gates.json"
#: Two machines' mathematics libraries may differ in the last bits of a number, never in a verdict.
RELATIVE_TOLERANCE = 1e-9


def scope_of(run: Run) -> Scope:
    """What the gates judge by: manifest, tier, and the target's description as the run recorded it.

    Raises :class:`BundleError` when the run names a tier the manifest does not have, or describes no target.
    """
    from fasttrack.gates import Scope
    from fasttrack.target import TargetDescription

    if run.info.tier not in run.manifest.tiers:
        raise BundleError(f"run.json: tier {printable(run.info.tier)!r} is not in the manifest")
    if run.info.name != run.manifest.name:
        raise BundleError(f"run.json: is a run of {printable(run.info.name)!r}, not of this manifest")
    try:
        description = TypeAdapter(TargetDescription).validate_python(run.info.target)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in ("target", *first["loc"]))
        raise BundleError(f"run.json: {printable(place)}: {first['msg']}") from None
    if description.name != run.manifest.target:
        raise BundleError(f"run.json: describes target {printable(description.name)!r}, not the manifest's")
    return Scope(run.manifest, run.info.tier, description)


def evaluate_all(scope: Scope, records: Sequence[Any], unfinished: Sequence[str] = ()) -> tuple[list[GateResult], str]:
    """Every verdict and the overall one, from raw records and the planned units that did not finish.

    Hostile records end in :class:`BundleError`, not a crash.
    """
    from fasttrack.gates import evaluate, overall

    try:
        results = evaluate(scope, records)
        return results, overall(scope, results, unfinished)
    except Exception as error:  # a gate that cannot cope with the records has not passed
        name = type(error).__name__
        raise BundleError(f"{GATES}: cannot be recomputed ({name}: {printable(str(error))})") from None


def gates_document(results: Sequence[GateResult], verdict: str) -> bytes:
    """The content of ``gates.json``: strict JSON, so that non-finite numbers are written as text."""
    gates = [_plain(result) for result in results]
    return canonical_json({"schema_version": SCHEMA_VERSION, "verdict": verdict, "gates": gates})


def _plain(result: GateResult) -> dict[str, Any]:
    """``model_dump_json`` writes infinities and NaN as text; ``model_dump`` would not."""
    values: dict[str, Any] = json.loads(result.model_dump_json())
    return values


def parse_gates(data: bytes) -> tuple[list[GateResult], str]:
    """Read ``gates.json``. Raises :class:`BundleError`."""
    from fasttrack.gates import GateResult

    document = parse_json(data, where=GATES)
    if not isinstance(document, dict) or set(document) != {"schema_version", "verdict", "gates"}:
        raise BundleError(f"{GATES}: is not a verdict (schema_version, verdict, gates)")
    if document["schema_version"] != SCHEMA_VERSION:
        raise BundleError(f"{GATES}: is not of schema_version {SCHEMA_VERSION}")
    try:
        results = TypeAdapter(list[GateResult]).validate_python(document["gates"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in ("gates", *first["loc"]))
        raise BundleError(f"{GATES}: {printable(place)}: {first['msg']}") from None
    if not isinstance(document["verdict"], str):
        raise BundleError(f"{GATES}: verdict is not text")
    return results, document["verdict"]


def verdict_problems(
    stated: Sequence[GateResult], stated_overall: str, found: Sequence[GateResult], found_overall: str
) -> Iterator[str]:
    """Every stated verdict, reason or number that does not follow from the records, one line each."""
    if stated_overall != found_overall:
        yield f"{GATES}: overall verdict {printable(stated_overall)!r} does not follow: records give {found_overall!r}"
    by_name = {result.gate: result for result in stated}
    if [result.gate for result in stated] != [result.gate for result in found]:
        yield f"{GATES}: does not list the gates the manifest selects, each once, in order"
    for result in found:
        told = by_name.get(result.gate)
        where = f"{GATES}: gate {result.gate}"
        if told is None:
            yield f"{where} is missing; records give {result.verdict!r}"
        elif told.verdict != result.verdict:
            yield f"{where}: verdict {told.verdict!r} does not follow: records give {result.verdict!r}"
        elif told.reason != result.reason:
            yield f"{where}: reason does not follow: records give {printable(result.reason)!r}"
        elif (difference := _difference(told, result)) is not None:
            yield f"{where}: {difference}"


def _difference(told: GateResult, found: GateResult) -> str | None:
    one, other = _plain(told)["numbers"], _plain(found)["numbers"]
    if len(one) != len(other):
        return f"lists {len(one)} numbers; records give {len(other)}"
    for left, right in zip(one, other, strict=True):
        for key in right:
            if not _equal(left[key], right[key]):
                name, told_value, value = printable(str(right["name"])), printable(repr(left[key])), repr(right[key])
                return f"number {name!r}: {key} {told_value} does not follow: records give {value}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        numbers = (int, float)
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        if not (isinstance(one, numbers) and isinstance(other, numbers)):
            return False
        return one == other or math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0)
    return type(one) is type(other) and bool(one == other)
