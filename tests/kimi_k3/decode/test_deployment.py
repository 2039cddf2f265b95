"""The deployment gate: all reasons at once, none for what is served."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kimi_k3.decode.deployment import Deployment, UnsupportedDeployment, refusals, require
from kimi_k3.reference.config import PRESETS, TINY_A

GOOD = Deployment(TINY_A, tp=8)

BAD = {
    "tensor_parallel": {"tp": 4},
    "pipeline_parallel": {"pp": 2},
    "context_parallel": {"dcp": 2},
    "expert_parallel": {"expert_parallel": True},
    "kda_heads": {"config": replace(TINY_A, kda_num_heads=12)},
    "attention_heads": {"config": replace(TINY_A, num_attention_heads=12)},
    "hidden_size": {"config": replace(TINY_A, hidden_size=132)},
    "latent_size": {"config": replace(TINY_A, routed_expert_hidden_size=68)},
    "experts": {"config": replace(TINY_A, num_experts=33)},
    "expert_intermediate": {"config": replace(TINY_A, moe_intermediate_size=60, num_shared_experts=2)},
    "shared_intermediate": {"config": replace(TINY_A, num_shared_experts=1, moe_intermediate_size=60)},
    "dense_intermediate": {"config": replace(TINY_A, intermediate_size=257)},
    "vocabulary": {"config": replace(TINY_A, vocab_size=513)},
    "expert_scale_groups": {"config": replace(TINY_A, moe_intermediate_size=8 * 48)},
    "lora": {"lora": True},
    "dual_batch_overlap": {"dual_batch_overlap": True},
    "sleep_mode": {"sleep_mode": True},
    "enforce_eager": {"enforce_eager": True, "device": "sm_90"},
    "device": {"device": "sm_80"},
    "kv_dtype": {"kv_dtype": "float16"},
    "state_dtype": {"state_dtype": "bfloat16"},
    "conv_dtype": {"conv_dtype": "float16"},
    "draft_length": {"draft_length": 2},
    "speculator": {"speculator": "eagle"},
    "adaptive_verification": {"adaptive_verification": True},
    "state_scheme": {"state_scheme": "recover"},
    "max_context": {"max_context": TINY_A.max_position_embeddings + 1},
}


def names(deployment: Deployment) -> list[str]:
    return [reason.partition(":")[0] for reason in refusals(deployment)]


@pytest.mark.parametrize("name", BAD)
def test_each_reason_is_found(name: str) -> None:
    assert name in names(replace(GOOD, **BAD[name]))


def test_every_reason_is_in_one_error() -> None:
    changes = {"tp": 3, "pp": 2, "lora": True, "kv_dtype": "int8", "draft_length": 9, "sleep_mode": True}
    with pytest.raises(UnsupportedDeployment) as caught:
        require(replace(GOOD, **changes))
    found = {reason.partition(":")[0] for reason in caught.value.reasons}
    expected = {"tensor_parallel", "pipeline_parallel", "lora", "kv_dtype", "draft_length", "sleep_mode"}
    assert expected | {"kda_heads", "experts"} <= found
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_the_shipped_configurations_are_served(preset: str, tp: int) -> None:
    config = PRESETS[preset]
    for draft_length in (0, 3, 7):
        assert refusals(Deployment(config, tp=tp, draft_length=draft_length, kv_dtype="float8_e4m3fn")) == []
    assert refusals(Deployment(config, tp=tp, enforce_eager=True, device="cpu")) == []


def test_the_gate_needs_no_torch() -> None:
    code = "import sys; import kimi_k3.decode.deployment, kimi_k3.decode.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
