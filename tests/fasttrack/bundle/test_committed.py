"""The bundles of this repository can be verified with its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrack.bundle import verify

BUNDLES = sorted((Path(__file__).parents[3] / "bundles").glob("*/"))


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda p: p.name)
def test_a_committed_bundle_verifies(folder: Path) -> None:
    found = verify(folder)
    assert found.problems == []
    assert found.exit_code("pass") == 0


def test_the_kernels_measured_on_a_gpu_are_there() -> None:
    assert any(folder.name.startswith("kimi-k3-h200-shard-") for folder in BUNDLES)
