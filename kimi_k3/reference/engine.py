"""The embedded engine: schedule, run the model, sample, until every request is done.

Both arms share everything but the model's forward pass. With ``decode_backend: auto`` the reference computes
every step; with ``latency_specialized`` an executor is asked for a plan per step and the reference computes
the steps it declines. Nothing of the optimised packages is imported in the first case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from kimi_k3.names import REASON_SWITCH_OFF, STEP_RANGE, SWITCH_ON
from kimi_k3.reference.batch import StepBatch, build_batch
from kimi_k3.reference.cache import Caches, PageAllocator, SlotAllocator
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.drafter import Drafter
from kimi_k3.reference.emit import check_request, choose, emit
from kimi_k3.reference.options import EngineOptions, OptionError
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.prefix import PrefixCache, Snapshot
from kimi_k3.reference.rejection import Rejection
from kimi_k3.reference.requests import (
    Completion,
    GenerationRequest,
    RequestError,
    RequestState,
    StepEntry,
    TokenMask,
)
from kimi_k3.reference.sampler import log_probabilities
from kimi_k3.reference.scheduler import ScheduledRequest, ScheduledStep, Scheduler
from kimi_k3.reference.steps import request_rows, sampled_rows, step_entry
from kimi_k3.reference.tokenizer import TextCodec


class LanguageModel(Protocol):
    """What the engine needs of a model; :class:`kimi_k3.reference.model.Model` is one."""

    config: KimiK3Config
    precision: Precision
    device: torch.device

    def forward(self, batch: StepBatch, caches: Caches, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Final-normed hidden states [T, H] and taps [T, len(aux_layers), H]; reads and writes ``caches``."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, vocab]."""
        ...

    def commit(self, accepted: Tensor, caches: Caches) -> None:
        """After each step of a model whose ``state_scheme`` is "recover": how many rows [B] of each request stand."""
        ...


class StepExecutor(Protocol):
    """The specialised path: ``plan`` accepts a step, or returns an object whose ``reason`` names why not."""

    last_step: Any

    def plan(self, batch: StepBatch) -> Any: ...

    def run(self, plan: Any, batch: StepBatch, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]: ...


class EmbeddedEngine:
    """Executes one arm in this process.

    ``executor`` overrides the one built for ``latency_specialized``. ``rejection`` decides which drafts stand, by
    default standard rejection sampling. ``grammar`` turns a request's ``structured`` mapping into a token mask;
    without it such requests are refused.
    """

    def __init__(
        self,
        model: LanguageModel,
        codec: TextCodec,
        options: EngineOptions,
        *,
        executor: StepExecutor | None = None,
        drafter: Drafter | None = None,
        rejection: Rejection | None = None,
        grammar: Callable[[Mapping[str, Any]], TokenMask] | None = None,
    ) -> None:
        if options.max_context > model.config.max_position_embeddings:
            raise OptionError(
                f"max_context {options.max_context}, expected at most {model.config.max_position_embeddings}, "
                "the checkpoint's max_position_embeddings"
            )
        self.model, self.codec, self.options = model, codec, options
        self.drafter, self.rejection, self.grammar = drafter, rejection or Rejection(), grammar
        #: RecoverSSM: verify steps leave the state alone, and what stands is folded into it afterwards.
        self.recover = getattr(model, "state_scheme", "native") == "recover"
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
        if drafter is not None:
            drafter.attach(self.caches, options.max_requests)
        self.executor = executor
        if executor is None and options.decode_backend == SWITCH_ON:
            self.executor = _executor(model, self.caches, options)

    def _new_scheduler(self) -> None:
        options = self.options
        pages = PageAllocator(options.resolved_pages, options.page_size)
        self.prefix = PrefixCache(pages, options.prefix_interval) if options.prefix_caching else None
        self.scheduler = Scheduler(
            pages,
            SlotAllocator(options.max_requests, options.draft_length),
            max_requests=options.max_requests,
            max_tokens_per_step=options.max_tokens_per_step,
            max_context=options.max_context,
            pure=options.schedule == "pure",
            lookahead=self.drafter.lookahead if self.drafter else 0,
            prefix=self.prefix,
        )

    # -- the engine protocol ---------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Every resolved option that could change speed or answers."""
        return {
            **asdict(self.options),
            "pages": self.options.resolved_pages,
            "precision": self.model.precision.name,
            "drafter_class": type(self.drafter).__name__ if self.drafter else None,
            **(self.drafter.config() if self.drafter else {}),
            "rejection": self.rejection.method,
            "acceptance_rates": list(self.rejection.rates),
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

    @property
    def last_entry(self) -> StepEntry:
        """The ledger's newest step; IndexError once it was drained."""
        return self._ledger[-1]

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
        if self.drafter is not None:
            self.drafter.reset()

    def close(self) -> None:
        """Forget everything and free the memory of caches, model and executor."""
        self.abort([*self.scheduler.running, *self.scheduler.waiting])
        self.executor = self.drafter = None
        self.caches = Caches(self.options.page_size, {}, {}, {})
        del self.model

    # -- one request, one step -------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, keep_logits: bool = False) -> RequestState:
        """Queue a request, to be admitted ``arrival_step`` steps from now at the earliest."""
        check_request(request, self.model.config.vocab_size)
        active = [*self.scheduler.running, *self.scheduler.waiting]
        if any(state.request.id == request.id for state in active):
            raise RequestError(f"request {request.id!r}: already active, expected a new id")
        state = RequestState(
            request,
            order=self._submitted,
            arrival=self.scheduler.clock + request.arrival_step,
            keep_logits=keep_logits,
            mask=self._mask(request),
        )
        self.scheduler.add(state)
        self._submitted += 1
        return state

    def _mask(self, request: GenerationRequest) -> TokenMask | None:
        structured = request.sampling.structured
        if structured is None:
            return None
        try:
            if self.grammar is None:
                raise RequestError("structured output, expected an engine with a grammar backend")
            return self.grammar(structured)
        except RequestError as error:
            raise RequestError(f"request {request.id!r}: {error}") from None

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
        for r in step.requests:
            if r.state.snapshot is not None:
                r.state.snapshot.restore(self.caches, r.state.slots[0])
                r.state.snapshot = None
        batch = build_batch([request_rows(r) for r in step.requests], self.options.page_size, self.model.device)
        sampled = [r for r in step.requests if r.samples]
        logits, taps, reason = self._forward(step, batch, f"{STEP_RANGE}/{run}/{index}")
        did = self.executor.last_step if self.executor is not None and reason is None else None
        entry = step_entry(step, batch, self.options, did, reason, run, index)
        if self.recover:
            entry.slots = [r.state.slots[0] for r in step.requests]
        config = self.model.config
        chosen = choose(sampled, logits, config.vocab_size, config.eos_token_id, self.rejection)
        entry.accepted = [len(tokens) - 1 for r, tokens in zip(sampled, chosen, strict=True) if r.drafts]
        stood = {id(r): len(tokens) for r, tokens in zip(sampled, chosen, strict=True)}
        kept = [r.rows if r.prefill else stood[id(r)] for r in step.requests]
        if self.recover:
            self.model.commit(torch.tensor(kept, device=self.model.device), self.caches)
        if self.drafter is not None:
            self.drafter.observe(batch, taps, kept)
        emitted = self._advance(step, sampled, chosen, logits)
        if self.drafter is not None:
            self._draft(self.drafter)
        now = time.perf_counter()
        for state, count in emitted:
            state.token_times += [now] * count
        entry.wall, entry.emitted = now - start, sum(count for _, count in emitted)
        self._ledger.append(entry)
        return [state for state, _ in emitted]

    def _forward(self, step: ScheduledStep, batch: StepBatch, span: str) -> tuple[Tensor, Tensor, str | None]:
        """Logits of the rows that are sampled, the drafter's taps, and why the stock path ran (None: it did not)."""
        index, aux = sampled_rows(step), self.drafter.aux_layers if self.drafter is not None else ()
        with record_function(span):
            reason: str | None = REASON_SWITCH_OFF
            if self.executor is not None:
                plan = self.executor.plan(batch)
                reason = getattr(plan, "reason", None)
            if self.executor is None or reason is not None:
                hidden, taps = self.model.forward(batch, self.caches, aux)
            else:
                hidden, taps = self.executor.run(plan, batch, aux)
            if len(index) != hidden.shape[0]:
                hidden = hidden[index]
            return self.model.compute_logits(hidden).cpu(), taps, reason

    def _advance(
        self, step: ScheduledStep, sampled: Sequence[ScheduledRequest], chosen: Sequence[Sequence[int]], logits: Tensor
    ) -> list[tuple[RequestState, int]]:
        """Append tokens, move on, finish requests. Returns how many tokens each request got."""
        eos = self.model.config.eos_token_id
        logprobs = log_probabilities(logits) if any(r.state.wants_logprobs for r in sampled) else None
        for r in step.requests:
            if r.prefill:
                r.state.computed += r.rows
                if self.prefix is not None:
                    self._remember(self.prefix, r.state)
        emitted, first = [], 0
        for r, tokens in zip(sampled, chosen, strict=True):
            if not r.prefill:
                r.state.computed += len(tokens)
                r.state.accepted = 1 if self.recover else len(tokens)
            kept = emit(r.state, tokens, None if logprobs is None else logprobs[first:], self.codec, eos)
            if r.state.finish_reason is not None:
                self.scheduler.finish(r.state)
            emitted.append((r.state, kept))
            first += 1 + len(r.drafts)
        return emitted

    def _remember(self, prefix: PrefixCache, state: RequestState) -> None:
        """Keep a prefilled prefix and the state after it where the prefill was cut for that."""
        done = state.computed
        if done < state.prefill_until and done == prefix.next_cut(done - 1, state.prefill_until):
            taps = self.model.config.short_conv_kernel_size - 1
            prefix.insert(state.tokens, done, state.pages, Snapshot.take(self.caches, state.slots[0], taps))

    def _draft(self, drafter: Drafter) -> None:
        ready = [state for state in self.scheduler.running if not state.prefilling]
        for state, draft in zip(ready, drafter.propose(ready) if ready else [], strict=True):
            if len(draft.tokens) > self.options.draft_length:
                raise ValueError(f"{len(draft.tokens)} drafts for {state.request.id!r}, expected <= the draft length")
            state.drafts = draft.tokens[: state.request.max_drafts]
            state.proposal = draft.proposal


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
