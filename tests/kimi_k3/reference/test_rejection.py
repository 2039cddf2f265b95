"""Rejection sampling: exactness by enumeration, synthetic acceptance to the token, and determinism."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from kimi_k3.reference.rejection import (
    PLACEHOLDER,
    Rejection,
    acceptance_rates,
    block_acceptance,
    residual,
    standard_acceptance,
    verify_drafts,
)

VOCAB, DRAFTS = 3, 2


def _conditional(seed: int) -> dict[tuple[int, ...], Tensor]:
    """A distribution over the next token for every prefix of up to DRAFTS tokens."""
    gen = torch.Generator().manual_seed(seed)
    return {
        prefix: torch.softmax(2 * torch.randn(VOCAB, generator=gen, dtype=torch.float64), 0)
        for length in range(DRAFTS + 1)
        for prefix in itertools.product(range(VOCAB), repeat=length)
    }


def _path_probability(model: dict[tuple[int, ...], Tensor], path: tuple[int, ...], start: int = 0) -> float:
    result = 1.0
    for i in range(start, len(path)):
        result *= float(model[path[:i]][path[i]])
    return result


def _kept_probabilities(method: str, p: Tensor, q: Tensor, drafts: tuple[int, ...]) -> tuple[list[float], list[Tensor]]:
    """Probability of keeping exactly 0..d drafts, and the correction's distribution in each case."""
    if method == "standard":
        accept = standard_acceptance(p, q, drafts).tolist()
        reach = [1.0]
        for a in accept:
            reach.append(reach[-1] * a)
        kept = [reach[i] * (1 - accept[i]) for i in range(DRAFTS)] + [reach[-1]]
        corrections = [residual(p[i], q[i]) for i in range(DRAFTS)] + [p[DRAFTS]]
    else:
        passes, weights = block_acceptance(p, q, drafts)
        kept = []
        for i in range(DRAFTS + 1):
            later = 1.0
            for h in passes.tolist()[i:]:
                later *= 1 - h
            kept.append((passes[i - 1].item() if i else 1.0) * later)
        corrections = [residual(p[i], q[i], weights[i]) for i in range(DRAFTS)] + [p[DRAFTS]]
    return kept, [c / c.sum() for c in corrections]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("seed", range(5))
def test_emitted_tokens_have_exactly_the_target_distribution(method: str, seed: int) -> None:
    target, proposal = _conditional(seed), _conditional(100 + seed)
    got: Counter[tuple[int, ...]] = Counter()
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        p = torch.stack([target[drafts[:i]] for i in range(DRAFTS + 1)])
        q = torch.stack([proposal[drafts[:i]] for i in range(DRAFTS)])
        drawn = _path_probability(proposal, drafts)
        kept, corrections = _kept_probabilities(method, p, q, drafts)
        assert sum(kept) == pytest.approx(1.0)
        for n, probability in enumerate(kept):
            for token in range(VOCAB):
                start = (*drafts[:n], token)
                for rest in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - len(start)):
                    path = start + rest
                    got[path] += (
                        drawn * probability * corrections[n][token].item() * _path_probability(target, path, len(start))
                    )
    for path in itertools.product(range(VOCAB), repeat=DRAFTS + 1):
        assert got[path] == pytest.approx(_path_probability(target, path), abs=1e-12)


def test_block_verification_accepts_at_least_as_much() -> None:
    gains = []
    for seed in range(8):
        target, proposal = _conditional(seed), _conditional(100 + seed)
        lengths = {"standard": 0.0, "block": 0.0}
        for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
            p = torch.stack([target[drafts[:i]] for i in range(DRAFTS + 1)])
            q = torch.stack([proposal[drafts[:i]] for i in range(DRAFTS)])
            for method in lengths:
                kept, _ = _kept_probabilities(method, p, q, drafts)
                lengths[method] += _path_probability(proposal, drafts) * sum(n * k for n, k in enumerate(kept))
        gains.append(lengths["block"] - lengths["standard"])
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_sampling_follows_the_probabilities(method: str, greedy_drafts: bool) -> None:
    """verify_drafts itself, over many seeds, for fixed drafts."""
    p = torch.tensor([[0.2, 0.5, 0.3], [0.55, 0.3, 0.15], [0.1, 0.3, 0.6]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.7, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    logits, drafts, runs = p.log(), (1, 2), 1500  # every outcome has a probability well away from 0 and 1
    if greedy_drafts:
        q = torch.nn.functional.one_hot(torch.tensor(drafts), VOCAB).double()
    kept, corrections = _kept_probabilities(method, p, q, drafts)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        proposal = None if greedy_drafts else q
        out = verify_drafts(logits, drafts, Rejection(method), greedy=False, seed=seed, position=9, proposal=proposal)
        counts[tuple(out)] += 1
    for n, probability in enumerate(kept):
        for token in range(VOCAB):
            expected = probability * corrections[n][token].item()
            assert counts[(*drafts[:n], token)] / runs == pytest.approx(
                expected, abs=4.5 * (expected * (1 - expected) / runs) ** 0.5
            )


def test_greedy_accepts_while_the_argmax_agrees() -> None:
    target = torch.eye(5)[[3, 1, 4, 0]]
    for drafts, expected in (([3, 1, 4], [3, 1, 4, 0]), ([3, 2, 4], [3, 1]), ([0, 1, 4], [3]), ([], [3])):
        rows = target[: len(drafts) + 1]
        for method in ("standard", "block"):
            assert verify_drafts(rows, drafts, Rejection(method), greedy=True, seed=0, position=0) == expected


def test_placeholder_drafts_are_always_rejected() -> None:
    target = torch.zeros(3, 4)
    for seed in range(50):
        for method in ("standard", "block"):
            out = verify_drafts(target, [PLACEHOLDER, 1], Rejection(method), greedy=False, seed=seed, position=0)
            assert len(out) == 1
        out = verify_drafts(target, [2, PLACEHOLDER], Rejection.synthetic(3, 2), greedy=False, seed=seed, position=0)
        assert len(out) == 2


def test_acceptance_length_to_rates() -> None:
    assert acceptance_rates(6, 7) == (1, 1, 1, 1, 1, 0, 0)
    assert acceptance_rates(5.5, 7) == (1, 1, 1, 1, 0.5, 0, 0)
    assert acceptance_rates(1, 3) == (0, 0, 0)
    assert acceptance_rates(8, 7) == (1,) * 7
    assert sum(acceptance_rates(3.3, 7)) + 1 == pytest.approx(3.3)
    for length in (0.9, 8.1):
        with pytest.raises(ValueError, match="between 1 and 8"):
            acceptance_rates(length, 7)


@pytest.mark.parametrize("greedy", [True, False])
def test_acceptance_length_6_emits_exactly_6_tokens_every_step(greedy: bool) -> None:
    rejection = Rejection.synthetic(6, 7)
    gen = torch.Generator().manual_seed(0)
    for seed in range(100):
        target = torch.randn(8, 11, generator=gen)
        drafts = torch.randint(0, 11, (7,), generator=gen).tolist()
        out = verify_drafts(target, drafts, rejection, greedy=greedy, seed=seed, position=seed)
        assert len(out) == 6
        assert out[:5] == drafts[:5], "accepted drafts are emitted verbatim"
        if greedy:
            assert out[5] == int(target[5].argmax())
        else:
            assert out[5] != drafts[5], "the rejected draft is not what replaces it"


def test_fractional_acceptance_length_is_met_on_average() -> None:
    rejection = Rejection.synthetic(5.5, 7)
    lengths = [
        len(verify_drafts(torch.zeros(8, 11), [1] * 7, rejection, greedy=True, seed=s, position=3)) for s in range(2000)
    ]
    assert set(lengths) == {5, 6}
    assert sum(lengths) / len(lengths) == pytest.approx(5.5, abs=0.06)


def test_rates_may_be_given_directly() -> None:
    rejection = Rejection("synthetic", (0.9, 0.6, 0.0, 0.0))
    assert [rejection.conditional(i) for i in range(4)] == pytest.approx([0.9, 0.6 / 0.9, 0.0, 0.0])
    lengths = Counter(
        len(verify_drafts(torch.zeros(5, 4), [0] * 4, rejection, greedy=True, seed=s, position=0)) for s in range(3000)
    )
    assert lengths[2] / 3000 == pytest.approx(0.3, abs=0.04)
    assert lengths[3] / 3000 == pytest.approx(0.6, abs=0.04)


def test_noise_depends_on_seed_and_position_only() -> None:
    target, drafts = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)), [3, 7, 9]

    def run(seed: int, position: int) -> list[int]:
        return verify_drafts(target, drafts, Rejection(), greedy=False, seed=seed, position=position)

    assert run(5, 10) == run(5, 10)
    sure = torch.full((2, 50), -1e9)
    sure[0, 3] = 0  # the draft 3 is certain, so what follows is an ordinary sample at the next position
    sure[1] = target[1]
    alone = verify_drafts(target[1:2], [], Rejection(), greedy=False, seed=5, position=11)
    assert verify_drafts(sure, [3], Rejection(), greedy=False, seed=5, position=10) == [3, *alone]
    assert len({tuple(run(5, p)) for p in range(30)}) > 5
    assert len({tuple(run(s, 10)) for s in range(30)}) > 5


@pytest.mark.parametrize(
    ("method", "rates", "says"),
    [
        ("fly", (), "expected one of standard, block, synthetic"),
        ("standard", (0.5,), "belong to the synthetic method"),
        ("synthetic", (), "belong to the synthetic method"),
        ("synthetic", (0.5, 0.6), "non-increasing"),
        ("synthetic", (1.5,), "non-increasing within"),
    ],
)
def test_bad_settings_are_named(method: str, rates: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rejection(method, rates)


def test_more_drafts_than_rates_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 drafts, but acceptance rates for 2"):
        verify_drafts(torch.zeros(4, 5), [1, 2, 3], Rejection.synthetic(2, 2), greedy=True, seed=0, position=0)
