"""Checks measure and write records; they never judge. Importing this package loads no torch."""

from __future__ import annotations

from fasttrack.checks.base import Check, Context, Unit
from fasttrack.checks.evals import EvalsCheck
from fasttrack.checks.features import FeaturesCheck
from fasttrack.checks.isolation import IsolationCheck
from fasttrack.checks.numerics import NumericsCheck
from fasttrack.checks.performance import PerformanceCheck

#: In the order in which they run: cheap and sharp first.
CHECKS: dict[str, Check] = {
    check.name: check
    for check in (NumericsCheck(), IsolationCheck(), FeaturesCheck(), EvalsCheck(), PerformanceCheck())
}


__all__ = ["CHECKS", "Check", "Context", "Unit"]
