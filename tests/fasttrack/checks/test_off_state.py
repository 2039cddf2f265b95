"""Off means off: deletion is physical, and a package that reaches into its optimised part is caught."""

import sys
from pathlib import Path

import pytest
from fake_target import TARGET
from harness import run_units, toy_scope

from fasttrack.checks.off_state import copy_without, target_reference
from fasttrack.gates import GATES
from fasttrack.records import OffStateRecord


def off_only(unit):
    return unit.name == "isolation/off_state"


def test_reference_names_the_registered_object():
    assert target_reference(TARGET) == "fake_target.target:TARGET"


def test_copy_lacks_exactly_the_optimised_modules(tmp_path):
    copy_without("fake_target", ("fake_target.fast", "torch"), tmp_path)
    assert sorted(p.name for p in (tmp_path / "fake_target").iterdir()) == ["__init__.py", "engine.py", "target.py"]


def test_copy_deletes_packages_too(tmp_path, monkeypatch):
    package = tmp_path / "source" / "opt_demo" / "decode"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "source")
    copy_without("opt_demo", ("opt_demo.decode",), tmp_path / "copy")
    assert not (tmp_path / "copy" / "opt_demo" / "decode").exists()
    assert (tmp_path / "copy" / "opt_demo" / "__init__.py").exists()


@pytest.fixture
def leaky(tmp_path, monkeypatch):
    """A copy of the toy target under another name whose engine always loads the optimised module, if it can."""
    import torch

    monkeypatch.setattr(torch, "randn", torch.randn)  # one of these packages replaces it: put it back afterwards
    package = tmp_path / "leak" / "leaky_target"
    copy_without("fake_target", (), tmp_path / "plain")
    package.parent.mkdir()
    (tmp_path / "plain" / "fake_target").rename(package)
    for path in package.glob("*.py"):
        path.write_text(path.read_text().replace("fake_target", "leaky_target").replace("toy::", "leaky::"))
    monkeypatch.syspath_prepend(package.parent)
    yield package
    for name in [m for m in sys.modules if m.partition(".")[0] == "leaky_target"]:
        del sys.modules[name]


def run_leaky(package: Path, folder: Path, line: str):
    engine = package / "engine.py"
    engine.write_text(engine.read_text().replace("class ToyEngine:", f"{line}\n\n\nclass ToyEngine:"))
    from leaky_target import TARGET as LEAKY

    records = run_units(toy_scope(), folder, off_only, check="isolation", target=LEAKY)
    found = [r for r in records if isinstance(r, OffStateRecord)]
    # the toy scope describes fake_target's modules; the leaky copy names its own
    return GATES["isolation.off_is_off"](toy_scope(), records), found


def test_a_change_of_outputs_by_the_mere_presence_of_the_package_is_caught(leaky, tmp_path, monkeypatch):
    """Stock that is scaled when the optimised file lies beside it: no module loaded, other outputs."""
    line = (
        "from pathlib import Path\n\nSCALE = 2 if (Path(__file__).parent / 'fast.py').exists() else 3\n"
        "_randn = torch.randn\n"
        "torch.randn = lambda *a, **k: _randn(*a, **k) * SCALE"
    )
    monkeypatch.setattr("fasttrack.checks.off_state.copy_without", _copy_leaky)
    result, found = run_leaky(leaky, tmp_path, line)
    assert [r.checkout for r in found] == ["complete", "optimised-packages-deleted"]
    assert result.verdict == "fail"
    assert "Outputs change" in result.reason


def _copy_leaky(package, modules, folder):
    copy_without(package, tuple(m.replace("fake_target", package) for m in modules), folder)


def test_loading_the_optimised_module_with_the_switch_off_is_caught(tmp_path, monkeypatch):
    """The toy engine's description claims a module that its stock path does load."""
    scope = toy_scope()
    from dataclasses import replace

    from fasttrack.gates import Scope

    claims = replace(scope.description, optimized_modules=("fake_target.fast", "fake_target.engine"))
    monkeypatch.setattr("fasttrack.checks.off_state.copy_without", lambda p, m, f: copy_without(p, m[:1], f))
    with pytest.raises(RuntimeError, match=r"can still be imported: \['fake_target.engine'\]"):
        run_units(Scope(scope.manifest, "smoke", claims), tmp_path, off_only, check="isolation")


def test_complete_checkout_reports_loaded_modules(tmp_path):
    from dataclasses import replace

    from fasttrack.gates import Scope

    scope = toy_scope()
    claims = replace(scope.description, optimized_modules=("fake_target.fast", "hashlib"))
    records = run_units(Scope(scope.manifest, "smoke", claims), tmp_path, off_only, check="isolation")
    assert {tuple(r.modules_loaded) for r in records if isinstance(r, OffStateRecord)} == {("hashlib",)}
    assert GATES["isolation.off_is_off"](scope, records).verdict == "fail"
