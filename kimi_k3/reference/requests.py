"""Requests as the embedded engine sees them, what it returns, and what it remembers of each one.

The field names and meanings are those of the harness's target protocol, so that ``kimi_k3/target.py``
converts by name; this package does not import the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kimi_k3.reference.prefix import Snapshot

#: Structured output: tokens emitted so far -> which tokens may come next, bool [vocab].
TokenMask = Callable[[Sequence[int]], torch.Tensor]


class RequestError(ValueError):
    """A request the engine cannot serve; the message says which, why, and what would be right."""


@dataclass(frozen=True)
class SamplingParams:
    """With the meaning the OpenAI and vLLM interfaces give them. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  #: 0 = off
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  #: alternatives per token, besides the chosen one; None = none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0  #: end-of-sequence and stop tokens are masked before this many tokens
    structured: Mapping[str, Any] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def problems(self) -> list[str]:
        """What is out of range, one line each."""
        rules = [
            (self.temperature >= 0.0, f"temperature {self.temperature}, expected >= 0"),
            (self.top_k >= 0, f"top_k {self.top_k}, expected >= 0 (0 = off)"),
            (0.0 < self.top_p <= 1.0, f"top_p {self.top_p}, expected in (0, 1]"),
            (self.repetition_penalty > 0.0, f"repetition_penalty {self.repetition_penalty}, expected > 0"),
            (self.logprobs is None or self.logprobs >= 0, f"logprobs {self.logprobs}, expected >= 0"),
            (all(self.stop), "stop contains an empty string, expected non-empty strings"),
        ]
        return [text for holds, text in rules if not holds]


@dataclass(frozen=True)
class GenerationRequest:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_step: int = 0  #: admitted at this step of the run
    forced: tuple[int, ...] = ()  #: emitted instead of sampled tokens; they never stop the request
    max_drafts: int | None = None  #: draft tokens verified per step, at most; None = the engine's draft length


@dataclass
class Completion:
    """Times are seconds of ``time.perf_counter``, one per emitted token; logprobs are natural."""

    id: str
    token_ids: list[int]
    finish_reason: str  #: "stop", "length", "abort"
    text: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    arrival_time: float = 0.0
    token_times: list[float] = field(default_factory=list)
    full_logprobs: torch.Tensor | None = None  #: [emitted, vocab]
    cached_tokens: int = 0  #: prompt tokens taken from the prefix cache


@dataclass
class StepEntry:
    """One executed step. ``path`` says what ran; ``reason`` why it was not the specialised schedule."""

    run: str
    index: int
    kind: str  #: decode, verify, prefill, mixed
    requests: int
    rows: int
    padded_rows: int  #: rows executed, padding included; equals ``rows`` on the stock path
    draft_length: int
    tp: int
    dcp: int
    context_max: int
    path: str  #: "specialized" or "stock"
    reason: str | None
    ops: dict[str, int]
    providers: dict[str, str]
    slots: list[int]  #: state slots written
    rank_hashes: list[str]
    wall: float = 0.0  #: seconds, scheduling and sampling included
    emitted: int = 0
    accepted: list[int] = field(default_factory=list)  #: drafts that stood, per request that had any, in batch order


@dataclass(eq=False)
class RequestState:
    """What the engine knows of one request. ``tokens`` = prompt + emitted; ``computed`` of them are cached."""

    request: GenerationRequest
    order: int  #: submission order; ties of arrival are broken by it
    arrival: int  #: scheduler clock at which the request may be admitted
    keep_logits: bool = False
    mask: TokenMask | None = None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    prefill_until: int = 0  #: rows below this position are prefill rows; set at (re-)admission
    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    accepted: int = 1  #: tokens accepted by the last step; the state lies in ``slots[accepted - 1]``
    drafts: list[int] = field(default_factory=list)
    proposal: torch.Tensor | None = None  #: [drafts, vocab] what the drafts were drawn from; None: no chance involved
    preemptions: int = 0
    snapshot: Snapshot | None = None  #: state to be put into the first slot before the next step
    cached_tokens: int = 0  #: prompt tokens taken from the prefix cache at the first admission
    finish_reason: str | None = None
    output_bytes: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    full_logprobs: list[torch.Tensor] = field(default_factory=list)
    arrival_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    prompt_mask: torch.Tensor | None = None  #: [vocab] bool, only with penalties
    output_counts: torch.Tensor | None = None  #: [vocab] float, only with penalties

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def priority(self) -> tuple[int, int]:
        return self.arrival, self.order

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_until

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None or self.keep_logits or bool(self.request.forced)

    def completion(self) -> Completion:
        """The finished request; logprobs where asked for, where forced, and where logits are kept."""
        return Completion(
            id=self.request.id,
            token_ids=self.output,
            finish_reason=self.finish_reason or "abort",
            text=self.output_bytes.decode("utf-8", errors="replace"),
            logprobs=list(self.logprobs) if self.wants_logprobs else None,
            top_logprobs=list(self.top_logprobs) if self.request.sampling.logprobs is not None else None,
            arrival_time=self.arrival_time or 0.0,
            token_times=list(self.token_times),
            full_logprobs=torch.stack(self.full_logprobs) if self.keep_logits and self.full_logprobs else None,
            cached_tokens=self.cached_tokens,
        )
