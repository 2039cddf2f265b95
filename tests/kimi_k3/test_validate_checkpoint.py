"""A checkpoint that cannot be used is refused before a run folder exists."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fasttrack.errors import UsageError
from fasttrack.run.preflight import preflight
from fasttrack.run.runner import Request, prepare
from kimi_k3.decode.registry import PROVIDER_MODULES
from kimi_k3.names import PROVIDERS
from kimi_k3.reference.checkpoint import save_checkpoint
from kimi_k3.reference.config import TINY_A
from kimi_k3.reference.init import random_weights

MANIFEST: dict[str, Any] = {
    "schema_version": 1,
    "name": "k",
    "target": "kimi_k3",
    "engine": {"kind": "embedded", "options": {}},
    "scope": [{"name": "row", "tp": [8], "requests": [1]}],
    "gates": {"required": ["isolation.refusals"]},
    "tiers": {"smoke": {"minutes": 1}},
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": {"checkpoint": "nowhere"}}, "k.yaml:6: engine.options: checkpoint 'nowhere': no such folder"),
        ({"options": {"precision": "fp5"}}, "k.yaml:7: engine.options.precision: unknown precision 'fp5'; expected"),
        ({"options": {"device": "foo"}}, "k.yaml:7: engine.options.device: unknown device 'foo'; expected cpu, cuda"),
        ({"options": {"device": "cuda:99"}}, "k.yaml:7: engine.options.device: cuda:99 is not here"),
        ({"options": {"provider": "bogus"}}, "k.yaml:7: engine.options.provider: unknown provider 'bogus'; expected"),
        ({"exact_options": {"provider": "bogus"}}, "k.yaml:7: engine.exact_options.provider: unknown provider"),
        (
            {"feature_options": {"drafter": "nowhere"}},
            "k.yaml:7: engine.feature_options.drafter: drafter 'nowhere': no",
        ),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_their_line(tmp_path: Path, options: dict[str, Any], said: str):
    scope = [*MANIFEST["scope"], {"name": "d", "step": "verify", "tp": [8], "requests": [1], "draft_length": [3]}]
    path = tmp_path / "k.yaml"
    path.write_text(
        yaml.safe_dump({**MANIFEST, "scope": scope, "engine": {"kind": "embedded", **options}}, sort_keys=False)
    )
    prepared = prepare(Request(path))
    with pytest.raises(UsageError) as caught:
        preflight(prepared.plan, prepared.target, path)
    assert str(caught.value).startswith(f"{tmp_path}/{said}"), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "tokenizer"])
def test_unusable_checkpoints_leave_nothing_behind(tmp_path: Path, damage: str):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, TINY_A, random_weights(TINY_A, 0))
    if damage == "truncated":
        shard = sorted(folder.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:1000])
    else:
        (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    engine = {"kind": "embedded", "options": {"checkpoint": str(folder)}}
    (tmp_path / "k.yaml").write_text(yaml.safe_dump({**MANIFEST, "engine": engine}))
    command = [sys.executable, "-c", "from fasttrack.cli.main import main; main()", "validate", "k.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {"truncated": "safetensors", "tokenizer": "tokenizer.json: cannot be read"}[damage] in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_names_of_providers_are_those_of_the_registry():
    assert tuple(PROVIDER_MODULES) == PROVIDERS
