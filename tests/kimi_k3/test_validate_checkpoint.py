"""A checkpoint that cannot be used is refused before a run folder exists."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kimi_k3.reference.checkpoint import save_checkpoint
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.init import random_weights

MANIFEST = {
    "schema_version": 1,
    "name": "k",
    "target": "kimi_k3",
    "engine": {"kind": "embedded", "options": {}},
    "scope": [{"name": "row", "tp": [8], "requests": [1]}],
    "gates": {"required": ["isolation.refusals"]},
    "tiers": {"smoke": {"minutes": 1}},
}


@pytest.mark.parametrize("damage", ["truncated", "missing", "option"])
def test_unusable_checkpoints_leave_nothing_behind(tmp_path: Path, damage: str):
    folder = tmp_path / "checkpoint"
    options: dict[str, object] = {"checkpoint": str(folder)}
    if damage == "truncated":
        save_checkpoint(folder, TINY_A, random_weights(TINY_A, 0))
        shard = sorted(folder.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:1000])
    elif damage == "option":
        options = {"checkpoint": "tiny-a", "precision": "fp5"}
    (tmp_path / "k.yaml").write_text(yaml.safe_dump({**MANIFEST, "engine": {"kind": "embedded", "options": options}}))
    command = [sys.executable, "-c", "from fasttrack.cli.main import main; main()", "validate", "k.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {"truncated": "safetensors", "missing": "checkpoint", "option": "fp5"}[damage] in done.stderr
    assert not (tmp_path / "runs").exists()
