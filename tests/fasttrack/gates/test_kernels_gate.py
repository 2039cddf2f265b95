"""Kernel goals: met, missed, required or only listed; shard evidence alone speaks of hardware."""

from __future__ import annotations

from typing import Any

import pytest
from fake_target import TARGET
from harness import TOY

from fasttrack.checks import CHECKS
from fasttrack.checks.base import Context
from fasttrack.engines.cache import EngineCache
from fasttrack.errors import EvidenceError
from fasttrack.gates import GATES, Scope
from fasttrack.gates.kernels import natural
from fasttrack.manifest.model import Manifest
from fasttrack.plan.planner import Plan, make_plan
from fasttrack.records import PerformanceRecord
from fasttrack.report.kernels import _series, kernel_grid, kernel_layout
from fasttrack.run.preflight import preflight
from fasttrack.target import KernelBenchmark, KernelMeasurement, KernelTiming

MANIFEST = {
    **TOY,
    "scope": [{"name": "plain", "tp": [1, 2], "requests": [1, 4]}],
    "probes": [],
    "gates": {"required": ["performance.kernels"]},
}


def timing(what: str, microseconds: float) -> KernelTiming:
    return KernelTiming(what, 1e-6 * microseconds, 0.9e-6 * microseconds, 1.1e-6 * microseconds, 60, "events")


class Shard:
    """The toy target with two kernels: one per rank size, one that is the same on every rank."""

    def __init__(self, **microseconds: float) -> None:
        self.microseconds, self.ran = microseconds, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(TARGET, name)

    def kernel_benchmarks(self, tier: str, options: Any) -> Any:
        for tp in (1, 2, 4):
            for rows in (1, 4):
                yield self.benchmark("proj", tp, rows, goal_fraction=0.9)
        for rows in (1, 4):
            yield self.benchmark("norm", 0, rows, goal_s=5e-6)

    def benchmark(self, op: str, tp: int, rows: int, **goal: float) -> KernelBenchmark:
        name = f"{op}/tp{tp}/m{rows}"

        def run() -> KernelMeasurement:
            self.ran.append(name)
            us = self.microseconds.get(op, 4.0)
            return KernelMeasurement(timing(op, us), 3.8e-6, "H200", timing("mm", 5.0) if op == "proj" else None)

        return KernelBenchmark(op, name, "8x8", rows, tp, 64, run, **goal)


def measured(target: Any, tmp_path: Any, **margins: Any) -> tuple[Scope, list[Any]]:
    scope = Scope(Manifest.model_validate({**MANIFEST, "margins": margins}), "smoke", TARGET.describe())
    records: list[Any] = []
    for unit in CHECKS["performance"].units(scope.manifest, "smoke"):
        engines = EngineCache(target, scope, tmp_path, seed=1)
        context = Context(scope, target, engines, tmp_path, unit, 1, lambda name: 1, records.append)
        CHECKS["performance"].run(unit, context)
    return scope, records


def test_each_kernel_is_timed_once_and_goals_stand_beside_results(tmp_path):
    target = Shard(proj=4.0)
    scope, records = measured(target, tmp_path)
    assert sorted(target.ran) == sorted(f"{op}/m{m}" for op in ("proj/tp1", "proj/tp2", "norm/tp0") for m in (1, 4))
    result = GATES["performance.kernels"](scope, records)
    assert (result.verdict, result.reason) == ("pass", "6 of 6 goals met.")
    numbers = {n.name: n for n in result.numbers}
    assert (numbers["goals met"].value, numbers["goals met"].limit) == (6, "reported only")
    assert numbers["kernels timed"].value == 6
    assert numbers["kernels at least as fast as the library's"].value == 4
    assert len(numbers) == 3  # nothing missed, nothing slower
    proof = {(r.evidence.kind, r.evidence.rank, r.evidence.ranks) for r in records}
    assert proof == {("shard", 0, 1), ("shard", 0, 2)}


@pytest.mark.parametrize(("required", "verdict"), [(None, "pass"), (0.3, "pass"), (0.34, "fail"), (1.0, "fail")])
def test_missed_goals_are_listed_and_count_where_the_manifest_says_so(required, verdict, tmp_path):
    margins = {} if required is None else {"kernel_goals": required}
    scope, records = measured(Shard(proj=4.3), tmp_path, **margins)
    result = GATES["performance.kernels"](scope, records)
    assert result.verdict == verdict
    assert result.reason.startswith("2 of 6 goals met; missed: proj/tp1/m1, proj/tp1/m4")
    numbers = {n.name: n for n in result.numbers}
    assert numbers["missed: proj/tp2/m4"].value == 4.3
    assert "88.3% of the floor" in numbers["missed: proj/tp2/m4"].unit
    assert "mm 5.00" in numbers["missed: proj/tp2/m4"].unit
    assert numbers["missed: proj/tp2/m4"].limit == ">= 90% of the floor"


def test_a_goal_missed_by_a_hair_does_not_look_met(tmp_path):
    scope, records = measured(Shard(proj=4.2225), tmp_path)  # 89.994% of the floor
    numbers = {n.name: n for n in GATES["performance.kernels"](scope, records).numbers}
    assert "89.9% of the floor" in numbers["missed: proj/tp2/m4"].unit
    cells = [cell for _, row in kernel_grid(records).rows for cell in row if cell and cell.state == "missed"]
    assert {cell.part for cell in cells} == {"89%"}


def test_a_time_goal_is_missed_by_time(tmp_path):
    scope, records = measured(Shard(norm=5.1), tmp_path, kernel_goals=1.0)
    result = GATES["performance.kernels"](scope, records)
    assert "missed: norm/tp0/m1, norm/tp0/m4" in result.reason
    assert {n.name: n.limit for n in result.numbers}["missed: norm/tp0/m1"] == "<= 5 us"


def test_a_kernel_slower_than_the_library_is_listed(tmp_path):
    scope, records = measured(Shard(proj=5.2), tmp_path)
    numbers = {n.name: n for n in GATES["performance.kernels"](scope, records).numbers}
    assert numbers["kernels at least as fast as the library's"].value == 0
    assert [n for n in numbers if n.startswith("slower: ")] == [
        f"slower: proj/tp{tp}/m{m}" for tp in (1, 2) for m in (1, 4)
    ]


def test_the_report_shows_every_kernel_beside_goal_and_library(tmp_path):
    _, records = measured(Shard(proj=4.3), tmp_path)
    grid = kernel_grid(records)
    assert grid.columns == (1, 4)
    assert [name for name, _ in grid.rows] == ["norm/tp0/m*", "proj/tp1/m*", "proj/tp2/m*"]
    texts = {name: [c.text for c in cells if c] for name, cells in grid.rows}
    assert texts["norm/tp0/m*"] == ["4.00 us, 95% (<= 5 us: met)"] * 2
    assert texts["proj/tp2/m*"] == ["4.30 us, 88% (>= 90% of the floor: missed); mm 5.00"] * 2
    assert kernel_layout(grid)["rows"][1]["boxes"][0]["text"] == "4.30, 88%"
    assert kernel_grid([]).rows == ()


@pytest.mark.parametrize(
    ("name", "rows", "series"),
    [
        ("proj/tp8/m8", 8, "proj/tp8/m*"),
        ("proj/tp8/m64/published", 64, "proj/tp8/m*/published"),
        ("core/tp8/b8q4", 32, "core/tp8/b*q4"),
        ("res/pre8/m8", 8, "res/pre8/m*"),
        ("alone", 8, "alone"),
    ],
)
def test_sizes_of_one_kernel_stand_in_one_row(name, rows, series):
    assert _series(name, rows) == series


def test_kernels_sort_by_number():
    assert sorted(["a/m16", "a/m8", "a/m64", "a/m1"], key=natural) == ["a/m1", "a/m8", "a/m16", "a/m64"]


def test_a_claimed_size_that_was_not_timed_is_no_pass(tmp_path):
    scope, records = measured(Shard(), tmp_path)
    some = [r for r in records if r.details["kernel"] != "proj/tp2/m4"]
    result = GATES["performance.kernels"](scope, some)
    assert (result.verdict, result.reason) == ("inconclusive", "Not timed: proj at 4 rows, TP 2.")


def test_emulated_times_say_nothing(tmp_path):
    scope, records = measured(Shard(), tmp_path)
    emulated = [r.model_copy(update={"evidence": r.evidence.model_copy(update={"kind": "emulated"})}) for r in records]
    assert GATES["performance.kernels"](scope, emulated).verdict == "not_run"
    assert GATES["performance.kernels"](scope, []).verdict == "not_run"


def test_kernel_times_are_no_speed_up_and_a_time_of_zero_is_no_time(tmp_path):
    scope, records = measured(Shard(), tmp_path)
    assert GATES["performance.speedup"](scope, records).verdict == "not_run"
    assert all(isinstance(r, PerformanceRecord) for r in records)
    broken = [records[0].model_copy(update={"value": 0.0}), *records[1:]]
    assert GATES["performance.kernels"](scope, broken).verdict == "fail"


def test_a_target_without_kernels_is_missing_evidence(tmp_path):
    with pytest.raises(EvidenceError, match="toy offers no kernel benchmarks"):
        measured(TARGET, tmp_path)


class NoEngine(Shard):
    def engine(self, spec: Any) -> Any:
        raise AssertionError("an engine was built")


def test_kernels_alone_need_no_engine(tmp_path):
    """The checkpoint of a shard is one that no engine can hold."""
    description, path = TARGET.describe(), tmp_path / "m.yaml"

    def plan(*gates: str) -> Plan:
        manifest = Manifest.model_validate({**MANIFEST, "gates": {"required": list(gates)}})
        return make_plan(manifest, description, "smoke")

    assert preflight(plan("performance.kernels", "numerics.error"), NoEngine(), path) == ""
    with pytest.raises(AssertionError, match="an engine was built"):
        preflight(plan("performance.kernels", "isolation.refusals"), NoEngine(), path)
