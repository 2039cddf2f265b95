"""What the harness records for a scope, without a run folder: for tests of checks, gates and planted faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrack.checks import CHECKS
from fasttrack.checks.base import Context, Unit
from fasttrack.engines.cache import EngineCache
from fasttrack.gates import Scope


def run_units(
    scope: Scope,
    folder: Path,
    keep: Callable[[Unit], bool] = lambda unit: True,
    *,
    check: str,
    target: Any,
    engines: EngineCache | None = None,
    salt: str = "",
) -> list[Any]:
    """The records of the units of ``check`` that ``keep`` accepts. Seeds depend on nothing but ``salt`` and names.

    ``engines`` are taken over from an earlier run, and left to the caller.
    """
    records: list[Any] = []
    own = engines or EngineCache(target, scope, folder, seed=1)
    for unit in CHECKS[check].units(scope.manifest, scope.tier):
        if keep(unit):
            context = Context(
                scope=scope,
                target=target,
                engines=own,
                workdir=folder,
                unit=unit,
                attempt=1,
                seed=lambda name: int(hashlib.sha256((salt + name).encode()).hexdigest()[:7], 16),
                write=records.append,
            )
            CHECKS[check].run(unit, context)
    if engines is None:
        own.close()
    return records
