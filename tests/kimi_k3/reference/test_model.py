"""The whole model: against a naive implementation, and the invariants that caches, batching and ranks must keep."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Driver, tokens
from naive_model import NaiveModel

from kimi_k3.reference import model as model_module
from kimi_k3.reference.attn_res import ResidualStream
from kimi_k3.reference.cache import NULL_SLOT
from kimi_k3.reference.checkpoint import save_checkpoint
from kimi_k3.reference.config import TINY_A, TINY_B, KimiK3Config
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.weights import ModelWeights

CONFIGS = {"tiny-a": TINY_A, "tiny-b": TINY_B}
both = pytest.mark.parametrize("name", list(CONFIGS))


@cache
def weights(name: str) -> ModelWeights:
    return random_weights(CONFIGS[name], seed=0)


@cache
def model(name: str, precision: str = "fp64", tp: int = 1) -> Model:
    return Model(CONFIGS[name], weights(name), PRECISIONS[precision], tp=tp)


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


def same_state(a: Driver, b: Driver, request: int = 0, atol: float = 1e-9) -> None:
    """The caches of two drivers mean the same for a request."""
    for layer in a.caches.kv:
        close(a.kv_rows(layer, request), b.kv_rows(layer, request), atol)
    for layer in a.caches.recurrent:
        pair = []
        for d in (a, b):
            last = d.accepted[request] - 1
            history = d.caches.conv[layer][d.slots[request][0], last : last + 3]
            pair.append((d.caches.recurrent[layer][d.slots[request][last]], history))
        close(pair[0][0], pair[1][0], atol)
        close(pair[0][1], pair[1][1], atol)


@both
def test_logits_match_the_naive_implementation(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", CONFIGS[name], weights(name))
    text_config = json.loads((tmp_path / "model" / "config.json").read_text())["text_config"]
    ids = tokens(12)
    expected = torch.from_numpy(NaiveModel(tmp_path / "model", text_config).logits(ids))
    m = model(name)
    close(m.compute_logits(Driver(m).step({0: ids})[0]), expected)


@both
def test_prefill_equals_single_steps(name: str) -> None:
    ids = tokens(21)
    whole, single = Driver(model(name)), Driver(model(name), seed=1)
    hidden = whole.step({0: ids})[0]
    steps = torch.cat([single.step({0: [t]})[0] for t in ids])
    close(hidden, steps)
    same_state(whole, single)


@both
@pytest.mark.parametrize("cut", [1, 2, 3, 16, 20])
def test_prefill_in_chunks_equals_one_prefill(name: str, cut: int) -> None:
    ids = tokens(21)
    whole, chunks = Driver(model(name)), Driver(model(name), seed=1)
    hidden = whole.step({0: ids})[0]
    first = chunks.step({0: ids[:cut]}, prefill={0})[0]
    second = chunks.step({0: ids[cut:]}, prefill={0})[0]
    close(hidden, torch.cat([first, second]))
    same_state(whole, chunks)


@both
@pytest.mark.parametrize("accept", range(1, 9))
def test_verify_then_accept_equals_plain_steps(name: str, accept: int) -> None:
    """Two verify steps of 8 rows, then a plain step: state slots, conv buffer and KV rows of the accepted rows."""
    m, ids, drafts, after = model(name), tokens(9), tokens(8, seed=1), tokens(8, seed=2)
    verify, plain = Driver(m, draft_length=7), Driver(m, seed=1)
    for driver in (verify, plain):
        driver.step({0: ids})
    rows = verify.step({0: drafts})[0]
    expected = torch.cat([plain.step({0: [t]})[0] for t in drafts[:accept]])
    close(rows[:accept], expected)
    verify.reject(0, 8 - accept)
    same_state(verify, plain)
    rows = verify.step({0: after})[0]
    expected = torch.cat([plain.step({0: [t]})[0] for t in after[: 9 - accept]])
    close(rows[: 9 - accept], expected)
    verify.reject(0, accept - 1)
    same_state(verify, plain)
    close(verify.step({0: [7]})[0], plain.step({0: [7]})[0])
    same_state(verify, plain)


@both
def test_recover_scheme_equals_plain_steps(name: str) -> None:
    """One slot per request; states advance on commit only, by any accepted count, requests independently."""
    m = Model(CONFIGS[name], weights(name), PRECISIONS["fp64"], state_scheme="recover")
    recover, plain = Driver(m, requests=3, draft_length=7), Driver(model(name), requests=3, seed=1)
    for driver in (recover, plain):
        driver.step({r: tokens(5 + r, seed=r) for r in range(3)})
    counts = {0: 8, 1: 3, 2: 5}
    for accept in ((1, 3, 5), (8, 1, 2), (4, 2, 3)):
        rows = {r: tokens(counts[r], seed=10 + accept[0] + r) for r in range(3)}
        before = {layer: t.clone() for layer, t in recover.caches.recurrent.items()}
        verified = recover.step(rows)
        for layer, old in before.items():
            new = recover.caches.recurrent[layer]
            assert bool(((new == old) | (new.isnan() & old.isnan())).all()), "verify changed a committed state"
        m.commit(torch.tensor(accept), recover.caches)
        for r in range(3):
            recover.reject(r, counts[r] - accept[r])
            recover.accepted[r] = 1
            for i, token in enumerate(rows[r][: accept[r]]):
                close(verified[r][i], plain.step({r: [token]})[r][0])
            same_state(recover, plain, r)
    late = {0: tokens(6, seed=40), 2: [3]}  # a later prompt chunk is written at once and ignores the commit
    mixed = recover.step(late, prefill={0})
    m.commit(torch.tensor([6, 1]), recover.caches)
    for r, ids in late.items():
        close(mixed[r], plain.step({r: ids}, prefill={0} & {r})[r])
        same_state(recover, plain, r)


def test_recover_scheme_must_be_committed() -> None:
    m = Model(TINY_B, weights("tiny-b"), PRECISIONS["fp64"], state_scheme="recover")
    driver = Driver(m)
    driver.step({0: tokens(3)})
    driver.step({0: [1]})
    with pytest.raises(RuntimeError, match="not committed"):
        driver.step({0: [2]})
    with pytest.raises(RuntimeError, match="recover scheme"):
        model("tiny-b").commit(torch.tensor([1]), driver.caches)
    with pytest.raises(ValueError, match="expected one of native, recover"):
        Model(TINY_B, weights("tiny-b"), PRECISIONS["fp64"], state_scheme="replay")


@both
def test_mixed_batch_equals_separate_batches(name: str) -> None:
    """First and later prompt chunks, plain decode and verify steps of different widths in one forward."""
    m = model(name)
    together, alone = (Driver(m, requests=6, draft_length=7, seed=s) for s in (0, 1))
    prompts = {r: tokens(5 + 3 * r, seed=r) for r in range(5)}
    together.step(prompts)
    for r, ids in prompts.items():
        alone.step({r: ids})
    for driver in (together, alone):
        driver.step({3: tokens(8, seed=20)})
        driver.reject(3, 3)
    rows = {
        2: tokens(1, seed=30),
        5: tokens(17, seed=31),
        3: tokens(8, seed=32),
        0: tokens(7, seed=33),
        1: tokens(3, seed=34),
        4: tokens(4, seed=35),  # padded to the length of request 0
    }
    mixed = together.step(rows, prefill={5, 0, 4})
    for r, ids in rows.items():
        close(mixed[r], alone.step({r: ids}, prefill={5, 0, 4} & {r})[r])
        same_state(together, alone, r)


@both
@pytest.mark.parametrize("prefill", [False, True])
def test_padding_writes_nothing_and_changes_nothing(name: str, prefill: bool) -> None:
    m, kind_of = model(name), {0, 1, 2} if prefill else set()
    padded, plain = Driver(m, requests=3, draft_length=1), Driver(m, requests=3, draft_length=1)
    for driver in (padded, plain):
        driver.step({r: tokens(4 + r, seed=r) for r in range(3)})
    expected = plain.step({0: [1, 2], 1: [3, 4], 2: [5, 6]}, kind_of)
    batch = padded.batch({0: [1, 2], 1: [3, 4], 2: [5, 6]}, kind_of)
    batch.slot_mapping[4:] = -1
    batch.block_tables[2] = -1
    batch.state_slots[2] = NULL_SLOT
    batch.context_lens[2] = 0
    batch.accepted[2] = 0
    before = {
        kind: {layer: t.clone() for layer, t in getattr(padded.caches, kind).items()}
        for kind in ("kv", "conv", "recurrent")
    }
    hidden = m.forward(batch, padded.caches)
    close(hidden[:4], torch.cat([expected[0], expected[1]]))
    for r in (0, 1):
        padded.context[r] += 2
        padded.accepted[r] = 1 if prefill else 2
        same_state(padded, plain, r)
    for kind, layers in before.items():
        for layer, old in layers.items():
            new = getattr(padded.caches, kind)[layer]
            changed = ~((old == new) | (old.isnan() & new.isnan())).flatten(1).all(1)
            owners = padded.pages if kind == "kv" else padded.slots
            touched = set(changed.nonzero().flatten().tolist())
            assert touched <= {*owners[0], *owners[1]}, f"{kind} of layer {layer}: {touched}"
            assert touched


@both
@pytest.mark.parametrize("tp", [2, 8, 16])
def test_sharded_sums_equal_one_rank(name: str, tp: int) -> None:
    one, many = Driver(model(name)), Driver(model(name, tp=tp))
    for rows in (tokens(13), tokens(1, seed=1), tokens(1, seed=2)):
        close(one.step({0: rows})[0], many.step({0: rows})[0])
    same_state(one, many)


@pytest.mark.parametrize("site", ["attention", "dense", "experts", "shared"])
def test_every_rank_partial_counts(site: str) -> None:
    many = Model(TINY_A, weights("tiny-a"), PRECISIONS["fp64"], tp=8)
    layer = many.layers[0 if site == "dense" else 5]
    if site == "experts":
        _, down = layer.ffn.experts._all
        down[3::8] = 0
    else:
        target = {
            "attention": lambda: layer.attention.o_proj,
            "dense": lambda: layer.ffn.down,
            "shared": lambda: layer.ffn.shared.down,
        }[site]()
        target.shards[3] = 0
    ids = tokens(9)
    difference = Driver(many).step({0: ids})[0] - Driver(model("tiny-a")).step({0: ids})[0]
    assert bool((difference.abs().amax(-1) > 1e-3).all())


def test_bf16_ranks_round_their_partials() -> None:
    one, many = model("tiny-a", "bf16"), model("tiny-a", "bf16", tp=8)
    ids = tokens(6)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    o_one, o_many = one.layers[0].attention.o_proj, many.layers[0].attention.o_proj
    exact = x @ o_one.shards[0]
    by_rank = [
        (x[:, 32 * r : 32 * r + 32] @ o_one.shards[0][32 * r : 32 * r + 32]).bfloat16().float() for r in range(8)
    ]
    total = by_rank[0]
    for partial in by_rank[1:]:
        total = total + partial
    assert torch.equal(o_many(x), total.bfloat16().float())
    assert torch.equal(o_one(x), exact.bfloat16().float())
    assert not torch.equal(o_many(x), o_one(x))
    assert not torch.equal(Driver(one).step({0: ids})[0], Driver(many).step({0: ids})[0])


@both
def test_reduced_precision_is_near_the_oracle_but_not_equal(name: str) -> None:
    ids = tokens(48)

    def logits(precision: str) -> torch.Tensor:
        m = model(name, precision)
        return m.compute_logits(Driver(m).step({0: ids})[0]).double()

    oracle = logits("fp64")
    spread = oracle.std()
    for precision, low, high in (("fp32", 1e-8, 1e-4), ("bf16", 1e-3, 0.25), ("bf16-kvfp8", 1e-3, 0.25)):
        error = ((logits(precision) - oracle).square().mean(-1).sqrt() / spread).median()
        assert low < error < high, precision


def test_fp8_cache_changes_decode() -> None:
    ids = tokens(20)
    results = []
    for precision in ("bf16", "bf16-kvfp8"):
        driver = Driver(model("tiny-a", precision))
        driver.step({0: ids})
        results.append(driver.step({0: [5]})[0])
    assert not torch.equal(*results)
    assert (results[0] - results[1]).abs().mean() < 0.3


def test_outputs_are_declared_bf16_values() -> None:
    m = model("tiny-a", "bf16")
    hidden = Driver(m).step({0: tokens(5)})[0]
    logits = m.compute_logits(hidden)
    assert hidden.dtype == logits.dtype == torch.float32
    assert torch.equal(hidden, hidden.bfloat16().float())
    assert torch.equal(logits, logits.bfloat16().float())


def test_same_step_twice_gives_the_same_bits() -> None:
    m = model("tiny-a", "bf16")
    runs = []
    for _ in range(2):
        driver = Driver(m, requests=3)
        first = driver.step({r: tokens(5 + r, seed=r) for r in range(3)})
        second = driver.step({r: [r] for r in range(3)})
        runs.append(torch.cat([*first.values(), *second.values()]))
    assert torch.equal(runs[0], runs[1])


def test_taps_are_partial_sums_of_the_current_block(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[ResidualStream] = []

    class Recorded(ResidualStream):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            streams.append(self)

    monkeypatch.setattr(model_module, "ResidualStream", Recorded)
    m, ids = model("tiny-a"), tokens(6)
    driver = Driver(m)
    batch = driver.batch({0: ids})
    hidden, taps = m.forward(batch, driver.caches, aux_layers=(7, 0, 3))  # ascending in the result
    plain, none = m.forward(batch, Driver(m).caches, aux_layers=())
    close(hidden, plain)
    assert taps.shape == (6, 3, TINY_A.hidden_size)
    assert none.shape == (6, 0, TINY_A.hidden_size)
    stream = streams[0]
    close(stream.blocks[:, 0], m.embed_tokens[ids])
    close(taps[:, 1], stream.blocks[:, 1])  # after layer 3, the first block is complete
    close(taps[:, 2], stream.prefix)  # after the last layer, the sum that no block stores
    assert (taps[:, 0] - m.embed_tokens[ids]).abs().mean() > 0.1, "the embedding is not part of a tap"


def test_greedy_text_is_diverse() -> None:
    m = model("tiny-a", "fp32")
    count = 48
    driver = Driver(m, requests=count)
    hidden = driver.step({r: tokens(4 + r % 9, seed=r) for r in range(count)})
    picked: list[list[int]] = [[] for _ in range(count)]
    gaps = []
    for _ in range(12):
        logits = m.compute_logits(torch.stack([hidden[r][-1] for r in range(count)]))
        best = logits.topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
        for r, token in enumerate(logits.argmax(-1).tolist()):
            picked[r].append(token)
        hidden = driver.step({r: [picked[r][-1]] for r in range(count)})
    assert len({t for text in picked for t in text}) >= 50
    assert sum(len(set(text)) for text in picked) / count > 8, "texts repeat themselves"
    assert torch.cat(gaps).median() > 0.3
    assert (torch.cat(gaps) < 1e-4).double().mean() < 0.01


def test_wrong_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="8 layers for a model of 5"):
        Model(TINY_B, weights("tiny-a"), PRECISIONS["fp64"])


def test_seeds_and_presets() -> None:
    other = random_weights(TINY_A, seed=1)
    again = random_weights(TINY_A, seed=0)
    assert torch.equal(again.lm_head, weights("tiny-a").lm_head)
    assert torch.equal(again.layers[5].ffn.w1.packed, weights("tiny-a").layers[5].ffn.w1.packed)
    assert not torch.equal(other.lm_head, again.lm_head)
    released = KimiK3Config()
    assert [i for i in range(93) if not released.is_kda(i)] == [*range(3, 92, 4), 92]
    assert released.num_blocks == 8
