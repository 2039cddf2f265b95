"""What happens around sampling: the rows to sample, forced tokens, draft acceptance, log-probabilities, stops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3.reference.requests import GenerationRequest, RequestError, RequestState
from kimi_k3.reference.sampler import SamplerRow, top_log_probabilities
from kimi_k3.reference.scheduler import ScheduledRequest
from kimi_k3.reference.tokenizer import TextCodec


def check_request(request: GenerationRequest, vocab: int) -> None:
    """:class:`RequestError` naming the first thing in the request that cannot be served."""
    for name, tokens in (
        ("prompt", request.prompt),
        ("forced", request.forced),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"request {request.id!r}: {name}[{position}] is token {token}, expected 0 <= token < {vocab}"
                )
    if request.arrival_step < 0:
        raise RequestError(f"request {request.id!r}: arrival_step {request.arrival_step}, expected at least 0")
    problems = request.sampling.problems()
    if problems:
        raise RequestError(f"request {request.id!r}: {'; '.join(problems)}")


def sampler_rows(scheduled: ScheduledRequest, vocab: int, eos: int) -> list[SamplerRow]:
    """One row per token this request may get: one, plus one per draft, each as if the drafts before it stood."""
    state, params = scheduled.state, scheduled.state.request.sampling
    drafts = scheduled.drafts
    rows: list[SamplerRow] = []
    mask = state.mask
    for j in range(1 + len(drafts)):
        allowed = mask([*state.output, *drafts[:j]]) if mask is not None else None
        if j < len(drafts) and allowed is not None and not allowed[drafts[j]]:
            mask = None  # a forbidden draft is rejected here: what would follow it is never used
        if state.emitted + j < params.min_tokens:
            allowed = torch.ones(vocab, dtype=torch.bool) if allowed is None else allowed.clone()
            allowed[[eos, *params.stop_token_ids]] = False
        prompt_mask, counts = _history(state, drafts[:j], vocab) if params.penalised else (None, None)
        rows.append(SamplerRow(params, len(state.tokens) + j, allowed, prompt_mask, counts))
    return rows


def _history(state: RequestState, drafts: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """What penalties need: prompt tokens (bool) and output counts, the drafts counted as output."""
    if state.prompt_mask is None or state.output_counts is None:
        state.prompt_mask = torch.zeros(vocab, dtype=torch.bool)
        state.prompt_mask[list(state.request.prompt)] = True
        state.output_counts = torch.bincount(torch.tensor(state.output, dtype=torch.int64), minlength=vocab)
    if not drafts:
        return state.prompt_mask, state.output_counts
    return state.prompt_mask, state.output_counts + torch.bincount(torch.tensor(drafts), minlength=vocab)


def verify(state: RequestState, tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tokens that count: forced ones replace sampled ones, and drafts stand while they equal the choice.

    ``tokens[j]`` was sampled from the target with the noise of its own position. Accepting a draft iff it
    equals that token is exact rejection sampling for a one-hot proposal, and gives the very tokens that
    decoding without drafts would give.
    """
    chosen: list[int] = []
    for j, token in enumerate(tokens):
        position, forced = state.emitted + j, state.request.forced
        chosen.append(forced[position] if position < len(forced) else token)
        if j == len(drafts) or drafts[j] != chosen[j]:
            break
    return chosen


def emit(state: RequestState, tokens: Sequence[int], logprobs: Tensor | None, codec: TextCodec, eos: int) -> int:
    """Append tokens until one ends the request. ``logprobs`` [>= len(tokens), vocab]. Returns how many."""
    params = state.request.sampling
    for j, token in enumerate(tokens):
        state.tokens.append(token)
        if state.output_counts is not None:
            state.output_counts[token] += 1
        if logprobs is not None and state.wants_logprobs:
            state.logprobs.append(float(logprobs[j, token]))
            if params.logprobs is not None:
                state.top_logprobs.append(top_log_probabilities(logprobs[j], token, params.logprobs))
            if state.keep_logits:
                state.full_logprobs.append(logprobs[j])
        if _stops(state, token, codec, eos):
            state.finish_reason = "stop"
        elif state.emitted >= state.request.max_tokens:
            state.finish_reason = "length"
        if state.finish_reason is not None:
            return j + 1
    return len(tokens)


def _stops(state: RequestState, token: int, codec: TextCodec, eos: int) -> bool:
    """Add the last token's bytes to the text; whether it ends the request.

    A stop token and everything from the first stop string on stay out of the text, not out of the tokens.
    Bytes, not characters: a stop string may begin and end in the middle of tokens. Forced tokens never stop.
    """
    params, text = state.request.sampling, state.output_bytes
    may_stop = state.emitted > len(state.request.forced) and state.emitted >= params.min_tokens
    if may_stop and (token in params.stop_token_ids or (token == eos and not params.ignore_eos)):
        return True
    added = codec.token_bytes(token)
    text += added
    if not may_stop or not params.stop:
        return False
    found = []
    for stop in params.stop:
        pattern = stop.encode()
        at = text.find(pattern, max(0, len(text) - len(added) - len(pattern) + 1))
        if at >= 0:
            found.append(at)
    if found:
        del text[min(found) :]
    return bool(found)
