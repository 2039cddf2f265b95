"""Long contexts and the FP8 cache on both paths, plain and with drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fasttrack.target import EngineSpec, Request, Sampling
from kimi_k3 import names
from kimi_k3.reference.config import TINY_A
from kimi_k3.target import TARGET

LONGEST = TINY_A.max_position_embeddings
SWITCH = {"stock": names.SWITCH_OFF, "optimized": names.SWITCH_ON, "oracle": names.SWITCH_OFF}


def build(arm: str, draft_length: int = 0, *, tp: int = 8, dcp: int = 1, **options: Any) -> Any:
    options = {"drafter": "rehearsal", **options}
    return TARGET.engine(
        EngineSpec(
            "embedded", arm, SWITCH[arm], tp=tp, dcp=dcp, draft_length=draft_length, max_requests=2, options=options
        )
    )


def long_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 500, (length,), generator=generator).tolist())


@cache
def plain_tail() -> list[int]:
    request = Request("a", long_prompt(LONGEST - 20), 20, Sampling(ignore_eos=True))
    return build("stock", tp=1, precision="fp64").generate([request], run="x")[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("draft_length", "dcp"), [(0, 1), (7, 1), (7, 8)])
def test_the_last_position_of_the_checkpoint_is_reached(draft_length: int, dcp: int) -> None:
    """Drafts shrink near the end; no token differs from plain decoding."""
    engine = build("optimized", draft_length, dcp=dcp, precision="fp64")
    assert engine.info().max_context == LONGEST
    request = Request("a", long_prompt(LONGEST - 20), 20, Sampling(ignore_eos=True))
    (done,) = engine.generate([request], run="x")
    assert done.token_ids == plain_tail()
    steps = engine.drain_ledger()
    assert max(s.context_max for s in steps) in (LONGEST - 1, LONGEST)
    decoding = [s for s in steps if s.kind != "prefill"]
    assert {s.reason for s in decoding} <= {None, "draft_length_unsupported"}
    assert sum(s.path == "specialized" for s in decoding) >= (19 if draft_length == 0 else 3)


def score(arm: str, forced: tuple[int, ...], draft_length: int = 0, **options: Any) -> tuple[torch.Tensor, Any]:
    engine = build(arm, draft_length, **options)
    (done,) = engine.generate(
        [Request("a", long_prompt(200, seed=1), len(forced), forced=forced)], run="x", keep_logits=True
    )
    return done.full_logprobs.double(), engine


@pytest.mark.parametrize("draft_length", [0, 5])
def test_fp8_rows_cost_both_paths_the_same_accuracy(draft_length: int) -> None:
    forced = long_prompt(40, seed=2)
    exact = score("oracle", forced)[0]
    errors = {}
    for arm in ("stock", "optimized"):
        table, engine = score(arm, forced, draft_length, precision="bf16-kvfp8")
        errors[arm] = float((table - exact).abs().mean())
        assert {t.dtype for t in engine.engine.caches.kv.values()} == {torch.float8_e4m3fn}
        assert not torch.equal(table, score(arm, forced, draft_length, precision="bf16")[0])
        if arm == "optimized":
            assert {s.path for s in engine.drain_ledger() if s.kind != "prefill"} == {"specialized"}
    assert 0.7 < errors["optimized"] / errors["stock"] < 1.3
