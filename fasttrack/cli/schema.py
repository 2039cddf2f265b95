"""``fasttrack schema``: the JSON schemas of the file formats."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from fasttrack.errors import UsageError


def schemas() -> dict[str, Any]:
    """Name -> JSON schema of every file format a user writes or reads."""
    from fasttrack.gates import GateResult
    from fasttrack.manifest import Manifest
    from fasttrack.records.schema import RECORD_TYPES

    found: dict[str, Any] = {"manifest": Manifest.model_json_schema(), "gate": GateResult.model_json_schema()}
    for kind in RECORD_TYPES:
        name = kind.model_fields["type"].default
        found[f"record.{name}"] = TypeAdapter(kind).json_schema()
    return found


def schema(
    name: Annotated[str, typer.Argument(help="manifest, gate, or record.<type>; `list` names them all.")] = "manifest",
) -> None:
    """Print the JSON schema of a manifest, a gate result or a record type."""
    found = schemas()
    if name == "list":
        typer.echo("\n".join(found))
        return
    if name not in found:
        raise UsageError(f"no schema {name!r}", expected=f"one of: {', '.join(found)}")
    typer.echo(json.dumps(found[name], indent=2))
