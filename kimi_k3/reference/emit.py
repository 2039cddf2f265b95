"""What happens around sampling: the rows to sample, forced tokens, drafts that stand, log-probabilities, stops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kimi_k3.reference.noise import signed_seed
from kimi_k3.reference.rejection import PLACEHOLDER, Rejection, verify_drafts
from kimi_k3.reference.requests import GenerationRequest, RequestError, RequestState
from kimi_k3.reference.sampler import SamplerRow, draw, sampling_logits, target_logits, top_log_probabilities
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
    if request.max_drafts is not None and request.max_drafts < 0:
        raise RequestError(f"request {request.id!r}: max_drafts {request.max_drafts}, expected at least 0")
    if request.arrival_step < 0:
        raise RequestError(f"request {request.id!r}: arrival_step {request.arrival_step}, expected at least 0")
    problems = request.sampling.problems()
    if problems:
        raise RequestError(f"request {request.id!r}: {'; '.join(problems)}")


def sampler_rows(scheduled: ScheduledRequest, vocab: int, eos: int) -> tuple[list[SamplerRow], list[int]]:
    """One row per token this request may get: one, plus one per draft, each as if the drafts before it stood.

    Also the drafts to be judged: from the first one on that may not follow, they are placeholders.
    """
    state, params = scheduled.state, scheduled.state.request.sampling
    drafts = scheduled.drafts
    judged = list(drafts)
    rows: list[SamplerRow] = []
    mask = state.mask
    for j in range(1 + len(drafts)):
        allowed = mask([*state.output, *drafts[:j]]) if mask is not None else None
        if state.emitted + j < params.min_tokens:
            longer = torch.ones(vocab, dtype=torch.bool) if allowed is None else allowed.clone()
            longer[[eos, *params.stop_token_ids]] = False
            allowed = longer if allowed is None or bool(longer.any()) else allowed  # a complete grammar only ends
        if j < len(drafts) and allowed is not None and not allowed[drafts[j]]:
            judged[j:] = [PLACEHOLDER] * (len(drafts) - j)
            mask = None  # what would follow it is never used
        prompt_mask, counts = _history(state, drafts[:j], vocab) if params.penalised else (None, None)
        rows.append(SamplerRow(params, len(state.tokens) + j, allowed, prompt_mask, counts))
    return rows, judged


def _history(state: RequestState, drafts: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """What penalties need: prompt tokens (bool) and output counts, the drafts counted as output."""
    if state.prompt_mask is None or state.output_counts is None:
        state.prompt_mask = torch.zeros(vocab, dtype=torch.bool)
        state.prompt_mask[list(state.request.prompt)] = True
        state.output_counts = torch.bincount(torch.tensor(state.output, dtype=torch.int64), minlength=vocab)
    if not drafts:
        return state.prompt_mask, state.output_counts
    return state.prompt_mask, state.output_counts + torch.bincount(torch.tensor(drafts), minlength=vocab)


def choose(
    sampled: Sequence[ScheduledRequest], logits: Tensor, vocab: int, eos: int, rejection: Rejection
) -> list[list[int]]:
    """The tokens each request gets: forced ones, then accepted drafts, then one of the target's.

    ``logits`` [rows, vocab] of all their rows. All but a request's last token are drafts that stand.
    """
    own = [sampler_rows(r, vocab, eos) for r in sampled]
    rows = [row for mine, _ in own for row in mine]
    if not rows:
        return []
    target = target_logits(sampling_logits(logits), rows)
    starts = list(accumulate((len(mine) for mine, _ in own), initial=0))
    single = [start for start, (mine, _) in zip(starts, own, strict=False) if len(mine) == 1]
    drawn = iter(draw(target[single], [rows[i] for i in single]))
    chosen = []
    for r, start, (mine, drafts) in zip(sampled, starts, own, strict=False):
        if drafts:
            chosen.append(_verified(r.state, target[start : start + len(mine)], mine, drafts, rejection))
        else:
            token = next(drawn)
            forced = r.state.request.forced[r.state.emitted : r.state.emitted + 1]
            chosen.append(list(forced) or [token])
    return chosen


def _verified(
    state: RequestState, target: Tensor, rows: Sequence[SamplerRow], drafts: Sequence[int], rejection: Rejection
) -> list[int]:
    """Where tokens are forced, a draft stands iff it is the forced one, whatever the rejection method."""
    forced = state.request.forced[state.emitted : state.emitted + len(rows)]
    for j, token in enumerate(forced):
        if j == len(drafts) or drafts[j] != token:
            return list(forced[: j + 1])
    done = len(forced)
    rest = verify_drafts(
        target[done:],
        drafts[done:],
        rejection,
        greedy=state.request.sampling.greedy,
        seed=signed_seed(state.request.sampling.seed),
        position=rows[done].position,
        proposal=None if state.proposal is None else state.proposal[done:],
    )
    return [*forced, *rest]


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
