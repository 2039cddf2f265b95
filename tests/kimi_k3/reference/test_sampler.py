"""Sampling against naive references, and against statistics where it is random."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from kimi_k3.reference.noise import STREAM_ACCEPT, STREAM_SAMPLE, gumbel, philox, uniform
from kimi_k3.reference.requests import SamplingParams
from kimi_k3.reference.sampler import (
    SamplerRow,
    log_probabilities,
    sample,
    sampling_logits,
    target_logits,
    top_log_probabilities,
)

ALPHA = 1e-4  # per statistical test; seeds are fixed, so a pass stays a pass


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """How often each token came up in ``count`` positions of one request. [vocab]"""
    rows = [SamplerRow(params, position) for position in range(count)]
    tokens = sample(logits.expand(count, -1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def naive_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Softmax, then keep the k most likely, then the smallest set reaching p, one token at a time."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order[: top_k or len(order)]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in words) == expected


def test_uniform_is_uniform_and_differs_by_seed_position_token_and_stream() -> None:
    seeds, positions = torch.tensor([7]), torch.tensor([11])
    tokens = torch.arange(20000)
    u = uniform(seeds, positions, tokens)
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > ALPHA
    assert bool((u > 0).all())
    assert bool((u < 1).all())
    others = [
        uniform(seeds + 1, positions, tokens),
        uniform(seeds + (1 << 40), positions, tokens),
        uniform(seeds, positions + 1, tokens),
        uniform(seeds, positions, tokens, STREAM_ACCEPT),
    ]
    for other in others:
        assert not bool((u == other).any())
        assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.04
    assert torch.equal(u, uniform(seeds, positions, tokens, STREAM_SAMPLE))


def test_gumbel_noise_is_gumbel() -> None:
    noise = gumbel(torch.arange(40), torch.arange(40), 512).flatten()
    assert scipy.stats.kstest(noise.numpy(), "gumbel_r").pvalue > ALPHA


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.7), (1.7, 6, 0.8)]
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(3))]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    count = 20000
    observed = draws(logits, params, count).double()
    naive = naive_distribution(logits.tolist(), temperature, top_k, top_p)
    expected = torch.tensor(naive, dtype=torch.float64) * count
    assert bool((observed[expected == 0] == 0).all()), "an excluded token was drawn"
    kept = expected > 0
    assert scipy.stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue > ALPHA


def test_the_filters_keep_exactly_the_naive_set() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(16, generator=generator, dtype=torch.float64)
        k = int(torch.randint(0, 17, (1,), generator=generator))
        p = float(torch.rand(1, generator=generator).clamp(0.05, 1.0))
        row = SamplerRow(SamplingParams(temperature=0.8, top_k=k, top_p=p), 0)
        ours = target_logits(sampling_logits(logits[None]), [row])[0].softmax(-1)
        naive = torch.tensor(naive_distribution(logits.tolist(), 0.8, k, p), dtype=torch.float64)
        torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-15)


def test_top_p_one_keeps_the_tail_whatever_round_off_says() -> None:
    logits = torch.cat([torch.tensor([50.0]), torch.zeros(7)])
    row = SamplerRow(SamplingParams(temperature=1.0, top_k=8, top_p=1.0), 0)
    assert bool(target_logits(sampling_logits(logits[None]), [row]).isfinite().all())


def naive_penalties(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    result = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        result.append(x)
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.7),
        SamplingParams(frequency_penalty=-0.4),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.2, frequency_penalty=0.5, repetition_penalty=0.8),
    ],
)
def test_penalties_match_the_naive_loop(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(10, generator=generator, dtype=torch.float64) * 3
    prompt, output = [1, 2, 2, 9], [2, 4, 4, 4, 7]
    mask = torch.zeros(10, dtype=torch.bool)
    mask[prompt] = True
    row = SamplerRow(params, 9, prompt_mask=mask, output_counts=torch.bincount(torch.tensor(output), minlength=10))
    plain = SamplerRow(SamplingParams(), 9)
    got = target_logits(sampling_logits(torch.stack([logits, logits, logits])), [plain, row, plain])
    expected = torch.tensor(naive_penalties(logits.tolist(), prompt, output, params), dtype=torch.float64)
    torch.testing.assert_close(got[1], expected, rtol=1e-14, atol=0)
    assert torch.equal(got[0], logits), "a neighbour without penalties is untouched"


def test_penalties_come_before_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0]])
    row = SamplerRow(
        SamplingParams(temperature=0.5, presence_penalty=1.5),
        1,
        prompt_mask=torch.zeros(2, dtype=torch.bool),
        output_counts=torch.tensor([1, 0]),
    )
    assert target_logits(sampling_logits(logits), [row]).tolist() == [[1.0, 2.0]]


def test_penalties_without_history_are_an_error() -> None:
    with pytest.raises(ValueError, match="no output_counts"):
        sample(torch.zeros(1, 4), [SamplerRow(SamplingParams(presence_penalty=1.0), 0)])


def test_a_token_depends_on_its_seed_and_position_not_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 64, generator=generator)
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.2, top_p=0.6),
    ]
    rows = [SamplerRow(SamplingParams(**{**vars(kinds[i % 4]), "seed": i * 31 - 4}), i) for i in range(9)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(9)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_matter_and_any_integer_is_one() -> None:
    logits = torch.zeros(1, 512)
    tokens = {
        sample(logits, [SamplerRow(SamplingParams(temperature=1.0, seed=s), 3)])[0]
        for s in (0, 1, -1, 2**32, 2**63, 2**64 - 3, 10**30)
    }
    assert len(tokens) >= 6


def test_the_mask_excludes_and_an_empty_mask_is_an_error() -> None:
    allowed = torch.zeros(8, dtype=torch.bool)
    allowed[5] = True
    for params in (SamplingParams(), SamplingParams(temperature=2.0, seed=1)):
        assert sample(torch.arange(8.0)[None], [SamplerRow(params, 0, allowed=allowed)]) == [5]
    with pytest.raises(ValueError, match="allows no token"):
        sample(torch.zeros(1, 8), [SamplerRow(SamplingParams(), 0, allowed=torch.zeros(8, dtype=torch.bool))])


def test_logits_are_not_changed_and_low_precision_is_widened() -> None:
    logits = torch.randn(2, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    before = logits.clone()
    sample(logits, [SamplerRow(SamplingParams(temperature=0.5, top_k=3), i) for i in range(2)])
    assert torch.equal(logits, before)
    assert log_probabilities(logits).dtype == torch.float32
    assert log_probabilities(logits.double()).dtype == torch.float64


def test_top_log_probabilities_hold_the_best_and_the_chosen() -> None:
    logprobs = log_probabilities(torch.arange(6.0)[None])[0]
    top = top_log_probabilities(logprobs, token=0, count=2)
    assert list(top) == [5, 4, 0]
    assert top[0] == float(logprobs[0])
    assert list(top_log_probabilities(logprobs, token=5, count=2)) == [5, 4]
