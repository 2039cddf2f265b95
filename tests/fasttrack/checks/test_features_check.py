"""The features check: distributions and quantiles, stops taken from free text, units, and what becomes of refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_target import TARGET
from harness import TOY, run_units

from fasttrack.checks import CHECKS
from fasttrack.checks.feature_sampling import distribution, quantiles
from fasttrack.checks.feature_stops import candidates
from fasttrack.errors import UsageError
from fasttrack.gates import GATES, Scope
from fasttrack.gates.features import RULES
from fasttrack.manifest.model import Manifest
from fasttrack.records import FeatureRecord, GenerationRecord, RefusalRecord
from fasttrack.stats.two_sample import bin_counts
from fasttrack.target import Completion, EngineSpec, Sampling


def logits(rows: int = 1, vocab: int = 12, seed: int = 0) -> torch.Tensor:
    raw = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return raw.log_softmax(1)


def by_hand(logprobs: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability: temperature, then top-k, then top-p, one after the other."""
    weights = {i: math.exp(x / sampling.temperature) for i, x in enumerate(logprobs)}
    order = sorted(weights, key=lambda i: -weights[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.6),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=0.8, top_k=5, top_p=0.5),
        Sampling(temperature=1.0, top_k=99),
    ],
    ids=str,
)
def test_distribution_is_that_of_the_parameters(sampling):
    table = logits()
    probabilities, ids = distribution(table, sampling)
    wanted = by_hand(table[0].tolist(), sampling)
    found = {int(i): float(p) for i, p in zip(ids[0], probabilities[0], strict=True) if p > 0}
    assert found.keys() == wanted.keys()
    assert all(found[i] == pytest.approx(wanted[i]) for i in wanted)


def test_top_k_keeps_what_equals_the_last():
    probabilities, _ = distribution(torch.tensor([[1.0, 0.5, 0.5, 0.1]]), Sampling(temperature=1.0, top_k=2))
    assert int((probabilities > 0).sum()) == 3


def sample(table: torch.Tensor, sampling: Sampling, seed: int = 1) -> list[int]:
    probabilities, ids = distribution(table, sampling)
    place = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))
    return ids.gather(1, place).squeeze(1).tolist()


def test_quantiles_of_honest_samples_are_uniform_whatever_the_distributions():
    sampling = Sampling(temperature=0.7, top_p=0.9)
    table = logits(4000)
    inside, outside = quantiles(table, sample(table, sampling), sampling, random.Random(3))
    assert outside == 0
    counts = bin_counts(inside)
    assert sum((c - 500) ** 2 / 500 for c in counts) < 26  # chi-square of 7 degrees, one in two thousand


def test_an_ignored_temperature_or_filter_shows():
    sampling = Sampling(temperature=0.4, top_k=3)
    table = logits(2000)
    _, outside = quantiles(table, sample(table, Sampling(temperature=1.0)), sampling, random.Random(3))
    assert outside > 100
    warm, _ = quantiles(table, sample(table, replace(sampling, temperature=1.0)), sampling, random.Random(3))
    assert sum((c - len(warm) / 8) ** 2 / (len(warm) / 8) for c in bin_counts(warm)) > 60


def test_quantiles_want_a_row_per_token():
    with pytest.raises(ValueError, match="2 tokens, 1 rows"):
        quantiles(logits(), [1, 2], Sampling(temperature=1.0), random.Random(0))


# -- stops -----------------------------------------------------------------------------------------------------

WORDS = {1: "ab", 2: "cd", 3: "e", 4: "fgh", 5: "\ufffd"}


def engine(words: dict[int, str] = WORDS) -> Any:
    return SimpleNamespace(decode=lambda tokens: "".join(words[t] for t in tokens))


def stops(tokens: list[int], text: str | None = None) -> dict[str, tuple[str, int | None, int]]:
    whole = engine().decode(tokens) if text is None else text
    found = candidates(engine(), Completion("r", tokens, "length", whole))
    return {s.kind: (s.pattern, s.token, s.tokens) for s in found if s.kind != "never"}


def test_stops_are_taken_where_they_first_occur():
    found = stops([1, 3, 3, 2, 4, 2])
    assert found["token"] == ("", 2, 4)
    assert found["across"] == ("ec", None, 4)
    assert found["inside"] == ("c", None, 4)


def test_a_piece_that_occurs_earlier_is_not_taken():
    found = stops([2, 1, 3, 2, 1, 4])
    assert found["token"] == ("", 4, 6)
    assert found["inside"] == ("fg", None, 6)  # "c" and "a" occur in the first two tokens
    assert found["across"] == ("ec", None, 4)


def test_text_that_is_not_the_tokens_gives_token_stops_alone():
    assert stops([1, 3, 3, 2, 4], text="ab").keys() == {"token"}
    assert "inside" not in stops([1, 1, 1, 5, 5, 5])


# -- units and refusals ----------------------------------------------------------------------------------------


def toy(features: tuple[str, ...] = tuple(RULES), gates: tuple[str, ...] = ("stop",), **changes: Any) -> Scope:
    manifest = {**TOY, "gates": {"required": [f"features.{g}" for g in gates]}, **changes}
    return Scope(Manifest.model_validate(manifest), "smoke", replace(TARGET.describe(), features=features))


def test_units_follow_the_gates_and_the_tiers_deployments():
    scope = toy(gates=("stop", "penalties"))
    names = [u.name for u in CHECKS["features"].units(scope.manifest, "smoke")]
    assert names == [f"features/{f}/tp{tp}-dcp1-dl0" for tp in (1, 2) for f in ("stop", "penalties")]
    one = toy(tiers={"smoke": {"minutes": 1, "features": {"tp": [2]}}})
    assert [u.name for u in CHECKS["features"].units(one.manifest, "smoke")] == ["features/stop/tp2-dcp1-dl0"]
    assert not CHECKS["features"].units(Manifest.model_validate(TOY), "smoke")


def test_a_feature_that_is_not_listed_leaves_a_refusal_and_is_not_run(tmp_path):
    scope = toy(features=())
    records = run_units(scope, tmp_path, check="features")
    assert {type(r) for r in records} == {RefusalRecord}
    assert GATES["features.stop"](scope, records).verdict == "not_run"


class Refusing:
    """The toy target whose engine of one arm takes no stops."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def __getattr__(self, name: str) -> Any:
        return getattr(TARGET, name)

    def engine(self, spec: EngineSpec) -> Any:
        built = TARGET.engine(spec)
        generate = built.generate

        def refuse(requests: Any, **options: Any) -> Any:
            if any(r.sampling.stop or r.sampling.stop_token_ids for r in requests):
                raise UsageError("stops are not supported")
            return generate(requests, **options)

        if spec.arm == self.arm:
            built.generate = refuse
        return built


@pytest.mark.parametrize(("arm", "verdict"), [("stock", "not_run"), ("optimized", "fail")])
def test_a_request_that_only_stock_takes_is_a_feature_optimised_away(arm, verdict, tmp_path):
    scope = toy()
    result = GATES["features.stop"](scope, run_units(scope, tmp_path, check="features", target=Refusing(arm)))
    assert (result.verdict, "stops are not supported" in result.reason) == (verdict, True)


def test_the_toy_resumes_the_stock_path_and_streams_in_order(tmp_path):
    """Two features that need nothing of an engine but the protocol."""
    scope = toy(gates=("stock_resumed", "streaming"), margins={"logprobs": 1e-5})
    records = run_units(scope, tmp_path, check="features")
    for gate in ("features.stock_resumed", "features.streaming"):
        result = GATES[gate](scope, records)
        assert result.verdict == "pass", result.reason
    assert all(r.held for r in records if isinstance(r, FeatureRecord))
    made = [r for r in records if isinstance(r, GenerationRecord)]
    assert {len(r.token_times or []) == len(r.token_ids) for r in made} == {True}
