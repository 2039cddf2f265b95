"""Off means off: deletion is physical, and a package that reaches into its optimised part is caught."""

import os
import sys
from pathlib import Path

import pytest
from fake_target import TARGET
from harness import run_units, toy_scope

from fasttrack.checks import off_state
from fasttrack.checks.off_probe import Places, asked, locate, outputs_of
from fasttrack.checks.off_state import copy_without, environment, target_reference
from fasttrack.gates import GATES
from fasttrack.records import OffStateRecord
from fasttrack.target import EngineSpec


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
    assert [r.checkout for r in found] == ["complete", "optimised-packages-deleted", "this-process"]
    assert result.verdict == "fail"
    assert "Outputs change" in result.reason


PATCHES = {
    "a function of stock": "import leaky_target.engine as e\n"
    "_embed = e.ToyEngine._embed\ne.ToyEngine._embed = lambda *a: _embed(*a) + 1\n",
    "torch": "_randn = torch.randn\ntorch.randn = lambda *a, **k: _randn(*a, **k) * 0.5\n",
    "nothing": "",
}


@pytest.mark.parametrize("what", PATCHES)
def test_stock_that_the_optimised_path_changes_where_it_runs_is_caught(what, leaky, tmp_path, monkeypatch):
    """Importing the optimised package replaces something: fresh stock processes never see it, the run's own arms do."""
    (leaky / "fast.py").write_text((leaky / "fast.py").read_text() + "\n\n" + PATCHES[what])
    from leaky_target import TARGET as LEAKY

    def fresh(job, first, given):
        """What the probe gives: in this process, where nothing optimised is loaded yet."""
        assert "leaky_target.fast" not in sys.modules
        spec = EngineSpec(**{**job["spec"], "workdir": Path(job["spec"]["workdir"])})
        digest, count = outputs_of(LEAKY.engine(spec), asked(job["requests"]))
        nothing = {key: [] for key in ("modules_loaded", "files_opened", "environment_added", "importable")}
        return {"sha256": digest, "outputs": count, **nothing}

    monkeypatch.setattr("fasttrack.checks.off_state._fresh_process", fresh)
    records = run_units(toy_scope(), tmp_path, off_only, check="isolation", target=LEAKY)
    result = GATES["isolation.off_is_off"](toy_scope(), records)
    if what == "nothing":
        assert result.verdict == "pass", result.reason
    else:
        assert result.verdict == "fail"
        assert "in the process that has run the optimised path" in result.reason


def test_a_fresh_process_starts_where_this_one_did_with_few_variables_and_tells_what_it_reads(
    leaky, tmp_path, monkeypatch
):
    """A relative path of an option is found; the optimised file is loaded under another name, and that is seen."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "weights.txt").write_text("7")
    line = (
        "import importlib.util, os\nfrom pathlib import Path\nassert Path('weights.txt').read_text() == '7'\n"
        "_spec = importlib.util.spec_from_file_location('innocent', Path(__file__).parent / 'fast.py')\n"
        "import sys\nsys.modules['innocent'] = importlib.util.module_from_spec(_spec)\n"
        "_spec.loader.exec_module(sys.modules['innocent'])\n"
        "os.environ['LANG'] = 'changed'\n"
        "os.environ['SEEN_' + ('SECRET' if 'LEAKY_SECRET' in os.environ else 'NOTHING')] = '1'"
    )
    engine = leaky / "engine.py"
    engine.write_text(engine.read_text().replace("class ToyEngine:", f"{line}\n\n\nclass ToyEngine:"))
    monkeypatch.chdir(tmp_path / "start")
    variables = {**os.environ, "LEAKY_SECRET": "1", "FASTTRACK_X": "1", "OMP_NUM_THREADS": "1", "LANG": "C"}
    given, withheld = environment(variables, "leaky")
    assert withheld == ["FASTTRACK_X", "LEAKY_SECRET"]
    assert given["OMP_NUM_THREADS"] == "1"
    spec = {"kind": "embedded", "arm": "stock", "switch_value": "auto", "max_requests": 4, "workdir": str(tmp_path)}
    job = {"target": "leaky_target.target:TARGET", "spec": spec, "modules": ["leaky_target.fast"]}
    job["requests"] = [{"id": "r", "prompt": [1, 2, 3], "max_tokens": 2}]
    job["places"] = locate(job["modules"])
    found = off_state._fresh_process(job, None, given)
    assert found["outputs"] == 4
    assert found["modules_loaded"] == ["innocent: leaky_target.fast (fast.py)"]
    assert found["files_opened"] == ["leaky_target.fast (fast.py)"]
    assert set(found["environment_added"]) >= {"LANG", "SEEN_NOTHING"}


def test_files_are_known_by_where_they_lie(tmp_path):
    package = tmp_path / "opt" / "decode"
    package.mkdir(parents=True)
    (tmp_path / "link").symlink_to(package)
    places = Places({"opt.decode": [str(package)]})
    for path in (package / "a.py", package / "__pycache__" / "a.pyc", tmp_path / "link" / "a.py"):
        assert (places.owner(str(path)) or "").startswith("opt.decode (")
    for path in (tmp_path / "opt" / "decoder" / "a.py", tmp_path / "opt" / "__init__.py"):
        assert places.owner(str(path)) is None


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
    fresh = [r for r in records if isinstance(r, OffStateRecord) and r.checkout != "this-process"]
    assert [r.modules_loaded for r in fresh] == [["hashlib"]] * 2
    assert GATES["isolation.off_is_off"](scope, records).verdict == "fail"
