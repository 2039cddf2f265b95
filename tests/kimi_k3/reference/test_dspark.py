"""The DSpark drafter: against a plain implementation, its caches, its checkpoint, and whole speculative loops."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_steps import PAGE, Driver, tokens
from naive_model import rms, sigmoid

from kimi_k3.reference import dspark
from kimi_k3.reference.checkpoint import CheckpointError
from kimi_k3.reference.config import TINY_A, TINY_B, DSparkConfig
from kimi_k3.reference.dspark import DSpark, accepted_slots, attention_scale, rotate, yarn_frequencies
from kimi_k3.reference.dspark_weights import (
    DSparkWeights,
    drafter_parameter_count,
    drafter_roster,
    load_drafter,
    random_drafter_weights,
    save_drafter,
)
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.rejection import Rejection, verify_drafts

SPARK = TINY_A.dspark
assert SPARK is not None
DL = 7


@cache
def weights() -> DSparkWeights:
    return random_drafter_weights(TINY_A, seed=0)


@cache
def target(precision: str = "fp64", scheme: str = "native") -> Model:
    return Model(TINY_A, random_weights(TINY_A, 0), PRECISIONS[precision], state_scheme=scheme)


def naive_block(taps: Any, last: int, embed: Any, visible: int | None = None) -> Any:
    """Final-normed rows [DL, H]: FP64, keys and values expanded per head, complex rotation, no cache.

    ``visible``: only the first so many tokens, context and block, are attended to."""
    w, c = weights(), SPARK
    assert c is not None
    f = lambda t: t.double().numpy()  # noqa: E731
    heads, nope, rope, v, lora = c.num_attention_heads, 16, 8, 16, 32

    def turn(x: Any, position: int) -> Any:
        out = np.empty_like(x)
        for i in range(rope // 2):
            inverse = 50000.0 ** (-2 * i / rope)
            if i >= 1:  # the ramp of this tiny drafter ends at dimension 1
                inverse /= 4.0
            z = complex(x[2 * i], x[2 * i + 1]) * np.exp(1j * position * inverse)
            out[2 * i], out[2 * i + 1] = z.real, z.imag
        return out

    start = len(taps)
    context = [rms(f(w.context_proj) @ tap.reshape(-1), f(w.context_norm)) for tap in taps]
    xs = [embed[last], *[embed[c.mask_token_id]] * (DL - 1)]
    for layer in w.layers:
        hs = [rms(x, f(layer.input_layernorm)) for x in xs]
        keys, values = [], []
        for position, row in enumerate([*context, *hs]):
            kv = f(layer.kv_a_proj) @ row
            expanded = (f(layer.kv_b_proj) @ rms(kv[:lora], f(layer.kv_a_norm))).reshape(heads, nope + v)
            keys.append(np.concatenate([expanded[:, :nope], np.tile(turn(kv[lora:], position), (heads, 1))], 1))
            values.append(expanded[:, nope:])
        attended = []
        for j, h in enumerate(hs):
            q = (f(layer.q_b_proj) @ rms(f(layer.q_a_proj) @ h, f(layer.q_a_norm))).reshape(heads, nope + rope)
            out = []
            for head in range(heads):
                query = np.concatenate([q[head, :nope], turn(q[head, nope:], start + j)])
                scores = (
                    np.array([query @ key[head] for key in keys[:visible]])
                    / math.sqrt(24)
                    * (0.1 * math.log(4) + 1) ** 2
                )
                p = np.exp(scores - scores.max())
                out.append(sum(a * value[head] for a, value in zip(p / p.sum(), values[:visible], strict=True)))
            attended.append(f(layer.o_proj) @ np.concatenate(out))
        xs = [x + a for x, a in zip(xs, attended, strict=True)]
        for j, x in enumerate(xs):
            h = rms(x, f(layer.post_attention_layernorm))
            gate = f(layer.mlp.gate_proj) @ h
            xs[j] = x + f(layer.mlp.down_proj) @ (gate * sigmoid(gate) * (f(layer.mlp.up_proj) @ h))
    return np.stack([rms(x, f(w.final_norm)) for x in xs])


def prefilled(
    drafter: DSpark, prompts: dict[int, list[int]], requests: int
) -> tuple[Driver, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A driver after its prompts, NaN-filled drafter caches with the prompts' context rows, taps and hidden states."""
    driver = Driver(drafter.target, requests=requests, draft_length=DL, seed=3)
    batch = driver.batch(prompts)
    hidden, taps = drafter.target.forward(batch, driver.caches, drafter.aux_layers)
    caches = drafter.allocate(requests * len(driver.pages[0]), PAGE)
    for store in caches:
        store.copy_(torch.full(store.shape, float("nan")).to(store.dtype))
    drafter.write_context(taps, batch.positions, batch.slot_mapping, caches)
    for r, prompt in prompts.items():
        driver.context[r] = len(prompt)
    return driver, caches, taps, hidden


def test_block_forward_matches_the_naive_implementation() -> None:
    drafter = DSpark(target(), weights(), DL)
    prompts = {0: tokens(9), 1: tokens(4, seed=1)}
    driver, caches, taps, _ = prefilled(drafter, prompts, 2)
    hidden = drafter.block_forward(
        torch.tensor([17, 33]), torch.tensor([9, 4]), torch.tensor([driver.pages[0], driver.pages[1]]), caches
    )
    embed = drafter.target.embed_tokens.numpy()
    for r, (rows, last) in enumerate(((taps[:9], 17), (taps[9:], 33))):
        expected = torch.from_numpy(naive_block(rows.numpy(), last, embed))
        torch.testing.assert_close(hidden[r], expected, rtol=0, atol=1e-9)


def test_markov_chain() -> None:
    drafter = DSpark(target(), weights(), DL)
    driver, caches, *_ = prefilled(drafter, {0: tokens(6)}, 1)
    arguments = (torch.tensor([5]), torch.tensor([6]), torch.tensor([driver.pages[0]]), caches)
    chosen, logits = drafter.draft(*arguments)
    base = drafter.target.compute_logits(drafter.block_forward(*arguments))[0]
    previous = 5
    for j in range(DL):
        row = base[j] + weights().markov_w2.double() @ weights().markov_w1[previous].double()
        torch.testing.assert_close(logits[0, j], row, rtol=0, atol=1e-9)
        previous = int(row.argmax())
        assert chosen[0, j] == previous
    second, _ = drafter.draft(*arguments, choose=lambda rows, j: rows.topk(2).indices[:, 1])
    assert second[0, 0] != chosen[0, 0]
    places: list[int] = []
    drafter.draft(*arguments, choose=lambda rows, j: (places.append(j), rows.argmax(-1))[1])
    assert places == list(range(DL))


def test_released_rope_and_scale() -> None:
    config = DSparkConfig()
    plain = 50000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    ratio = yarn_frequencies(config) / plain
    assert ratio[:16].tolist() == pytest.approx([1.0] * 16)
    assert ratio[26:].tolist() == pytest.approx([1 / 32] * 6)
    assert ratio[20].item() == pytest.approx(1 - 5 / 11 * 31 / 32)
    assert attention_scale(config) == pytest.approx(0.130861, abs=1e-6)
    off = DSparkConfig(rope_factor=1.0)
    assert yarn_frequencies(off).tolist() == pytest.approx(plain.tolist())
    assert attention_scale(off) == pytest.approx(192**-0.5)


def test_rotation_turns_interleaved_pairs_and_depends_on_distance_only() -> None:
    angles = torch.tensor([math.pi / 2, 0.0], dtype=torch.float64)
    assert rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), angles).tolist() == pytest.approx([-2, 1, 3, 4])
    q, k, f = torch.randn(8).double(), torch.randn(8).double(), yarn_frequencies(SPARK)
    one = rotate(q, 11 * f) @ rotate(k, 4 * f)
    assert one.item() == pytest.approx((rotate(q, 107 * f) @ rotate(k, 100 * f)).item())
    assert one.item() != pytest.approx((rotate(q, 12 * f) @ rotate(k, 4 * f)).item())


def test_context_rows_are_written_for_accepted_rows_only() -> None:
    drafter = DSpark(target(), weights(), DL)
    prompts = {0: tokens(5), 1: tokens(6, seed=1)}
    driver, caches, *_ = prefilled(drafter, prompts, 2)
    batch = driver.batch({0: tokens(8, seed=2), 1: tokens(8, seed=3)})
    _, taps = drafter.target.forward(batch, driver.caches, drafter.aux_layers)
    before = [c.clone() for c in caches]
    drafter.write_context(taps, batch.positions, accepted_slots(batch, [6, 1]), caches)
    expected = set(batch.slot_mapping[:6].tolist()) | {int(batch.slot_mapping[8])}
    for old, new in zip(before, caches, strict=True):
        changed = ~((old == new) | (old.isnan() & new.isnan())).all(-1).flatten()
        assert set(changed.nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("absent", [0, 2])
def test_block_rows_beyond_the_pages_are_left_out(absent: int) -> None:
    drafter = DSpark(target(), weights(), DL)
    driver, caches, taps, _ = prefilled(drafter, {0: tokens(6)}, 1)
    table = torch.tensor([[*driver.pages[0][:2], *[-1] * absent]])  # room for 8 tokens; the block would end at 13
    hidden = drafter.block_forward(torch.tensor([5]), torch.tensor([6]), table, caches)
    expected = naive_block(taps.numpy(), 5, drafter.target.embed_tokens.numpy(), visible=8)
    torch.testing.assert_close(hidden[0], torch.from_numpy(expected), rtol=0, atol=1e-9)
    written = (~caches[0].isnan()).all(-1)
    assert int(written.sum()) == 8
    assert bool(written[driver.pages[0][:2]].all())


def test_fp8_cache_also_rounds_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for round_query in (True, False):
        if not round_query:
            monkeypatch.setattr(dspark, "to_fp8", lambda x: x)
        drafter = DSpark(target("bf16-kvfp8"), weights(), DL)
        driver, caches, *_ = prefilled(drafter, {0: tokens(6)}, 1)
        table = torch.tensor([driver.pages[0]])
        results.append(drafter.block_forward(torch.tensor([5]), torch.tensor([6]), table, caches))
    assert not torch.equal(*results)
    assert (results[0] - results[1]).abs().mean() < 0.1


@pytest.mark.parametrize("precision", ["bf16", "bf16-kvfp8"])
def test_reduced_precision_stays_near_fp64(precision: str) -> None:
    results = {}
    for name in ("fp64", precision):
        drafter = DSpark(target(name), weights(), DL)
        driver = Driver(drafter.target, draft_length=DL)
        taps = torch.randn(6, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        batch = driver.batch({0: tokens(6)})
        caches = drafter.allocate(len(driver.pages[0]), PAGE)
        drafter.write_context(taps.to(drafter.precision.compute), batch.positions, batch.slot_mapping, caches)
        hidden = drafter.block_forward(torch.tensor([5]), torch.tensor([6]), torch.tensor([driver.pages[0]]), caches)
        results[name] = hidden.double()
    error = (results[precision] - results["fp64"]).square().mean().sqrt().item()
    assert 1e-4 < error < 0.1


def test_confidence_reads_hidden_state_and_previous_token() -> None:
    drafter = DSpark(target(), weights(), DL)
    hidden = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0)).double()
    got = drafter.confidence(hidden, torch.tensor([[3, 4]]))
    row = weights().confidence_weight[0].double()
    logit = row[:128] @ hidden[0, 1] + row[128:] @ weights().markov_w1[4].double()
    assert got[0, 1].item() == pytest.approx(sigmoid(logit.item()))


def speculate(drafter: DSpark, prompt: list[int], steps: int, known: list[int], hints: list[int]) -> list[int]:
    """A whole speculative loop at temperature 0. ``hints[s]`` drafts of step ``s`` are replaced by known good ones, so
    that every acceptance count occurs; the drafter alone rarely agrees with a random target."""
    model = drafter.target
    driver, caches, _, hidden = prefilled(drafter, {0: prompt}, 1)
    out = [int(model.compute_logits(hidden[-1:]).argmax())]
    table = torch.tensor([driver.pages[0]])
    for step in range(steps):
        drafts, _ = drafter.draft(torch.tensor(out[-1:]), torch.tensor(driver.context), table, caches)
        proposed = drafts[0].tolist()
        proposed[: hints[step]] = known[len(out) : len(out) + hints[step]]
        if hints[step] < DL and proposed[hints[step]] == known[len(out) + hints[step]]:
            proposed[hints[step]] = (proposed[hints[step]] + 1) % 500  # exactly this many stand
        batch = driver.batch({0: [out[-1], *proposed]})
        hidden, taps = model.forward(batch, driver.caches, drafter.aux_layers)
        got = verify_drafts(
            model.compute_logits(hidden), proposed, Rejection(), greedy=True, seed=0, position=driver.context[0] + 1
        )
        assert len(got) == hints[step] + 1
        drafter.write_context(taps, batch.positions, accepted_slots(batch, [len(got)]), caches)
        if model.state_scheme == "recover":
            model.commit(torch.tensor([len(got)]), driver.caches)
        driver.context[0] += len(got)
        driver.accepted[0] = len(got) if model.state_scheme == "native" else 1
        out += got
    for store in caches:  # the drafter's cache covers every token the target has seen
        rows = store[driver.pages[0]].flatten(0, 1)[: driver.context[0]]
        assert not bool(rows.isnan().any())
    return out


@pytest.mark.parametrize("scheme", ["native", "recover"])
def test_speculation_equals_no_speculation_token_for_token(scheme: str) -> None:
    model, prompt = target(), tokens(7)
    plain = Driver(model)
    hidden = plain.step({0: prompt})[0]
    known = [int(model.compute_logits(hidden[-1:]).argmax())]
    while len(known) < 50:
        hidden = plain.step({0: known[-1:]})[0]
        known.append(int(model.compute_logits(hidden).argmax()))
    hints = [7, 0, 3, 1, 6, 2, 5, 4]
    out = speculate(DSpark(target(scheme=scheme), weights(), DL), prompt, len(hints), known, hints)
    assert len(out) == 1 + sum(h + 1 for h in hints)
    assert out == known[: len(out)]


def test_parameter_counts_and_size() -> None:
    assert drafter_parameter_count(SPARK, TINY_A.vocab_size) == 420_913
    specs = {s.name: s.shape for s in drafter_roster(DSparkConfig(), 163840)}
    assert sum(2 * math.prod(shape) for shape in specs.values()) == pytest.approx(4.776e9, abs=1e6)
    assert specs["context_proj.weight"] == (7168, 35840)
    assert specs["layers.4.self_attn.kv_b_proj.weight"] == (16384, 512)
    first = {name.removeprefix("layers.0.").removesuffix(".weight") for name in specs if name.startswith("layers.0.")}
    attention = "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
    assert first == {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in attention.split()),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    }
    rest = {name for name in specs if not name.startswith("layers.")}
    assert rest == {
        "context_proj.weight",
        "context_norm.weight",
        "final_norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }


def test_checkpoint_round_trip_and_errors(tmp_path: Path) -> None:
    save_drafter(tmp_path / "drafter", TINY_A, weights(), shard_bytes=100_000)
    config, loaded = load_drafter(tmp_path / "drafter")
    assert config == SPARK
    assert torch.equal(loaded.layers[1].mlp.down_proj, weights().layers[1].mlp.down_proj)
    assert torch.equal(loaded.layers[0].kv_a_norm, weights().layers[0].kv_a_norm)
    assert torch.equal(loaded.markov_w2, weights().markov_w2)
    assert torch.equal(loaded.confidence_weight, weights().confidence_weight)
    file = tmp_path / "drafter" / "config.json"
    data = json.loads(file.read_text())
    for change, says in (({"model_type": "llama"}, "model_type is 'llama'"), ({"rope_theta": None}, "config.json")):
        file.write_text(json.dumps({**data, **change}))
        with pytest.raises(CheckpointError, match=says):
            load_drafter(tmp_path / "drafter")
    file.write_text(json.dumps({k: v for k, v in data.items() if k != "mask_token_id"}))
    with pytest.raises(CheckpointError, match="mask_token_id is missing"):
        load_drafter(tmp_path / "drafter")
    file.write_text(json.dumps({**data, "markov_rank": 8}))
    with pytest.raises(
        CheckpointError, match=r"markov_w1.weight is bfloat16 \[512, 16\], expected bfloat16 \[512, 8\]"
    ):
        load_drafter(tmp_path / "drafter")


def test_a_model_without_drafter_is_refused() -> None:
    model = Model(TINY_B, random_weights(TINY_B, 0), PRECISIONS["fp64"])
    with pytest.raises(ValueError, match="names a drafter"):
        DSpark(model, weights(), DL)
    with pytest.raises(ValueError, match="has no drafter"):
        random_drafter_weights(TINY_B, 0)
    with pytest.raises(ValueError, match="draft length 0"):
        DSpark(target(), weights(), 0)
