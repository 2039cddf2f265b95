"""Continuous batching: which request runs how many rows in the next step. No tensors, no clocks, no randomness.

Two modes. ``mixed`` (default) gives decode rows priority and fills the token budget with prefill chunks, as
a production engine does. ``pure`` never mixes: prefill steps first, then decode steps only, so that a decode
cell consists of nothing but decode steps. Requests are served in (arrival, submission) order. When pages run
out the youngest running request is preempted: it loses pages and slots, keeps its tokens, and is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kimi_k3.reference.cache import PageAllocator, SlotAllocator
from kimi_k3.reference.prefix import Hit, PrefixCache
from kimi_k3.reference.requests import RequestError, RequestState


@dataclass(frozen=True)
class ScheduledRequest:
    state: RequestState
    rows: int
    prefill: bool
    samples: bool = True  #: the step ends with a token for this request; False in an unfinished prefill
    drafts: tuple[int, ...] = ()


@dataclass
class ScheduledStep:
    """Rows of one step, decode requests first."""

    requests: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(r.rows for r in self.requests)

    @property
    def kind(self) -> str:
        """decode, verify (decode with drafts), prefill, or mixed."""
        prefills = sum(r.prefill for r in self.requests)
        if prefills == len(self.requests):
            return "prefill"
        if prefills:
            return "mixed"
        return "verify" if any(r.drafts for r in self.requests) else "decode"


class Scheduler:
    def __init__(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        *,
        max_requests: int,
        max_tokens_per_step: int,
        max_context: int,
        pure: bool = False,
        lookahead: int = 0,
        prefix: PrefixCache | None = None,
    ) -> None:
        if max_tokens_per_step < max_requests * slots.width:
            raise ValueError(
                f"max_tokens_per_step {max_tokens_per_step} is less than one decode step of {max_requests} requests "
                f"with {slots.width} rows each; expected at least {max_requests * slots.width}"
            )
        self.pages, self.slots = pages, slots
        self.max_requests, self.max_tokens = max_requests, max_tokens_per_step
        self.max_context, self.pure = max_context, pure
        self.lookahead = lookahead  #: rows behind a request's last token that a drafter writes
        self.prefix = prefix
        self.clock = 0  #: steps since the start; jumps over idle time
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []

    # -- requests in and out ---------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Queue a request. :class:`RequestError` if it could never run to its end."""
        request, total = state.request, len(state.request.prompt) + state.request.max_tokens
        if not request.prompt:
            raise RequestError(f"request {request.id!r}: empty prompt, expected at least one token")
        if request.max_tokens < 1:
            raise RequestError(f"request {request.id!r}: max_tokens {request.max_tokens}, expected at least 1")
        if total > self.max_context:
            raise RequestError(
                f"request {request.id!r}: {len(request.prompt)} prompt tokens + {request.max_tokens} new tokens "
                f"exceed the context; expected at most {self.max_context} together"
            )
        # Verify rows of rejected drafts need room too, but never beyond the context.
        if self._pages_for(total + self.slots.width - 1) > self.pages.pages:
            raise RequestError(
                f"request {request.id!r}: needs room for {total} tokens, expected at most "
                f"{self.pages.pages * self.pages.page_size} ({self.pages.pages} pages of {self.pages.page_size})"
            )
        self.waiting.append(state)
        self.waiting.sort(key=lambda s: s.priority)

    def finish(self, state: RequestState) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if state in self.running:
            self.running.remove(state)
            self._release(state)
        elif state in self.waiting:
            self.waiting.remove(state)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def arrived(self) -> list[RequestState]:
        """Waiting requests whose time has come."""
        return [s for s in self.waiting if s.arrival <= self.clock]

    def advance(self) -> None:
        """To be called before each step: jump over idle time."""
        if not self.running and self.waiting and self.waiting[0].arrival > self.clock:
            self.clock = self.waiting[0].arrival

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next step and allocate what they need. Moves the clock by one step."""
        self.advance()
        step = ScheduledStep()
        if self.pure:
            self._prefill(step)
            if not step.requests:
                self._decode(step)
        else:
            self._decode(step)
            self._prefill(step)
        self.clock += 1
        return step

    def _decode(self, step: ScheduledStep) -> None:
        for state in list(self.running):
            # Requests preempted by an earlier one in this loop are gone from ``running``.
            if state.prefilling or state not in self.running:
                continue
            drafts = tuple(state.drafts[: self.max_context - len(state.tokens)])
            rows = 1 + len(drafts)
            if self._grow(state, state.computed + rows, step):
                step.requests.append(ScheduledRequest(state, rows, prefill=False, drafts=drafts))

    def _prefill(self, step: ScheduledStep) -> None:
        budget = self.max_tokens - step.rows
        # Whoever was just preempted cannot come back at once: it was first in line and its pages are taken.
        self._admit(budget)
        for state in self.running:
            if not state.prefilling or budget == 0:
                continue
            until = state.prefill_until
            if self.prefix is not None:
                until = self.prefix.next_cut(state.computed, state.prefill_until)
            rows = min(budget, until - state.computed)
            last = state.computed + rows == state.prefill_until
            step.requests.append(ScheduledRequest(state, rows, prefill=True, samples=last))
            budget -= rows

    def _admit(self, budget: int) -> None:
        budget -= sum(s.prefill_until - s.computed for s in self.running if s.prefilling)
        for state in self.arrived():
            if budget <= 0 or len(self.running) == self.max_requests or self.slots.free == 0:
                return
            hit = self.prefix.find(state.tokens) if self.prefix is not None else Hit(0)
            needed = self._pages_for(len(state.tokens)) - len(hit.pages)
            # One page above the prefill, so that the first decode step does not preempt at once.
            if self._available < needed + (1 if self.running else 0):
                self.pages.release(hit.pages)
                return  # in order: nobody overtakes
            pages, slots = self._allocate(needed), self.slots.allocate()
            assert pages is not None
            assert slots is not None
            state.pages, state.slots = [*hit.pages, *pages], slots
            state.computed, state.prefill_until, state.snapshot = hit.tokens, len(state.tokens), hit.snapshot
            if self.prefix is not None and state.preemptions == 0:
                self.prefix.counted(len(state.tokens), hit.tokens)
                state.cached_tokens = hit.tokens
            self.waiting.remove(state)
            self.running.append(state)
            self.running.sort(key=lambda s: s.priority)
            budget -= state.prefill_until - state.computed

    @property
    def _available(self) -> int:
        """Pages that are free or could be."""
        return self.pages.free + (self.prefix.evictable if self.prefix is not None else 0)

    def _allocate(self, count: int) -> list[int] | None:
        if self.prefix is not None and count > self.pages.free:
            self.prefix.evict(count - self.pages.free)
        return self.pages.allocate(count)

    def _pages_for(self, tokens: int) -> int:
        """Pages for a request of ``tokens`` tokens and the drafter's rows behind them."""
        return self.pages.pages_for(min(tokens + self.lookahead, self.max_context))

    def _grow(self, state: RequestState, tokens: int, step: ScheduledStep) -> bool:
        """Give ``state`` room for ``tokens`` tokens, preempting younger requests; False if it had to go itself."""
        while (missing := self._pages_for(tokens) - len(state.pages)) > 0:
            pages = self._allocate(missing)
            if pages is not None:
                state.pages += pages
                return True
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState, step: ScheduledStep) -> None:
        self.running.remove(state)
        self._release(state)
        state.computed, state.prefill_until, state.accepted = 0, 0, 1
        state.drafts, state.proposal, state.snapshot = [], None, None
        state.preemptions += 1
        self.waiting.append(state)
        self.waiting.sort(key=lambda s: s.priority)
        step.preempted.append(state)

    def _release(self, state: RequestState) -> None:
        self.pages.release(state.pages)
        self.slots.release(state.slots)
        state.pages, state.slots = [], []
