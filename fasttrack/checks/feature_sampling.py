"""Sampled tokens of both arms as quantiles of the distribution that stock samples from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import evidence
from fasttrack.checks.feature_run import FeatureRun
from fasttrack.errors import EvidenceError
from fasttrack.gates.feature_units import POWER, SETTINGS, feature_units, sampling_level
from fasttrack.records import SampledRecord
from fasttrack.target import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch

MOST = 63  #: requests of one step, a multiple of the settings


def sampling(run: FeatureRun) -> None:
    """As many tokens per setting and arm as the stated power needs, from requests of all settings in one batch.

    The optimised arm's tokens are forced upon stock afterwards, which gives stock's distribution at each of them.
    """
    from fasttrack.stats.two_sample import samples_needed

    scope = run.ctx.scope
    level = sampling_level(feature_units(scope.manifest, scope.tier))
    needed = samples_needed(scope.manifest.margins.sampling, level, POWER)
    rows = min(scope.max_rows, scope.description.limits.max_rows) // (1 + run.draft_length)
    count = max(1, min(MOST, rows, run.ctx.engines.max_requests) // len(SETTINGS)) * len(SETTINGS)
    tokens = -(-needed // (count // len(SETTINGS)))
    names = list(SETTINGS)
    settings = {f"r{i}": names[i % len(names)] for i in range(count)}

    def drawn(arm: str) -> list[Request]:
        return [
            replace(
                r,
                sampling=Sampling(**SETTINGS[settings[r.id]], seed=run.seed(f"{arm}/{r.id}"), ignore_eos=True),
            )
            for r in run.requests(tokens, count=count)
        ]

    rng = random.Random(run.seed("quantiles"))
    for arm in ("stock", "optimized"):
        requests = drawn(arm)
        done = run.generate(arm, requests, "sampled", keep_logits=arm == "stock", record=False)
        own = done
        if arm == "optimized":
            forced = [replace(r, forced=tuple(c.token_ids)) for r, c in zip(requests, done, strict=True)]
            own = run.generate("stock", forced, "scored", keep_logits=True, record=False)
        for request, completion, scored in zip(requests, done, own, strict=True):
            inside, outside = quantiles(_table(scored), completion.token_ids, request.sampling, rng)
            run.ctx.record(
                SampledRecord,
                arm=arm,
                cell=run.cell,
                evidence=evidence(run.info(arm)),
                run=f"{run.unit.name}/{arm}/sampled",
                request=request.id,
                setting=settings[request.id],
                sampling={**SETTINGS[settings[request.id]], "seed": request.sampling.seed},
                quantiles=[round(u, 6) for u in inside],
                outside=outside,
            )


def _table(completion: Completion) -> torch.Tensor:
    if completion.full_logprobs is None:
        raise EvidenceError("the stock engine returns no full log-probabilities; its distribution is not known")
    return completion.full_logprobs.detach().double().cpu()


def distribution(logprobs: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``sampling`` samples from: (probabilities, token ids), [positions, vocabulary], most likely first.

    Divide by the temperature; keep the ``top_k`` most likely and what equals the last of them; renormalise; keep
    the fewest most likely whose probability reaches ``top_p``; renormalise.
    """
    import torch

    ordered, ids = torch.sort(logprobs / sampling.temperature, dim=1, descending=True, stable=True)
    if sampling.top_k:
        last = ordered[:, min(sampling.top_k, ordered.shape[1]) - 1, None]
        ordered = ordered.masked_fill(ordered < last, -torch.inf)
    probabilities = ordered.softmax(1)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
        probabilities /= probabilities.sum(1, keepdim=True)
    return probabilities, ids


def quantiles(logprobs: torch.Tensor, tokens: Sequence[int], sampling: Sampling, rng: Any) -> tuple[list[float], int]:
    """Randomised probability integral transform of ``tokens`` [n] under ``logprobs`` [n, vocabulary].

    Returns the quantiles of the tokens that can be sampled at all, and how many cannot.
    """
    import torch

    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} rows of log-probabilities")
    probabilities, ids = distribution(logprobs, sampling)
    place = (ids == torch.tensor(list(tokens)).unsqueeze(1)).long().argmax(1, keepdim=True)
    mass = probabilities.gather(1, place).squeeze(1).tolist()
    below = (probabilities.cumsum(1) - probabilities).gather(1, place).squeeze(1).tolist()
    inside = [min(1.0, b + rng.random() * p) for b, p in zip(below, mass, strict=True) if p > 0]
    return inside, len(tokens) - len(inside)
