"""The chosen experts of both paths: equal where nothing rounds, of true rows only, and not kept unasked."""

import random

import pytest

from fasttrack.target import ChatEngine, EngineSpec, Request, RoutingEngine, Sampling
from kimi_k3.reference.config import TINY_A
from kimi_k3.target import TARGET


def engine(arm, precision="fp32", tp=8):
    switch = "latency_specialized" if arm == "optimized" else "auto"
    return TARGET.engine(EngineSpec("embedded", arm, switch, tp=tp, options={"precision": precision}))


def requests(count=3, tokens=4):
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(500) for _ in range(n))  # noqa: E731
    return [Request(f"r{i}", draw(5), tokens, Sampling(ignore_eos=True), forced=draw(tokens)) for i in range(count)]


@pytest.fixture(scope="module")
def chosen():
    found = {}
    for arm in ("oracle", "stock", "optimized"):
        one = engine(arm, tp=1 if arm == "oracle" else 8)
        assert isinstance(one, RoutingEngine)
        one.record_routing(True)
        one.generate(requests(), run="x")
        found[arm] = one.drain_routing()
        assert one.drain_routing() == []
        one.record_routing(False)
        one.generate(requests(), run="y")
        assert one.drain_routing() == []
    return found


def test_every_moe_layer_of_every_step_is_told_for_the_true_rows(chosen):
    moe = [layer for layer in range(TINY_A.num_hidden_layers) if TINY_A.is_moe(layer)]
    for steps in chosen.values():
        assert [s.layer for s in steps] == moe * 4
        assert [len(s.experts) for s in steps] == [15] * len(moe) + [3] * 3 * len(moe)  # 3 rows run padded to 3
        assert all(list(row) == sorted(set(row)) and len(row) == 8 for s in steps for row in s.experts)


def test_paths_choose_the_same_experts_where_hardly_anything_rounds(chosen):
    sets = {arm: [list(s.experts) for s in steps] for arm, steps in chosen.items()}
    assert sets["stock"] == sets["oracle"]
    assert sets["optimized"] == sets["oracle"]
    assert len({tuple(row) for experts in sets["oracle"] for row in experts}) > 20


def test_the_engine_has_a_chat_template():
    one = engine("stock")
    assert isinstance(one, ChatEngine)
    tokens = one.encode_chat([{"role": "user", "content": "Hello"}])
    assert "Hello" in one.decode(tokens)
    assert len(tokens) > len(one.encode("Hello"))
