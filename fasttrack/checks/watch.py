"""One generation under both witnesses: the ledger is read after every step, the profiler runs for a few of them.

Engines that can also count, in every step, what it changed of state that nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fasttrack.checks.base import Context, evidence
from fasttrack.checks.witness import StepProfiler
from fasttrack.records import CellKey, TraceRecord
from fasttrack.target import Completion, Engine, EngineInfo, LedgerStep, Request, StateWatchingEngine


class WatchedRun:
    """Runs requests and keeps what both witnesses said.

    The profiler starts before the first step (``start_at=-1``), after step ``start_at``, or, where that is
    None, after the first step that ``wanted`` accepts. It stops after ``profiled`` wanted steps.
    """

    def __init__(
        self, engine: Engine, *, wanted: Callable[[LedgerStep], bool], profiled: int, start_at: int | None = None
    ) -> None:
        self.engine, self.wanted, self.start_at = engine, wanted, start_at
        self.left = profiled
        self.steps: list[LedgerStep] = []
        self.reported: list[int] = []  #: indices as ``on_step`` named them
        self.late = 0  #: of these, steps that were not yet in the ledger
        self.profiler = StepProfiler()

    def generate(
        self, ctx: Context, requests: Sequence[Request], run: str, *, keep_logits: bool = False
    ) -> list[Completion]:
        state = self.engine if isinstance(self.engine, StateWatchingEngine) else None
        with ctx.target.profile(self.engine):
            if state is not None:
                state.watch_state(True)
            if self.start_at == -1:
                self.profiler.start()
            try:
                done = self.engine.generate(requests, run=run, keep_logits=keep_logits, on_step=self._after)
                self.steps += self.engine.drain_ledger()
            finally:
                self.profiler.stop()
                if state is not None:
                    state.watch_state(False)
        return done

    def _after(self, index: int) -> None:
        new = self.engine.drain_ledger()
        self.steps += new
        self.reported.append(index)
        self.late += all(step.index != index for step in new)
        hit = any(self.wanted(step) for step in new)
        if self.profiler.running:
            self.left -= hit
            if self.left <= 0:
                self.profiler.stop()
        elif self.left > 0 and (hit if self.start_at is None else index == self.start_at):
            self.profiler.start()

    def write(self, ctx: Context, *, arm: str, cell: CellKey | None, info: EngineInfo) -> None:
        ctx.write_steps(self.steps, arm=arm, cell=cell, info=info)
        for trace in self.profiler.traces(ctx.description):
            ctx.record(
                TraceRecord,
                arm=arm,
                cell=cell,
                evidence=evidence(info),
                run=trace.run,
                index=trace.index,
                ops=dict(trace.ops),
                other_ops=trace.other_ops,
                source=trace.source,
            )
