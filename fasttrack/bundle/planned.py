"""The plan as it follows from the manifest: which work units a run of these checks must have, and has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fasttrack.bundle.files import printable
from fasttrack.errors import BundleError

if TYPE_CHECKING:
    from fasttrack.bundle.content import Run
    from fasttrack.manifest import Manifest

MAX_NAMED = 20  #: units named one by one; the rest are counted
FOLLOWS = "plan does not follow from the manifest"


def planned_units(manifest: Manifest, tier: str, checks: Sequence[str]) -> list[str]:
    """The names of the units that ``checks`` plan for ``tier``. Torch-free; reads no file that a task names."""
    from fasttrack.checks import CHECKS

    # Local data decides how long a task takes, not which units it has; a reviewer need not hold the file.
    tasks = [task.model_copy(update={"data": None}) for task in manifest.tasks]
    bare = manifest.model_copy(update={"tasks": tasks})
    return [unit.name for check in CHECKS if check in checks for unit in CHECKS[check].units(bare, tier)]


def replan_problems(run: Run) -> Iterator[str]:
    """How the plan in ``run.json`` differs from the one its manifest, tier and checks give, one line each.

    Raises :class:`BundleError` when the plan cannot be made again.
    """
    from fasttrack.checks import CHECKS

    checks = run.info.facts.get("checks")
    if not isinstance(checks, list) or not checks or not all(isinstance(c, str) and c in CHECKS for c in checks):
        yield f"run.json: checks is not a list of some of {', '.join(CHECKS)}"
        return
    try:
        wanted = planned_units(run.manifest, run.info.tier, checks)
    except Exception as error:  # a manifest of somebody else, which a planner cannot cope with
        name = type(error).__name__
        raise BundleError(f"run.json: plan cannot be made again ({name}: {printable(str(error))})") from None
    told, due = set(run.info.units), set(wanted)
    yield from _named([name for name in wanted if name not in told], "is missing")
    yield from _named([name for name in dict.fromkeys(run.info.units) if name not in due], "is extra")


def _named(units: Sequence[str], what: str) -> Iterator[str]:
    for name in units[:MAX_NAMED]:
        yield f"run.json: {FOLLOWS}: unit {printable(name)} {what}"
    if len(units) > MAX_NAMED:
        yield f"run.json: {FOLLOWS}: {what} in {len(units) - MAX_NAMED} more units"
