"""The embedded engine: schedule, run the model, sample, until every request is done.

Both arms share everything but the model's forward pass. With ``decode_backend: auto`` the reference computes
every step; with ``latency_specialized`` an executor is asked for a plan per step and the reference computes
the steps it declines. Nothing of the optimised packages is imported in the first case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from kimi_k3.names import REASON_SWITCH_OFF, STEP_RANGE, SWITCH, SWITCH_OFF, SWITCH_ON
from kimi_k3.reference.batch import RequestRows, StepBatch, build_batch
from kimi_k3.reference.cache import Caches, PageAllocator, SlotAllocator
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.emit import check_request, emit, sampler_rows, verify
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.requests import (
    Completion,
    GenerationRequest,
    RequestError,
    RequestState,
    StepEntry,
    TokenMask,
)
from kimi_k3.reference.sampler import log_probabilities, sample
from kimi_k3.reference.scheduler import ScheduledRequest, ScheduledStep, Scheduler
from kimi_k3.reference.tokenizer import TextCodec


class OptionError(ValueError):
    """An engine option that cannot be used: which, its value, and what would be right."""


class LanguageModel(Protocol):
    """What the engine needs of a model; :class:`kimi_k3.reference.model.Model` is one."""

    config: KimiK3Config
    precision: Precision
    device: torch.device

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Final-normed hidden states [T, H]; reads and writes ``caches``."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, vocab]."""
        ...


class StepExecutor(Protocol):
    """The specialised path: ``plan`` accepts a step, or returns an object whose ``reason`` names why not."""

    last_step: Any

    def plan(self, batch: StepBatch) -> Any: ...

    def run(self, plan: Any, batch: StepBatch) -> Tensor: ...


class Drafter(Protocol):
    """Proposes draft tokens, at most the engine's draft length, for requests that will decode next."""

    def propose(self, states: Sequence[RequestState]) -> list[list[int]]: ...


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine that is not the model. ``pages`` None: room for all requests at 1024 tokens."""

    decode_backend: str = SWITCH_OFF
    tp: int = 1
    dcp: int = 1
    draft_length: int = 0
    provider: str = "auto"
    max_requests: int = 64
    max_context: int = 4096
    max_tokens_per_step: int = 1024
    page_size: int = 16
    pages: int | None = None
    schedule: str = "mixed"

    def __post_init__(self) -> None:
        if self.decode_backend not in (SWITCH_OFF, SWITCH_ON):
            raise OptionError(f"{SWITCH} {self.decode_backend!r}, expected {SWITCH_OFF!r} or {SWITCH_ON!r}")
        if self.schedule not in ("mixed", "pure"):
            raise OptionError(f"schedule {self.schedule!r}, expected 'mixed' or 'pure'")
        if self.draft_length < 0:
            raise OptionError(f"draft_length {self.draft_length}, expected at least 0")
        for name in ("max_requests", "max_context", "page_size", "tp", "dcp"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)}, expected at least 1")
        if self.pages is not None and self.pages < 1:
            raise OptionError(f"pages {self.pages}, expected at least 1")
        if self.max_tokens_per_step < (rows := self.max_requests * (1 + self.draft_length)):
            raise OptionError(
                f"max_tokens_per_step {self.max_tokens_per_step}, expected at least {rows}: "
                f"one decode step of {self.max_requests} requests with {1 + self.draft_length} rows each"
            )

    @property
    def resolved_pages(self) -> int:
        if self.pages is not None:
            return self.pages
        return -(-max(self.max_context, self.max_requests * min(self.max_context, 1024)) // self.page_size)


class EmbeddedEngine:
    """Executes one arm in this process.

    ``executor`` overrides the one built for ``latency_specialized``. ``grammar`` turns a request's
    ``structured`` mapping into a token mask; without it such requests are refused.
    """

    def __init__(
        self,
        model: LanguageModel,
        codec: TextCodec,
        options: EngineOptions,
        *,
        executor: StepExecutor | None = None,
        drafter: Drafter | None = None,
        grammar: Callable[[Mapping[str, Any]], TokenMask] | None = None,
    ) -> None:
        if options.max_context > model.config.max_position_embeddings:
            raise OptionError(
                f"max_context {options.max_context}, expected at most {model.config.max_position_embeddings}, "
                "the checkpoint's max_position_embeddings"
            )
        self.model, self.codec, self.options = model, codec, options
        self.drafter, self.grammar = drafter, grammar
        self._ledger: list[StepEntry] = []
        self._submitted = 0
        self._new_scheduler()
        self.caches = Caches.allocate(
            model.config,
            model.precision,
            pages=options.resolved_pages,
            page_size=options.page_size,
            slots=self.scheduler.slots.slots,
            draft_length=options.draft_length,
            device=model.device,
        )
        self.executor = executor
        if executor is None and options.decode_backend == SWITCH_ON:
            self.executor = _executor(model, self.caches, options)

    def _new_scheduler(self) -> None:
        options = self.options
        self.scheduler = Scheduler(
            PageAllocator(options.resolved_pages, options.page_size),
            SlotAllocator(options.max_requests, options.draft_length),
            max_requests=options.max_requests,
            max_tokens_per_step=options.max_tokens_per_step,
            max_context=options.max_context,
            pure=options.schedule == "pure",
        )

    # -- the engine protocol ---------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Every resolved option that could change speed or answers."""
        return {
            **asdict(self.options),
            "pages": self.options.resolved_pages,
            "precision": self.model.precision.name,
            "drafter": type(self.drafter).__name__ if self.drafter else None,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
        }

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.codec.decode(token_ids)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Run ``requests`` to completion; results in the same order. ``arrival_step`` counts from this call.

        An invalid request raises :class:`RequestError` before any step runs. Whatever ends the call early,
        its requests are taken out and what they held is freed.
        """
        states: list[RequestState] = []
        try:
            for request in requests:
                states.append(self.submit(request, keep_logits=keep_logits))
            index = 0
            while any(state.finish_reason is None for state in states):
                self.step(run, index)
                if on_step is not None:
                    on_step(index)
                index += 1
        except BaseException:
            self.abort(states)
            raise
        return [state.completion() for state in states]

    def drain_ledger(self) -> list[StepEntry]:
        """The steps since the last call, oldest first."""
        drained, self._ledger = self._ledger, []
        return drained

    def reset(self) -> None:
        """Forget every request and everything cached."""
        self.abort([*self.scheduler.running, *self.scheduler.waiting])
        self._new_scheduler()
        for tensors in (self.caches.kv, self.caches.conv, self.caches.recurrent):
            for tensor in tensors.values():
                tensor.zero_()

    def close(self) -> None:
        """Forget everything and free the memory of caches, model and executor."""
        self.abort([*self.scheduler.running, *self.scheduler.waiting])
        self.executor = None
        self.caches = Caches(self.options.page_size, {}, {}, {})
        del self.model

    # -- one request, one step -------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, keep_logits: bool = False) -> RequestState:
        """Queue a request, to be admitted ``arrival_step`` steps from now at the earliest."""
        check_request(request, self.model.config.vocab_size)
        structured = request.sampling.structured
        if structured is not None and self.grammar is None:
            raise RequestError(f"request {request.id!r}: structured output, expected an engine with a grammar backend")
        active = [*self.scheduler.running, *self.scheduler.waiting]
        if any(state.request.id == request.id for state in active):
            raise RequestError(f"request {request.id!r}: already active, expected a new id")
        state = RequestState(
            request,
            order=self._submitted,
            arrival=self.scheduler.clock + request.arrival_step,
            keep_logits=keep_logits,
            mask=self.grammar(structured) if structured is not None and self.grammar else None,
        )
        self.scheduler.add(state)
        self._submitted += 1
        return state

    def abort(self, states: Iterable[RequestState]) -> None:
        """End requests where they are; finished ones are left alone."""
        for state in states:
            if state.finish_reason is None:
                state.finish_reason = "abort"
                self.scheduler.finish(state)

    @torch.no_grad()
    def step(self, run: str, index: int) -> list[RequestState]:
        """One engine step. Returns the requests that got tokens; finished ones have left the scheduler."""
        start = time.perf_counter()
        self.scheduler.advance()
        for state in self.scheduler.arrived():
            if state.arrival_time is None:
                state.arrival_time = start
        step = self.scheduler.schedule()
        if not step.requests:
            raise RuntimeError(f"step {index} of run {run!r}: work is queued but nothing could be scheduled")
        batch = build_batch([_rows(r) for r in step.requests], self.options.page_size, self.model.device)
        sampled = [r for r in step.requests if r.samples]
        logits, reason = self._forward(step, batch, sampled, f"{STEP_RANGE}/{run}/{index}")
        entry = self._entry(step, batch, reason, run, index)
        emitted = self._advance(step, sampled, logits)
        if self.drafter is not None:
            self._draft()
        now = time.perf_counter()
        for state, count in emitted:
            state.token_times += [now] * count
        entry.wall, entry.emitted = now - start, sum(count for _, count in emitted)
        self._ledger.append(entry)
        return [state for state, _ in emitted]

    def _forward(
        self, step: ScheduledStep, batch: StepBatch, sampled: Sequence[ScheduledRequest], span: str
    ) -> tuple[Tensor, str | None]:
        """Logits of the rows that are sampled, and why the reference computed them (None: it did not)."""
        index = _sampled_rows(step)
        with record_function(span):
            reason: str | None = REASON_SWITCH_OFF
            if self.executor is not None:
                plan = self.executor.plan(batch)
                reason = getattr(plan, "reason", None)
            if self.executor is None or reason is not None:
                hidden = self.model.forward(batch, self.caches)
            else:
                hidden = self.executor.run(plan, batch)
            if len(index) != hidden.shape[0]:
                hidden = hidden[index]
            return self.model.compute_logits(hidden).cpu(), reason

    def _advance(
        self, step: ScheduledStep, sampled: Sequence[ScheduledRequest], logits: Tensor
    ) -> list[tuple[RequestState, int]]:
        """Sample, accept drafts, append tokens, finish requests. Returns how many tokens each request got."""
        vocab, eos = self.model.config.vocab_size, self.model.config.eos_token_id
        rows = [row for r in sampled for row in sampler_rows(r, vocab, eos)]
        tokens = sample(logits, rows) if rows else []
        logprobs = log_probabilities(logits) if any(r.state.wants_logprobs for r in sampled) else None
        for r in step.requests:
            if r.prefill:
                r.state.computed += r.rows
        emitted, first = [], 0
        for r in sampled:
            count = 1 + len(r.drafts)
            chosen = verify(r.state, tokens[first : first + count], r.drafts)
            if not r.prefill:
                r.state.computed += len(chosen)
                r.state.accepted = len(chosen)
            kept = emit(r.state, chosen, None if logprobs is None else logprobs[first:], self.codec, eos)
            if r.state.finish_reason is not None:
                self.scheduler.finish(r.state)
            emitted.append((r.state, kept))
            first += count
        return emitted

    def _draft(self) -> None:
        assert self.drafter is not None
        ready = [state for state in self.scheduler.running if not state.prefilling]
        for state, drafts in zip(ready, self.drafter.propose(ready) if ready else [], strict=True):
            if len(drafts) > self.options.draft_length:
                raise ValueError(f"{len(drafts)} drafts for {state.request.id!r}, expected <= the draft length")
            state.drafts = list(drafts)

    def _entry(self, step: ScheduledStep, batch: StepBatch, reason: str | None, run: str, index: int) -> StepEntry:
        entry = StepEntry(
            run=run,
            index=index,
            kind=step.kind,
            requests=batch.num_requests,
            rows=batch.num_rows,
            padded_rows=batch.num_rows,
            draft_length=max((len(r.drafts) for r in step.requests), default=0),
            tp=self.options.tp,
            dcp=self.options.dcp,
            context_max=max(c + q for c, q in zip(batch.context_lens, batch.query_lens, strict=True)),
            path="stock",
            reason=reason,
            ops={},
            providers={},
            slots=[s for r in step.requests for s in r.state.slots[: 1 if r.prefill else r.rows]],
            rank_hashes=[],
        )
        if reason is None and self.executor is not None:
            did = self.executor.last_step
            entry.path, entry.ops, entry.providers = "specialized", dict(did.ops), dict(did.providers)
            entry.slots, entry.rank_hashes = list(did.slots), list(did.rank_hashes)
            entry.padded_rows = did.padded_rows
        return entry


def _executor(model: Any, caches: Caches, options: EngineOptions) -> StepExecutor:
    from kimi_k3.decode.executor import Executor  # only here: off means off

    return Executor(
        model,
        caches,
        tp=options.tp,
        dcp=options.dcp,
        draft_length=options.draft_length,
        provider=options.provider,
        max_context=options.max_context,
    )


def _rows(scheduled: ScheduledRequest) -> RequestRows:
    state = scheduled.state
    if scheduled.prefill:
        tokens = state.tokens[state.computed : state.computed + scheduled.rows]
    else:
        tokens = [state.tokens[-1], *scheduled.drafts]
    return RequestRows(
        token_ids=tokens,
        context_len=state.computed,
        prefill=scheduled.prefill,
        pages=state.pages,
        slots=state.slots,
        accepted=state.accepted,
        drafts=len(scheduled.drafts),
    )


def _sampled_rows(step: ScheduledStep) -> list[int]:
    """Row indices whose logits are needed: the last of a finished prefill, all of a decode or verify."""
    index: list[int] = []
    start = 0
    for r in step.requests:
        if r.samples:
            index.extend([start + r.rows - 1] if r.prefill else range(start, start + r.rows))
        start += r.rows
    return index
