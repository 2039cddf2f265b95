"""What can run before the dependency wait, and what after the launch of dependents.

A thread is *early* until it has executed ``griddepcontrol.wait``. Where threads of a block part ways (a branch on the
thread index) and one side certainly waits before the next block-wide barrier, the other side is *covered* and stops
being early at that barrier. Whether a branch is taken is not decided: every path of the graph counts.
"""

from __future__ import annotations

from functools import cached_property

from fasttrack.audit.flow import Flow
from fasttrack.audit.ir import Sync
from fasttrack.audit.trace import Tracer

EARLY, COVERED, WAITED = 1, 2, 4

#: special registers that differ between threads of a block, and between blocks of a grid
_THREAD = {"tid", "laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"}
_BLOCK = {"ctaid", "clusterid", "cluster_ctaid", "cluster_ctarank", "smid"}


class Order:
    def __init__(self, flow: Flow, tracer: Tracer) -> None:
        self.flow, self.tracer = flow, tracer
        self.code = flow.function.instructions
        live = flow.reachable
        self.waits = [i.index for i in self.code if i.sync is Sync.WAIT and flow.block_of[i.index] in live]
        self.triggers = [i.index for i in self.code if i.sync is Sync.TRIGGER and flow.block_of[i.index] in live]

    @cached_property
    def _varies(self) -> dict[int, set[str]]:
        return {}

    def varies_by(self, at: int) -> set[str]:
        """What the guard of instruction ``at`` depends on: names of special registers, ``memory`` for loads."""
        hit = self._varies.get(at)
        if hit is None:
            guard = self.code[at].guard
            hit = set()
            if guard is not None:
                for d in self.tracer.slice(at, [guard[0]]):
                    ins = self.code[d]
                    hit |= {getattr(a, "name", "") for a in ins.args if getattr(a, "kind", "") == "special"}
                    if ins.accesses:
                        hit.add("memory")
            self._varies[at] = hit
        return hit

    def divergent(self, at: int) -> bool:
        """Can threads of one block disagree about the guard of instruction ``at``?"""
        return bool(self.varies_by(at) & _THREAD)

    def grid_uniform(self, at: int) -> bool:
        """Is the guard the same for every thread of the grid (kernel arguments only)?"""
        return not self.varies_by(at) & (_THREAD | _BLOCK | {"memory"})

    @cached_property
    def _must_wait(self) -> list[bool]:
        """Per block: every path from its start waits before a barrier or the end of the kernel."""
        flow, n = self.flow, len(self.flow.starts)
        verdict: list[bool | None] = [None] * n  # decided inside the block
        for b in range(n):
            for i in range(flow.starts[b], flow.ends[b]):
                ins = self.code[i]
                if ins.sync is Sync.WAIT and ins.guard is None:
                    verdict[b] = True
                    break
                if ins.sync in (Sync.BARRIER, Sync.BARRIER_ARRIVE):
                    verdict[b] = False
                    break
            if verdict[b] is None and not flow.successors[b]:
                verdict[b] = False
        must = [v is not False for v in verdict]
        changed = True
        while changed:
            changed = False
            for b in reversed(flow.order):
                if verdict[b] is None and must[b] and not all(must[t] for t in flow.successors[b]):
                    must[b] = False
                    changed = True
        # a cycle that never waits never lets the block through either, but do not rely on that
        return [m and (v is True or self._reaches(b)) for b, (m, v) in enumerate(zip(must, verdict, strict=True))]

    def _reaches(self, b: int) -> bool:
        seen, stack = {b}, [b]
        while stack:
            for t in self.flow.successors[stack.pop()]:
                if t not in seen:
                    seen.add(t)
                    stack.append(t)
        return any(self.flow.block_of[w] in seen for w in self.waits)

    @cached_property
    def states(self) -> list[int]:
        """Per instruction: the states (EARLY, COVERED, WAITED or-ed) a thread can arrive in; 0 = unreachable."""
        flow = self.flow
        out = [0] * len(self.code)
        incoming = [0] * len(flow.starts)
        incoming[0] = EARLY
        work = [0]
        while work:
            b = work.pop()
            state = incoming[b]
            for i in range(flow.starts[b], flow.ends[b]):
                out[i] |= state
                state = self._step(i, state)
            last = self.code[flow.ends[b] - 1]
            nexts = flow.successors[b]
            split = len(nexts) > 1 and state & EARLY and last.guard is not None and self.divergent(last.index)
            for t in nexts:
                new = state
                if split and any(self._must_wait[o] for o in nexts if o != t):
                    new = (new & ~EARLY) | COVERED
                if new | incoming[t] != incoming[t]:
                    incoming[t] |= new
                    work.append(t)
        return out

    def _step(self, i: int, state: int) -> int:
        ins = self.code[i]
        if ins.sync is Sync.WAIT:
            if ins.guard is None:
                return WAITED
            left = state & ~EARLY | (COVERED if state & EARLY and self.divergent(i) else state & EARLY)
            return left | WAITED
        if ins.sync is Sync.BARRIER and state & COVERED:
            return state & ~COVERED | WAITED
        return state

    def early(self, i: int) -> bool:
        """Can instruction ``i`` run before its thread knows that the wait is over?"""
        return bool(self.states[i] & (EARLY | COVERED))

    @cached_property
    def after_trigger(self) -> frozenset[int]:
        """Instructions that can run after dependents were launched, by this thread or another of its block."""
        out: set[int] = set()
        for t in self.triggers:
            out |= self.flow.after(t)
            for d in self._controlling(t):
                out |= self.flow.after(d)
        return frozenset(out)

    def _controlling(self, at: int) -> list[int]:
        """Thread-dependent branches that decide whether ``at`` runs, since the last block-wide barrier."""
        flow, b = self.flow, self.flow.block_of[at]
        found = []
        up = flow.dominators.get(b, b)
        while up != b:
            last = self.code[flow.ends[up] - 1]
            if last.guard is not None and len(flow.successors[up]) > 1 and self.divergent(last.index):
                found.append(last.index)
            if any(self.code[i].sync is Sync.BARRIER for i in range(flow.starts[up], flow.ends[up])):
                break
            b, up = up, flow.dominators.get(up, up)
        return found

    @cached_property
    def skipped_exits(self) -> list[int]:
        """Exits that a whole grid can reach without any wait: the branches on the way depend on arguments only."""
        flow = self.flow
        seen, stack, found = {0}, [0], []
        while stack:
            b = stack.pop()
            ends = False
            for i in range(flow.starts[b], flow.ends[b]):
                if self.code[i].sync is Sync.WAIT:
                    ends = True  # guarded waits count as waiting: some thread does
                    break
            if ends:
                continue
            last = self.code[flow.ends[b] - 1]
            nexts = flow.successors[b]
            if not nexts:
                found.append(last.index)
                continue
            # threads spread over both sides: if either side certainly waits, the grid has waited
            if len(nexts) > 1 and not self.grid_uniform(last.index) and any(self._waits_below(t) for t in nexts):
                continue
            for t in nexts:
                if t not in seen:
                    seen.add(t)
                    stack.append(t)
        return found

    def _waits_below(self, b: int) -> bool:
        """From block ``b`` on, does every path meet a wait (barriers do not matter)?"""
        seen, stack = {b}, [b]
        while stack:
            x = stack.pop()
            if any(self.code[i].sync is Sync.WAIT for i in range(self.flow.starts[x], self.flow.ends[x])):
                continue
            if not self.flow.successors[x]:
                return False
            for t in self.flow.successors[x]:
                if t not in seen:
                    seen.add(t)
                    stack.append(t)
        return True
