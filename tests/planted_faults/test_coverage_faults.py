"""A fault that acts only in a part of the claimed scope is seen there, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage_faults import Plant, gate_says, manifest, only_at, only_beyond, stale_slots, stray_write

from fasttrack.checks import batches
from fasttrack.gates import GateResult


def fidelity(plant: Plant | None, folder: Path, *requests: int) -> GateResult:
    """In FP32 alone, and with as few tokens as show the fault."""
    claims = manifest("evals.fidelity", {"requests": list(requests)}, fidelity_sequences=4, fidelity_tokens=5)
    return gate_says(plant, "evals.fidelity", claims, folder, lambda unit: "/fidelity-exact/" in unit.name)[0]


def test_an_honest_path_is_not_called_wrong(tmp_path: Path) -> None:
    result = fidelity(None, tmp_path, 1, 2, 32)
    assert result.reason == "Not decided: no forced sequence of decode/short."  # all of it but BF16
    covered = next(n for n in result.numbers if n.name == "claimed batches covered decode/short/exact")
    assert covered.unit == "of 3 cells (requests 1, 2, 32)"


@pytest.mark.parametrize(("rows", "sizes"), [(2, (1, 2, 4)), (32, (2, 32))])
def test_a_fault_at_one_batch_size_is_seen_and_named(rows: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    result = fidelity(only_at(rows), tmp_path, *sizes)
    assert result.verdict == "fail", result.reason
    assert f"{rows} requests" in result.reason


def test_a_fault_in_long_contexts_alone_is_seen_and_named(tmp_path: Path) -> None:
    result = fidelity(only_beyond(90), tmp_path, 2)
    assert result.verdict == "fail", result.reason
    assert "far contexts" in result.reason


def test_a_stale_table_of_slots_is_seen_once_requests_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fidelity(stale_slots, tmp_path, 2)
    assert result.verdict == "fail", result.reason
    assert "after others" in result.reason
    monkeypatch.setattr(batches, "_late", lambda *_: {"late": 0})
    assert fidelity(stale_slots, tmp_path / "unchanging", 2).verdict != "fail"


@pytest.mark.parametrize("plant", [None, stray_write])
def test_a_write_to_what_nobody_owns_is_seen_by_the_witnesses(plant: Plant | None, tmp_path: Path) -> None:
    claims = manifest("isolation.witnesses", {"requests": [2]})
    name = "isolation.witnesses"
    result, _ = gate_says(plant, name, claims, tmp_path, lambda unit: unit.name.startswith("isolation/cell"))
    assert result.verdict == ("fail" if plant else "pass"), result.reason
    assert ("that none of its requests owns" if plant else "no step changed state") in result.reason
