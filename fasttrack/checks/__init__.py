"""Checks measure and write records; they never judge. Importing this package loads no torch."""

from __future__ import annotations

from fasttrack.checks.base import Check, Context, Unit
from fasttrack.checks.evals import EvalsCheck
from fasttrack.checks.isolation import IsolationCheck
from fasttrack.checks.numerics import NumericsCheck
from fasttrack.checks.performance import PerformanceCheck
from fasttrack.gates.base import Scope

#: In the order in which they run: cheap and sharp first.
CHECKS: dict[str, Check] = {
    check.name: check for check in (NumericsCheck(), IsolationCheck(), EvalsCheck(), PerformanceCheck())
}


def plan_units(scope: Scope) -> list[Unit]:
    """Every work unit of the scope's tier that a selected gate needs, in running order."""
    selected = {name.partition(".")[0] for name in (*scope.manifest.gates.required, *scope.manifest.gates.optional)}
    return [unit for name, check in CHECKS.items() if name in selected for unit in check.units(scope)]


__all__ = ["CHECKS", "Check", "Context", "Unit", "plan_units"]
