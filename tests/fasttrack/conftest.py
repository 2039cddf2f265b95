"""Makes the fake target importable as ``fake_target``, and shares the records of one run of the toy manifest."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def toy_scope():
    from harness import toy_scope

    return toy_scope()


@pytest.fixture(scope="session")
def toy_records(toy_scope, tmp_path_factory):
    """Every record of the toy manifest's smoke tier, by check."""
    from harness import run_units

    from fasttrack.checks import CHECKS

    return {name: run_units(toy_scope, tmp_path_factory.mktemp(name), check=name) for name in CHECKS}
