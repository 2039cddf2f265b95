"""``fasttrack plan``: what a run would do, how long it takes, and what it cannot show here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fasttrack.cli.output import plain, table


def plan(
    manifest: Annotated[Path, typer.Argument(help="The scope to plan.")],
    tier: Annotated[str | None, typer.Option(help="smoke, standard or full; default: the manifest's.")] = None,
    check: Annotated[str | None, typer.Option(help="Only these checks, comma-separated.")] = None,
    units: Annotated[bool, typer.Option("--units", help="List every unit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Print what a run would do, how long, and what it cannot show here."""
    from fasttrack.run.runner import Request, prepare

    checks = tuple(name.strip() for name in check.split(",") if name.strip()) if check else ()
    planned = prepare(Request(manifest=manifest, tier=tier, checks=checks)).plan
    declared = planned.manifest
    if as_json:
        data = {
            "name": declared.name,
            "tier": planned.tier,
            "seconds": planned.cost_s,
            "missing_hardware": planned.gap,
            "cannot_show": list(declared.cannot_show),
            "unused_gates": list(planned.unused_gates),
            "units": [{"name": u.name, "check": u.check, "seconds": u.cost_s} for u in planned.units],
        }
        plain(json.dumps(data, indent=1))
        return 0
    budget = declared.tier(planned.tier).minutes
    plain(f"{declared.name}, tier {planned.tier}: {len(planned.units)} units, budget {budget:g} minutes")
    rows = []
    for name in planned.checks:
        own = [u for u in planned.units if u.check == name]
        gates = [g for g in (*declared.gates.required, *declared.gates.optional) if g.split(".")[0] == name]
        rows.append([name, str(len(own)), f"{sum(u.cost_s for u in own):.0f}", ", ".join(gates)])
    table(["check", "units", "seconds", "decides"], rows)
    if units:
        table(["unit", "seconds"], [[u.name, f"{u.cost_s:.1f}"] for u in planned.units])
    for gate in planned.unused_gates:
        plain(f"Not decided by this run: {gate}")
    for sentence in declared.cannot_show:
        plain(f"Not shown: {sentence}")
    plain(f"Cannot run here: {planned.gap}" if planned.gap else "Can run here.")
    return 0
