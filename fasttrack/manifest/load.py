"""Read a manifest: syntax, fields, and whether the target's limits allow what is claimed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fasttrack import SCHEMA_VERSION
from fasttrack.errors import ManifestError, nearest
from fasttrack.manifest.lines import LineMap, read_yaml
from fasttrack.manifest.model import Manifest
from fasttrack.target import Limits, TargetDescription


def manifest_digest(raw: bytes) -> str:
    """SHA-256 of the manifest's exact bytes."""
    return hashlib.sha256(raw).hexdigest()


def load_manifest(path: Path, description: TargetDescription | None = None) -> tuple[Manifest, bytes]:
    """The manifest and its exact bytes. With ``description``, the claimed scope is held against its limits.

    Raises :class:`ManifestError`: one line with file, line, field and what would be right.
    """
    data, lines, raw = read_yaml(path)
    if not isinstance(data, dict):
        raise ManifestError("is not a mapping", where=f"{path}:1", expected="keys such as name, target and scope")
    _check_version(data, path, lines)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise _from_pydantic(error, path, lines) from None
    if description is not None:
        _check_gates(manifest, path, lines)
        _check_limits(manifest, description, path, lines)
    return manifest, raw


def _at(path: Path, lines: LineMap, loc: tuple[str | int, ...]) -> str:
    return f"{path}:{lines.line(loc)}: {'.'.join(str(part) for part in loc)}" if loc else f"{path}:1"


def _check_version(data: dict[str, Any], path: Path, lines: LineMap) -> None:
    version = data.get("schema_version", SCHEMA_VERSION)
    if type(version) is not int:  # `true` equals 1
        where = _at(path, lines, ("schema_version",))
        raise ManifestError(f"{version!r} is no version", where=where, expected=str(SCHEMA_VERSION))
    if version > SCHEMA_VERSION:
        raise ManifestError(
            f"version {version} is newer than this fasttrack reads",
            where=_at(path, lines, ("schema_version",)),
            expected=f"{SCHEMA_VERSION}, or a newer fasttrack",
        )


def _from_pydantic(error: ValidationError, path: Path, lines: LineMap) -> ManifestError:
    errors = error.errors()
    first = errors[0]
    if first["type"] == "missing":  # more often misspelled than left out
        first = next((e for e in errors if e["type"] == "extra_forbidden"), first)
    # Union branches and validators leave tags such as "constrained-int" in the location: not keys of the file.
    loc = tuple(part for part in first["loc"] if isinstance(part, int) or part.isidentifier() or part[:1].islower())
    loc = tuple(part for part in loc if not (isinstance(part, str) and ("[" in part or part == "constrained-int")))
    kind = first["type"]
    if kind == "inconsistent":
        loc = first["ctx"]["loc"]
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    expected = ""
    if kind == "extra_forbidden":
        what, expected = f"unknown key{more}", nearest(loc[-1], _fields(loc[:-1]))
    elif kind == "missing":
        what, expected = f"is missing{more}", "this key to be present"
    elif kind == "inconsistent":
        what = f"{message}{more}"
    else:
        given = first.get("input")
        shown = f", not {given!r}" if isinstance(given, (str, int, float, bool)) or given is None else ""
        what = f"{message[0].lower()}{message[1:]}{shown}{more}"
    return ManifestError(what, where=_at(path, lines, loc), expected=expected)


def _fields(loc: tuple[str | int, ...]) -> list[str]:
    """The keys that the mapping at ``loc`` may have; empty where that is not known."""
    kinds: list[Any] = [Manifest]
    for part in loc:
        step: list[Any] = []
        for kind in kinds:
            if isinstance(part, str) and isinstance(kind, type) and issubclass(kind, BaseModel):
                field = kind.model_fields.get(part)
                step += [field.annotation] if field else []
            else:
                step += get_args(kind)[-1:]  # of a list its items, of a mapping its values
        kinds = step
    return [
        name for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel) for name in kind.model_fields
    ]


def _check_gates(manifest: Manifest, path: Path, lines: LineMap) -> None:
    from fasttrack.gates import GATES  # needs this package

    for group in ("required", "optional"):
        for index, name in enumerate(getattr(manifest.gates, group)):
            if name not in GATES:
                where = _at(path, lines, ("gates", group, index))
                raise ManifestError(f"unknown gate {name!r}", where=where, expected=nearest(name, GATES))


def place(path: Path, *loc: str | int) -> str:
    """``file:line: field`` of a key path in a manifest that has been read before, for messages about its value."""
    return _at(path, read_yaml(path)[1], loc)


def _check_limits(manifest: Manifest, description: TargetDescription, path: Path, lines: LineMap) -> None:
    limits = description.limits
    if manifest.engine.kind not in description.engines:
        raise ManifestError(
            f"target {description.name} has no engine {manifest.engine.kind!r}",
            where=_at(path, lines, ("engine", "kind")),
            expected=f"one of: {', '.join(description.engines)}",
        )
    for index, row in enumerate(manifest.scope):
        for key in row.expand():
            problem = _outside(limits, key.tp, key.requests, key.draft_length, key.dcp)
            if problem:
                field, what, expected = problem
                raise ManifestError(what, where=_at(path, lines, ("scope", index, field)), expected=expected)
    for index, cell in enumerate(manifest.named_cells):
        problem = _outside(limits, cell.tp, cell.requests, cell.draft_length, cell.dcp)
        if problem:
            field, what, expected = problem
            raise ManifestError(what, where=_at(path, lines, ("named_cells", index, field)), expected=expected)
    for index, probe in enumerate(manifest.probes):
        if probe.reason and probe.reason not in description.fallback_reasons:
            raise ManifestError(
                f"unknown fallback reason {probe.reason!r}",
                where=_at(path, lines, ("probes", index, "reason")),
                expected=nearest(probe.reason, description.fallback_reasons),
            )
    for index, feature in enumerate(manifest.features):
        if feature not in description.features:
            raise ManifestError(
                f"target {description.name} does not list feature {feature!r}",
                where=_at(path, lines, ("features", index)),
                expected=nearest(feature, description.features),
            )


def _outside(limits: Limits, tp: int, requests: int, draft: int, dcp: int) -> tuple[str, str, str] | None:
    """(field, what, expected) when a cell lies outside the target's limits."""
    if tp not in limits.tensor_parallel:
        return "tp", f"TP {tp} is outside the target's limits", f"one of {list(limits.tensor_parallel)}"
    if draft not in limits.draft_lengths:
        allowed = list(limits.draft_lengths)
        return "draft_length", f"draft length {draft} is outside the target's limits", f"one of {allowed}"
    rows = requests * (1 + draft)
    if rows > limits.max_rows:
        what = f"{requests} requests x (1 + {draft} drafts) = {rows} rows, above the target's {limits.max_rows}"
        return "requests", what, f"at most {limits.max_rows} rows (put it under probes: it must run stock)"
    if dcp != 1 and not (dcp == tp and "tp" in limits.context_parallel):
        return "dcp", f"context parallelism {dcp} at TP {tp} is outside the target's limits", "1 or tp"
    return None
