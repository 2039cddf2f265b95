"""The committed comparison with an independent implementation says what the README says of it."""

import json
from pathlib import Path
from statistics import mean

import pytest

from kimi_k3.reference.config import KimiK3Config

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "oracle" / "results").glob("vllm-*.json"))


def test_both_widths_were_compared():
    assert {json.loads(p.read_text())["config"]["hidden_size"] for p in RESULTS} == {1024, 7168}


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_vllm_and_the_reference_are_equally_far_from_fp64(path: Path):
    record = json.loads(path.read_text())
    theirs = [v for r in record["requests"] for v in r["kl_vllm_to_fp64"]]
    ours = [v for r in record["requests"] for v in r["kl_bf16_reference_to_fp64"]]
    assert len(theirs) == len(ours) == 12 * record["decode_steps"]
    assert 0.8 < mean(theirs) / mean(ours) < 1.25
    assert all(r["distinct_tokens"] >= 25 for r in record["requests"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_top1_differs_only_where_rounding_can_decide(path: Path):
    for request in json.loads(path.read_text())["requests"]:
        reach = 2 * request["max_abs_logprob_difference_bf16_fp64"]
        for flip in request["top1_disagreements_vllm_bf16"]:
            assert flip["oracle_top2_gap"] < reach


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_cached_state_that_could_be_read_agrees(path: Path):
    record = json.loads(path.read_text())
    read = [c for c in record["caches"] if c.get("relative_l2") is not None]
    assert {c["what"] for c in read} == {"recurrent state", "convolution history"}
    assert all(c["relative_l2"] < 0.02 for c in read)
    assert all("note" in c for c in record["caches"] if c not in read)


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_real_per_head_dimensions(path: Path):
    config = KimiK3Config.from_json(json.loads(path.read_text())["config"])
    assert (config.kda_head_dim, config.short_conv_kernel_size, config.mxfp4_group) == (128, 4, 32)
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (
        512,
        64,
        128,
        128,
    )
