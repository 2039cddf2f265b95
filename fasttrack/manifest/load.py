"""Read a manifest: syntax, fields, and whether the target's limits allow what is claimed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fasttrack import SCHEMA_VERSION
from fasttrack.errors import ManifestError
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
    _check_contexts(manifest, path, lines)
    if description is not None:
        _check_limits(manifest, description, path, lines)
    return manifest, raw


def _at(path: Path, lines: LineMap, loc: tuple[str | int, ...]) -> str:
    return f"{path}:{lines.line(loc)}: {'.'.join(str(part) for part in loc)}" if loc else f"{path}:1"


def _check_version(data: dict[str, Any], path: Path, lines: LineMap) -> None:
    version = data.get("schema_version")
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION:
        raise ManifestError(
            f"version {version} is newer than this fasttrack reads",
            where=_at(path, lines, ("schema_version",)),
            expected=f"{SCHEMA_VERSION}, or a newer fasttrack",
        )


_EXPECTED = {
    "extra_forbidden": "one of the documented keys (see `fasttrack schema manifest`)",
    "missing": "this key to be present",
}


def _from_pydantic(error: ValidationError, path: Path, lines: LineMap) -> ManifestError:
    errors = error.errors()
    first = errors[0]
    # Union branches and validators leave tags such as "constrained-int" in the location: not keys of the file.
    loc = tuple(part for part in first["loc"] if isinstance(part, int) or part.isidentifier() or part[:1].islower())
    loc = tuple(part for part in loc if not (isinstance(part, str) and ("[" in part or part == "constrained-int")))
    kind = first["type"]
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if kind == "extra_forbidden":
        what = f"unknown key{more}"
    elif kind == "missing":
        what = f"is missing{more}"
    else:
        given = first.get("input")
        shown = f", not {given!r}" if isinstance(given, (str, int, float, bool)) or given is None else ""
        what = f"{message[0].lower()}{message[1:]}{shown}{more}"
    return ManifestError(what, where=_at(path, lines, loc), expected=_EXPECTED.get(kind, ""))


def _check_contexts(manifest: Manifest, path: Path, lines: LineMap) -> None:
    known = ", ".join(manifest.contexts)
    for index, row in enumerate(manifest.scope):
        for name in row.context:
            if name not in manifest.contexts:
                where = _at(path, lines, ("scope", index, "context"))
                raise ManifestError(f"unknown context {name!r}", where=where, expected=f"one of: {known}")
    named = {"named_cells": [c.context for c in manifest.named_cells], "probes": [p.context for p in manifest.probes]}
    for group, contexts in named.items():
        for index, name in enumerate(contexts):
            if name not in manifest.contexts:
                where = _at(path, lines, (group, index, "context"))
                raise ManifestError(f"unknown context {name!r}", where=where, expected=f"one of: {known}")


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
                expected=f"one of: {', '.join(description.fallback_reasons)}",
            )
    for index, feature in enumerate(manifest.features):
        if feature not in description.features:
            known = ", ".join(description.features) or "none"
            raise ManifestError(
                f"target {description.name} does not list feature {feature!r}",
                where=_at(path, lines, ("features", index)),
                expected=f"one of: {known}",
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
