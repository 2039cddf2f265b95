"""A plan says what keeps a run here from a pass, and which required gates that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import TOY

from fasttrack.checks import CHECKS
from fasttrack.errors import UsageError
from fasttrack.gates import GATES
from fasttrack.manifest import load_manifest
from fasttrack.manifest.model import Manifest
from fasttrack.plan.missing import WITH_FULL_LOGPROBS, WITHOUT_STEPS, missing
from fasttrack.run.runner import Request, prepare

CONFIGS = Path(__file__).parents[3] / "configs"
GB300 = sorted(CONFIGS.glob("kimi-k3-gb300-*.yaml"))


def declared(kind: str, required: list[str], **options: Any) -> Manifest:
    return Manifest.model_validate(
        {**TOY, "engine": {"kind": kind, "options": options}, "gates": {"required": required}, "tasks": []}
    )


@pytest.mark.parametrize("path", GB300, ids=lambda p: p.stem)
def test_the_published_scopes_require_nothing_that_their_engine_can_never_show(path: Path):
    manifest, _ = load_manifest(path)
    assert not set(manifest.gates.required) & set(WITH_FULL_LOGPROBS)
    assert "evals.fidelity" in manifest.gates.optional
    assert {"evals.free_running", "evals.acceptance", "evals.task_scores"} <= set(manifest.gates.required)
    drafted = {
        unit.cell.draft_length for unit in CHECKS["evals"].units(manifest, "standard") if "acceptance" in unit.name
    }
    assert drafted == {3, 4, 5, 6, 7}
    with_extension = manifest.engine.model_copy(
        update={"options": {**manifest.engine.options, "worker_extension_cls": "x"}}
    )
    assert any("worker_extension_cls is not given" in line for line in missing(manifest))
    left = missing(manifest.model_copy(update={"engine": with_extension}))
    assert [line for line in left if "gate" in line] == []
    assert any("x NVIDIA GB300" in line for line in left)


def test_what_only_the_embedded_engine_shows_is_named_with_the_gates_it_costs():
    required = ["numerics.error", "isolation.probes", "evals.fidelity"]
    assert missing(declared("embedded", required)) == []
    lines = missing(declared("server", required))
    assert lines[0].startswith("the server engine has no oracle")
    assert lines[0].endswith("required gate needs: evals.fidelity")
    assert lines[1] == "a server shows no steps, which required gate needs: isolation.probes"
    assert missing(declared("server", ["isolation.a_a"])) == []
    assert len(missing(declared("vllm", required, worker_extension_cls="x", model="m"))) == 2, "vLLM, oracle"


def test_the_listed_gates_exist():
    assert set(WITHOUT_STEPS) | set(WITH_FULL_LOGPROBS) <= set(GATES)


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("speculative_config", ": engine.options.speculative_config: missing for a cell with drafts; expected method"),
        ("model", ": engine.options: model is missing; expected a checkpoint folder"),
    ],
)
def test_options_that_vllm_would_need_are_asked_for_by_the_plan(tmp_path: Path, remove: str, said: str):
    data = yaml.safe_load(GB300[0].read_text())
    del data["engine"]["options"][remove]
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(UsageError) as caught:
        prepare(Request(path))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize("path", GB300, ids=lambda p: p.stem)
def test_no_tier_is_planned_above_its_budget(path: Path):
    for tier, knobs in load_manifest(path)[0].tiers.items():
        planned = prepare(Request(path, tier=tier)).plan
        assert planned.cost_s <= 60 * knobs.minutes, tier
