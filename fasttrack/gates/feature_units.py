"""Which features are checked on which deployments, and what each of these units recorded. Shared with the check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fasttrack.gates.base import Number, select
from fasttrack.records import CellKey, EngineRecord, FeatureRecord, GenerationRecord, StepRecord

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

PREFIX = "features."
REQUESTS = 8  #: of one feature run, where the claimed rows allow it

#: Chance that an honest run fails the sampling tests of a whole tier, and chance that each sees its margin.
FAMILY_LEVEL, POWER = 1e-3, 0.9
#: Sampling parameters of the two-sample tests: one test each.
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 8},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
}


@dataclass(frozen=True)
class FeatureUnit:
    """One feature on one deployment."""

    feature: str
    cell: CellKey

    @property
    def name(self) -> str:
        return f"features/{self.feature}/tp{self.cell.tp}-dcp{self.cell.dcp}-dl{self.cell.draft_length}"

    @property
    def variant(self) -> str:
        return f"dspark({self.cell.draft_length})" if self.cell.draft_length else "plain"

    @property
    def text(self) -> str:
        dcp = f", DCP {self.cell.dcp}" if self.cell.dcp > 1 else ""
        return f"{self.variant} at TP {self.cell.tp}{dcp}"


def features_of(manifest: Manifest) -> list[str]:
    """The features for which the manifest has a gate, in its order."""
    gates = [*manifest.gates.required, *manifest.gates.optional]
    return [gate.removeprefix(PREFIX) for gate in gates if gate.startswith(PREFIX)]


def feature_units(manifest: Manifest, tier: str) -> list[FeatureUnit]:
    """Every feature on every deployment that the tier's ``features`` select, one deployment after the other."""
    admitted = manifest.tier(tier).features
    rows = max(key.rows for key in manifest.all_cells())
    deployments: dict[tuple[int, int, int], CellKey] = {}
    for cell in manifest.cells(tier):
        key = cell.key
        if cell.named is None and admitted.admits(cell.name, key):
            requests = max(1, min(REQUESTS, rows // (1 + key.draft_length)))
            deployments.setdefault((key.tp, key.dcp, key.draft_length), key.model_copy(update={"requests": requests}))
    features = features_of(manifest)
    return [FeatureUnit(feature, cell) for cell in deployments.values() for feature in features]


def sampling_level(units: Sequence[FeatureUnit]) -> float:
    """Level of one two-sample test, so that all of the tier together keep :data:`FAMILY_LEVEL` (Bonferroni)."""
    tests = len(SETTINGS) * sum(unit.feature == "sampling" for unit in units)
    return FAMILY_LEVEL / max(1, tests)


class UnitRecords:
    """What one unit recorded."""

    def __init__(self, unit: FeatureUnit, records: Iterable[Any]) -> None:
        self.unit = unit
        self.records = [r for r in records if r.unit == unit.name]
        self.steps = select(self.records, StepRecord)

    def run(self, arm: str, name: str) -> str:
        return f"{self.unit.name}/{arm}/{name}"

    def generations(self, arm: str, name: str) -> dict[str, GenerationRecord]:
        """By request id."""
        found = select(self.records, GenerationRecord, arm=arm, run=self.run(arm, name))
        return {r.request: r for r in found}

    def steps_of(self, arm: str, name: str) -> list[StepRecord]:
        return sorted((s for s in self.steps if s.run == self.run(arm, name)), key=lambda s: s.index)

    @property
    def pure(self) -> list[StepRecord]:
        """Decode and verify steps of the optimised arm: those that could have run specialised."""
        return [s for s in self.steps if s.arm == "optimized" and s.kind in ("decode", "verify")]

    @property
    def feature(self) -> FeatureRecord | None:
        found = select(self.records, FeatureRecord)
        return found[-1] if found else None

    def max_context(self) -> int | None:
        found = select(self.records, EngineRecord, arm="optimized")
        return found[-1].config.get("max_context") if found else None


@dataclass(frozen=True)
class Tally:
    """A number of one unit; those of the same name are merged over units by ``merge``: sum, max or min."""

    name: str
    value: float | int
    unit: str
    limit: str = ""
    merge: str = "sum"


@dataclass(frozen=True)
class Findings:
    """What a rule says about one unit: what is wrong, why it shows nothing, and the numbers."""

    wrong: tuple[str, ...] = ()
    vacuous: tuple[str, ...] = ()
    tallies: tuple[Tally, ...] = ()

    def __add__(self, other: Findings) -> Findings:
        return Findings(self.wrong + other.wrong, self.vacuous + other.vacuous, self.tallies + other.tallies)


def merged(tallies: Iterable[Tally]) -> list[Number]:
    """One number per name."""
    found: dict[str, list[Tally]] = {}
    for tally in tallies:
        found.setdefault(tally.name, []).append(tally)
    how: dict[str, Callable[[Iterable[float | int]], float | int]] = {"sum": sum, "max": max, "min": min}
    return [
        Number(name, how[own[0].merge](t.value for t in own), own[0].unit, own[0].limit) for name, own in found.items()
    ]
