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


def error(arm: str, forced: tuple[int, ...], draft_length: int, **options: Any) -> tuple[float, Any]:
    prompt = long_prompt(200, seed=1)
    exact = build("oracle", precision="fp64").generate(
        [Request("a", prompt, len(forced), forced=forced)], run="x", keep_logits=True
    )[0]
    engine = build(arm, draft_length, **options)
    (done,) = engine.generate([Request("a", prompt, len(forced), forced=forced)], run="x", keep_logits=True)
    return float((done.full_logprobs.double() - exact.full_logprobs).abs().mean()), engine


@pytest.mark.parametrize("draft_length", [0, 5])
def test_fp8_rows_cost_both_paths_the_same_accuracy(draft_length: int) -> None:
    forced = long_prompt(40, seed=2)
    errors = {}
    for precision in ("bf16", "bf16-kvfp8"):
        for arm in ("stock", "optimized"):
            errors[precision, arm], engine = error(arm, forced, draft_length, precision=precision)
            stored = {t.dtype for t in engine.engine.caches.kv.values()}
            assert stored == {torch.float8_e4m3fn if precision == "bf16-kvfp8" else torch.bfloat16}
            if arm == "optimized":
                paths = {s.path for s in engine.drain_ledger() if s.kind != "prefill"}
                assert paths == {"specialized"}
    for arm in ("stock", "optimized"):
        assert errors["bf16-kvfp8", arm] > 1.02 * errors["bf16", arm], "an FP8 cache must be noticed"
    ratio = errors["bf16-kvfp8", "optimized"] / errors["bf16-kvfp8", "stock"]
    assert 0.7 < ratio < 1.3
