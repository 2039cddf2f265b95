"""What a run will do, before it does anything: units, cost, and what cannot be shown here. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fasttrack.checks import CHECKS
from fasttrack.checks.base import Unit
from fasttrack.errors import UsageError, nearest
from fasttrack.gates import Scope, check_names
from fasttrack.manifest.model import Manifest
from fasttrack.plan.hardware import hardware_gap
from fasttrack.plan.missing import missing
from fasttrack.target import TargetDescription


@dataclass(frozen=True)
class Plan:
    """The units of one tier in execution order. ``cost_s`` are planning figures for 2 CPU cores, not promises."""

    manifest: Manifest
    description: TargetDescription
    tier: str
    checks: tuple[str, ...]
    units: tuple[Unit, ...]
    gap: str  #: missing hardware, in a sentence; empty when this machine will do
    unused_gates: tuple[str, ...] = ()  #: declared gates whose check was not selected
    missing: tuple[str, ...] = ()  #: what keeps a run here from a pass, ``gap`` among it; a sentence each

    @property
    def scope(self) -> Scope:
        return Scope(self.manifest, self.tier, self.description)

    @property
    def cost_s(self) -> float:
        return sum(unit.cost_s for unit in self.units)


def check_of(gate: str) -> str:
    """The check that produces a gate's records: the part of its name before the dot."""
    return gate.split(".", 1)[0]


def make_plan(
    manifest: Manifest, description: TargetDescription, tier: str | None, only: Sequence[str] = (), *, where: str = ""
) -> Plan:
    """Plan ``tier`` (default: the manifest's). ``only`` restricts the checks; their gates alone can then pass.

    Raises :class:`UsageError` for an unknown tier, check or gate.
    """
    name = tier or manifest.default_tier
    if name not in manifest.tiers:
        raise UsageError(f"no tier {name!r}", where=where, expected=nearest(name, manifest.tiers))
    if not manifest.cells(name):
        raise UsageError(
            f"tier {name} selects no cell", where=where, expected="a selection that some row of the scope has"
        )
    gates = [*manifest.gates.required, *manifest.gates.optional]
    check_names(gates, where=where)
    wanted = list(dict.fromkeys(check_of(gate) for gate in gates))
    for check in only:
        if check not in CHECKS:
            raise UsageError(f"unknown check {check!r}", where="--check", expected=nearest(check, CHECKS))
        if check not in wanted:
            what = f"no gate of the manifest uses check {check!r}"
            raise UsageError(what, where="--check", expected=f"one of: {', '.join(wanted)}")
    selected = tuple(check for check in CHECKS if check in wanted and (not only or check in only))
    units = [unit for check in selected for unit in CHECKS[check].units(manifest, name)]
    doubled = {unit.name for unit in units if sum(u.name == unit.name for u in units) > 1}
    if doubled:
        raise AssertionError(f"two units are called {sorted(doubled)[0]}")
    unused = tuple(gate for gate in gates if check_of(gate) not in selected)
    return Plan(
        manifest, description, name, selected, tuple(units), hardware_gap(manifest), unused, tuple(missing(manifest))
    )
