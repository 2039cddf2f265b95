"""Sharding: rows per rank, padding that changes nothing, and every weight present exactly once."""

from __future__ import annotations

import pytest
import torch
from decode_steps import weights

from kimi_k3.decode.shards import KDAShard, MLAShard, MoEShard, shard_kda, shard_mla, shard_model, shard_moe
from kimi_k3.reference.config import PRESETS, TINY_A, KimiK3Config
from kimi_k3.reference.mxfp4 import dequantize
from kimi_k3.reference.numerics import situ_glu
from kimi_k3.reference.weights import KDAWeights, MLAWeights, MoEWeights

TP = [1, 2, 8, 16]


@pytest.mark.parametrize(("tp", "rows"), [(8, 160), (16, 96)])
def test_kda_projection_rows_of_tiny_a(tp: int, rows: int) -> None:
    attention = weights().layers[0].attention
    assert isinstance(attention, KDAWeights)
    assert shard_kda(attention, tp).in_proj.shape == (tp, rows, TINY_A.hidden_size)


@pytest.mark.parametrize(("tp", "kda", "mla"), [(8, 6288, 3648), (16, 3216, 2880)])
def test_the_full_model_has_the_published_row_counts(tp: int, kda: int, mla: int) -> None:
    c = KimiK3Config()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    a, h, f = c.kda_width, c.hidden_size, c.kda_head_dim
    wide, conv = [empty(a, h) for _ in range(4)], [empty(a, 4) for _ in range(3)]
    small = (empty(f, h), empty(a, f), empty(c.kda_num_heads, h))
    w = KDAWeights(*wide, *small, *conv, empty(c.kda_num_heads), empty(a), empty(f), empty(h, a))
    assert shard_kda(w, tp).in_proj.shape == (tp, kda, h)
    q, kv, heads = c.q_lora_rank, c.kv_lora_rank, c.num_attention_heads
    m = MLAWeights(
        q_a_proj=empty(q, h),
        q_a_norm=empty(q),
        q_b_proj=empty(heads * 192, q),
        kv_a_proj=empty(c.kv_row, h),
        kv_a_norm=empty(kv),
        kv_b_proj=empty(heads * 256, kv),
        g_proj=empty(c.mla_width, h),
        o_proj=empty(h, c.mla_width),
    )
    assert shard_mla(m, c, tp).in_proj.shape == (tp, mla, h)


@pytest.mark.parametrize("tp", TP)
def test_kda_blocks_are_where_the_core_reads_them(tp: int) -> None:
    w = weights().layers[1].attention
    assert isinstance(w, KDAWeights)
    s = shard_kda(w, tp)
    d, f = TINY_A.kda_width // tp, TINY_A.kda_head_dim
    for block, whole in enumerate((w.q_proj, w.k_proj, w.v_proj, w.g_proj)):
        assert torch.equal(s.in_proj[:, block * d : (block + 1) * d].flatten(0, 1), whole)
    for rank in range(tp):
        assert torch.equal(s.in_proj[rank, 4 * d : 4 * d + f], w.f_a_proj)
    heads = TINY_A.kda_num_heads // tp
    assert torch.equal(s.in_proj[:, 4 * d + f : 4 * d + f + heads].flatten(0, 1), w.b_proj)
    assert not s.in_proj[:, 4 * d + f + heads :].any()
    assert torch.equal(s.conv[:, 1].flatten(0, 1), w.k_conv.flatten(1))
    assert torch.equal(torch.cat(list(s.o_proj), 1), w.o_proj)


@pytest.mark.parametrize("tp", TP)
def test_mla_expansion_is_cut_by_heads(tp: int) -> None:
    w = weights().layers[3].attention
    assert isinstance(w, MLAWeights)
    s = shard_mla(w, TINY_A, tp)
    whole = w.kv_b_proj.unflatten(0, (TINY_A.num_attention_heads, -1))
    assert torch.equal(torch.cat([s.w_uk, s.w_uv], 2).flatten(0, 1), whole)
    common = TINY_A.q_lora_rank + TINY_A.kv_row
    assert torch.equal(s.in_proj[tp - 1, :common], torch.cat([w.q_a_proj, w.kv_a_proj]))


@pytest.mark.parametrize("preset", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize("tp", TP)
def test_sharded_experts_compute_what_whole_ones_do(preset: str, tp: int) -> None:
    """Also where a rank's columns are fewer than a scale group and are padded with zeros."""
    config = PRESETS[preset]
    w = weights(preset).layers[-1].ffn
    assert isinstance(w, MoEWeights)
    s = shard_moe(w, config, tp)
    width = s.w2.packed.shape[-1] * 2
    assert width % config.mxfp4_group == 0
    assert width >= config.moe_intermediate_size // tp
    x = torch.randn(
        3, config.routed_expert_hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)

    w1, w3, w2 = (dequantize(t, torch.float64) for t in (w.w1, w.w3, w.w2))
    expected = act(x @ w1.mT, x @ w3.mT) @ w2.mT
    w13, down = dequantize(s.w13, torch.float64), dequantize(s.w2, torch.float64)
    hidden = act(x @ w13[:, :, :width].mT, x @ w13[:, :, width:].mT)
    torch.testing.assert_close((hidden @ down.mT).sum(0), expected, rtol=1e-12, atol=1e-12)
    assert not hidden[..., config.moe_intermediate_size // tp :].any()


@pytest.mark.parametrize("tp", TP)
def test_router_and_latent_rows_of_all_ranks_are_the_whole_weights(tp: int) -> None:
    w = weights().layers[2].ffn
    assert isinstance(w, MoEWeights)
    s = shard_moe(w, TINY_A, tp)
    experts, latent = TINY_A.num_experts // tp, TINY_A.routed_expert_hidden_size // tp
    assert torch.equal(s.front[:, :experts].flatten(0, 1), w.gate)
    assert torch.equal(s.front[:, -latent:].flatten(0, 1), w.latent_down)
    assert s.front.shape[1] == experts + -experts % 16 + latent


def test_shards_are_where_they_are_wanted() -> None:
    """Weights are kept on the CPU, whatever the model runs on."""
    found: list[torch.Tensor] = []

    def walk(x: object) -> None:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list):
            for item in x:
                walk(item)
        else:
            for value in vars(x).values():
                walk(value)

    walk(shard_model(weights("tiny-b"), PRESETS["tiny-b"], 8, "meta"))
    assert len(found) > 50
    assert {x.device.type for x in found} == {"meta"}


def test_layer_kinds() -> None:
    shards = shard_model(weights("tiny-b"), PRESETS["tiny-b"], 8)
    assert [type(layer.attention) for layer in shards.layers] == [KDAShard] * 3 + [MLAShard] * 2
    assert [isinstance(layer.ffn, MoEShard) for layer in shards.layers] == [False, True, True, True, True]
