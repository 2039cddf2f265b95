"""Requests whose schedule produces the steps a cell speaks of. Pure data, torch-free, reproducible from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from fasttrack.errors import UsageError
from fasttrack.gates.base import crossing_prompt
from fasttrack.manifest.model import Context as Bucket
from fasttrack.target import EngineInfo, Request, Sampling

#: Prompt length where the bucket does not ask for a longer one; lengths vary by up to two tokens below it.
SHORT_PROMPT = 8
LEAST_ALONE = 6  #: tokens of a request that is alone and then followed by another, where it may have so many


def token_prompt(rng: random.Random, length: int, info: EngineInfo) -> tuple[int, ...]:
    """Random tokens, none of them an end token; real vocabularies route them like text, repeated words do not."""
    end = set(info.eos_token_ids)
    return tuple(_draw(rng, info.vocab_size, end) for _ in range(length))


def _draw(rng: random.Random, vocab: int, excluded: set[int]) -> int:
    while (token := rng.randrange(vocab)) in excluded:
        pass
    return token


def prompt_length(bucket: Bucket, output_tokens: int, info: EngineInfo) -> int:
    """Longest prompt of a schedule whose contexts, prompt and output together, stay inside ``bucket``."""
    room = min(bucket.max, info.max_context) - output_tokens
    length = max(bucket.min, min(SHORT_PROMPT, room))
    if length > room or length < 1:
        raise UsageError(
            f"a context of {bucket.min} to {bucket.max} tokens has no room for {output_tokens} more "
            f"(the engine holds {info.max_context})",
            where="contexts",
            expected="a wider bucket, fewer decode steps or a larger engine",
        )
    return length


def together(
    count: int,
    output_tokens: int,
    bucket: Bucket,
    info: EngineInfo,
    seed: int,
    *,
    sampling: Sampling | None = None,
    late: int = 0,
    arrival_step: int = 0,
    prompt_tokens: int | None = None,
) -> list[Request]:
    """``count`` requests of ``output_tokens`` each that arrive together; the last ``late`` at ``arrival_step``.

    Prompts have ``prompt_tokens`` where that is given, else lengths that keep every context inside ``bucket``.
    """
    rng = random.Random(seed)
    longest = prompt_tokens or prompt_length(bucket, output_tokens, info)
    requests = []
    for i in range(count):
        varied = prompt_tokens is None and longest - 2 > bucket.min
        length = longest - (i % 3 if varied else 0)
        requests.append(
            Request(
                id=f"r{i}",
                prompt=token_prompt(rng, length, info),
                max_tokens=output_tokens,
                sampling=sampling or Sampling(ignore_eos=True, logprobs=1),
                arrival_step=arrival_step if i >= count - late else 0,
            )
        )
    return requests


def come_and_go(
    count: int, tokens: int, bucket: Bucket, info: EngineInfo, seed: int, *, far: int = 0, late: int = 0, pause: int = 0
) -> list[Request]:
    """``count`` requests at once, of ``tokens`` each; the last ``far`` of all end near the far end of ``bucket``.

    With ``late``, the first ``late`` requests end halfway and as many new ones follow ``pause`` steps later: batches
    shrink and grow, rows move up, and slots and pages change hands.
    """
    staying = count - late
    first = min(tokens, max(2 if staying else LEAST_ALONE, tokens // 2))
    arrival = first + pause
    lengths = [first] * late + [tokens] * staying + [max(first, tokens - arrival)] * late
    requests = together(len(lengths), max(lengths), bucket, info, seed, late=late, arrival_step=arrival)
    rng, place = random.Random(seed + 1), len(lengths) - far
    found = []
    for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        prompt = request.prompt
        if i >= place:
            prompt = token_prompt(rng, far_prompt(i - place, length, bucket, info), info)
        found.append(replace(request, prompt=prompt, max_tokens=length))
    return found


def far_prompt(turn: int, output_tokens: int, bucket: Bucket, info: EngineInfo) -> int:
    """Prompt length of a context at the far end of ``bucket``: in even turns one whose output crosses from one cache
    page to the next, where the engine tells its page size and such a context is far enough; else the longest."""
    longest = min(bucket.max, info.max_context)
    page = info.config.get("page_size")
    if isinstance(page, int) and turn % 2 == 0:
        crossing = crossing_prompt(output_tokens, bucket.min, longest, page)
        if crossing is not None:
            return crossing
    return max(longest - output_tokens - turn, bucket.min)
