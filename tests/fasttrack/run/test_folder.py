"""A run folder appears whole, locked, and for one process only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrack.run import runner
from fasttrack.run.folder import FolderTaken, RunFolder, new_folder


def create(folder: RunFolder) -> Any:
    return folder.create(b"manifest", {"identity": "a"}, {}, "")


def test_a_new_folder_is_locked_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path / "run")
    with create(folder):
        assert folder.lock() is None
    real, seen = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if self.is_dir():
            seen.append(RunFolder(self).lock())
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    create(RunFolder(tmp_path / "other")).close()
    assert seen == [None]


def test_a_folder_that_another_process_made_meanwhile_is_left_alone(tmp_path: Path):
    create(RunFolder(tmp_path / "run")).close()
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(FolderTaken):
        create(RunFolder(tmp_path / "run"))
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_run_whose_name_was_taken_in_between_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    create(RunFolder(tmp_path / "runs" / "toy")).close()
    names = iter(["toy", "toy-2"])
    monkeypatch.setattr(runner, "new_folder", lambda runs, name: RunFolder(runs / next(names)))
    folder, lock = runner._new(runner.Request(Path("m"), runs=tmp_path / "runs"), "toy", b"m", {}, {}, "")
    lock.close()
    assert folder.path.name == "toy-2"
    assert new_folder(tmp_path / "runs", "toy").path.parent == tmp_path / "runs"
