"""The harness tested on itself: stock against stock, on 100 seeds, prompts and schedules, is never called different."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit_run import run_units

from fasttrack.checks import CHECKS
from fasttrack.engines.cache import EngineCache
from fasttrack.gates import GATES, Scope
from fasttrack.manifest.model import Manifest
from fasttrack.records import FidelityRecord, FreeRunRecord
from fasttrack.target import Engine, EngineSpec, LedgerStep
from kimi_k3.target import TARGET

SEEDS = 100
RUNGS = ("evals.fidelity", "evals.routing", "evals.free_running")


class StockTwice:
    """The target with stock in the optimised arm's place; its ledger is relabelled, so that gates look at it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(TARGET, name)

    def engine(self, spec: EngineSpec) -> Engine:
        if spec.arm != "optimized":
            return TARGET.engine(spec)
        engine: Any = TARGET.engine(replace(spec, arm="stock", switch_value=TARGET.describe().off))
        told = engine.drain_ledger

        def drain() -> list[LedgerStep]:
            return [replace(s, path="specialized", reason=None) if s.kind == "decode" else s for s in told()]

        engine.drain_ledger = drain
        return engine


def manifest(rng: random.Random, requests: list[int] | None = None) -> Manifest:
    """Other batch sizes, lengths and contexts each time."""
    requests = requests or [rng.randrange(2, 8)]
    low = rng.randrange(1, 24)
    data = {
        "schema_version": 1,
        "name": "tiny",
        "target": "kimi_k3",
        "engine": {"kind": "embedded", "options": {"checkpoint": "tiny-a"}},
        "contexts": {"short": {"min": low, "max": low + rng.randrange(12, 40)}},
        "scope": [{"name": "plain", "tp": [8], "requests": requests}],
        "gates": {"required": list(RUNGS)},
        "tiers": {
            "smoke": {
                "minutes": 1,
                "fidelity_sequences": max(2, *requests),
                "fidelity_tokens": rng.randrange(3, 5),
                "free_running_tokens": rng.randrange(2, 5),
                "free_running_requests": 1,
            }
        },
    }
    return Manifest.model_validate(data)


@pytest.mark.slow
def test_stock_against_stock_on_a_hundred_seeds(tmp_path: Path) -> None:
    target, everything = StockTwice(), list[Any]()
    largest = Scope(manifest(random.Random(0), [8]), "smoke", TARGET.describe())
    engines = EngineCache(target, largest, tmp_path, seed=0)
    shapes, prompts = set(), set()
    for seed in range(SEEDS):
        scope = Scope(manifest(random.Random(seed)), "smoke", TARGET.describe())
        own = run_units(scope, tmp_path, check="evals", target=target, engines=engines, salt=f"{seed}/")
        units = CHECKS["evals"].units(scope.manifest, scope.tier)
        shapes |= {(str(unit.params), str(scope.manifest.contexts)) for unit in units}
        for gate in ("evals.fidelity", "evals.routing"):
            result = GATES[gate](scope, own)
            assert result.verdict == "pass", (seed, gate, result.reason)
        forced = [r for r in own if isinstance(r, FidelityRecord)]
        prompts |= {(r.kl_sum, r.positions) for r in forced if r.arm == "stock"}
        by_sequence = {(r.unit, str(r.cell), r.sequence, r.arm): r.kl_sum for r in forced}
        assert all(kl == by_sequence[u, c, s, "stock"] for (u, c, s, _), kl in by_sequence.items())
        everything += [r.model_copy(update={"unit": f"{r.unit}#{seed}"}) for r in own]
    engines.close()
    assert len(shapes) > 150  # two rungs a seed, hardly any schedule twice
    assert len(prompts) > 400  # no two sequences alike
    # A rate over a handful of texts decides nothing, so the hundred runs' texts are judged together.
    result = GATES["evals.free_running"](scope, everything)
    assert result.verdict == "pass", result.reason
    texts = [r for r in everything if isinstance(r, FreeRunRecord)]
    assert len(texts) > 600
    assert any(r.diverged for r in texts)
