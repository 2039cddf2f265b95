"""Shared memory that both proxies touch: ordinary loads and stores, and bulk copies.

Two orders need ``fence.proxy.async`` in the threads that used ordinary accesses:

* a slot is read, then released (mbarrier or barrier), then refilled by a bulk copy. Without the fence the refill can
  overtake the reads; measured on an H200: up to 300 of 300 launches with wrong values, none with the fence.
* a tile is written with ordinary stores, then copied out by a bulk store.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from fasttrack.audit.ir import Access, Address, Instruction, Leaf, Sync
from fasttrack.audit.subject import Subject
from fasttrack.audit.trace import Affine


@dataclass(frozen=True)
class _Use:
    instruction: Instruction
    access: Access
    form: Affine


def check(subject: Subject) -> None:
    if subject.function.stage == "ptx":
        _Proxies(subject).run()


class _Proxies:
    def __init__(self, s: Subject) -> None:
        self.s = s
        self.reads: list[_Use] = []
        self.writes: list[_Use] = []
        self.fills: list[_Use] = []  #: bulk copies into shared memory
        self.drains: list[_Use] = []  #: bulk copies out of it
        live = [i for b in s.flow.order for i in range(s.flow.starts[b], s.flow.ends[b])]
        for i in live:
            for a in s.code[i].accesses:
                self._sort(s.code[i], a)
        self.arrivals = [s.code[i] for i in live if s.code[i].sync is Sync.MBAR_ARRIVE and s.code[i].barrier]
        self.waits = [s.code[i] for i in live if s.code[i].sync is Sync.MBAR_WAIT and s.code[i].barrier]

    def _sort(self, ins: Instruction, a: Access) -> None:
        if a.space == "generic":
            origins = self.s.tracer.address_origins(ins.index, a.address)
            if not all(o.kind == "shared" for o in origins):
                return
        elif a.space != "shared":
            return
        use = _Use(ins, a, self.s.tracer.address_affine(ins.index, a.address))
        if a.proxy == "async":
            if a.what == "store" and a.barrier is not None:
                self.fills.append(use)
            elif a.what == "load":
                self.drains.append(use)
        elif a.what == "load":
            self.reads.append(use)
        elif a.what == "store":
            self.writes.append(use)

    def run(self) -> None:
        refills = [f for f in self.fills if self._is_refill(f)]
        if refills:
            bounds = self._bounds(self.fills, [*self.writes])
            for read in self.reads:
                if any(_in_region(read.form, f.form, bounds) for f in refills) and self._unfenced_release(
                    read, refills
                ):
                    return  # one finding per kernel: the cure is one fence before the release
        if self.drains:
            bounds = self._bounds(self.drains, self.fills)
            for w in self.writes:
                for d in self.drains:
                    if _in_region(w.form, d.form, bounds) and self._unfenced(
                        w.instruction.index, {d.instruction.index}
                    ):
                        self.s.report(
                            "missing-proxy-fence",
                            "ordinary stores reach a bulk copy out of the same shared memory without fence.proxy.async",
                            d.instruction,
                        )
                        return

    def _is_refill(self, fill: _Use) -> bool:
        """Can the copy meet a slot that was used before: does anything read shared memory or wait before it?"""
        i = fill.instruction.index
        return any(i in self.s.flow.after(w.index) for w in self.waits) or any(
            i in self.s.flow.after(r.instruction.index) for r in self.reads
        )

    def _bounds(self, inside: list[_Use], outside: list[_Use]) -> list[tuple[int, bool]]:
        """Where objects of shared memory begin: (constant part of the address, belongs to the copies)."""
        marks: dict[int, bool] = {}
        for ins in self.s.code:
            if ins.barrier is not None:
                marks.setdefault(self.s.tracer.address_affine(ins.index, ins.barrier).constant, False)
        for u in outside:
            marks.setdefault(u.form.constant, False)
        for u in inside:
            marks[u.form.constant] = True
        return sorted(marks.items())

    def _unfenced_release(self, read: _Use, refills: list[_Use]) -> bool:
        s, start = self.s, read.instruction.index
        direct = {f.instruction.index for f in refills}
        if self._unfenced(start, direct):
            s.report(
                "missing-proxy-fence",
                "shared memory read here is refilled by a bulk copy of the same thread without fence.proxy.async",
                read.instruction,
            )
            return True
        for arrive in self.arrivals:
            if not self._releases(arrive, refills):
                continue
            goals = {arrive.index, *self._deciders(arrive.index)}
            if self._unfenced(start, goals):
                s.report(
                    "missing-proxy-fence",
                    f"the slot read here is released (line {arrive.line}) for a bulk copy without fence.proxy.async in "
                    "every reading thread before it",
                    read.instruction,
                )
                return True
        return False

    def _deciders(self, at: int) -> list[int]:
        """Thread-dependent branches that decide whether ``at`` runs: the other side must have fenced as well."""
        flow = self.s.flow
        out, b = [], flow.block_of[at]
        up = flow.dominators.get(b, b)
        while up != b:
            last = flow.ends[up] - 1
            if self.s.code[last].guard is not None and self.s.order.divergent(last):
                out.append(last)
            b, up = up, flow.dominators.get(up, up)
        return out

    def _releases(self, arrive: Instruction, refills: list[_Use]) -> bool:
        """Does a refill wait for this barrier? Barriers that copies complete on are the other direction."""
        assert arrive.barrier is not None
        mine = self._form(arrive.index, arrive.barrier)
        full = {
            self._form(f.instruction.index, f.access.barrier).constant
            for f in self.fills
            if f.access.barrier is not None
        }
        guards: list[Affine] = []
        for w in self.waits:
            if any(self._guards(w.index, f.instruction.index) for f in refills):
                assert w.barrier is not None
                form = self._form(w.index, w.barrier)
                if form.constant not in full:
                    guards.append(form)
        if mine.constant in full or not guards:
            return False
        exact = {g.constant for g in guards}
        if mine.constant in exact or not _base(mine):
            return True
        if all(len(g.terms) <= 1 for g in guards):
            return False
        marks = sorted([(c, True) for c in exact] + [(c, False) for c in full])  # an array: elements follow its start
        at = bisect_right(marks, (mine.constant, True)) - 1
        return at >= 0 and marks[at][1]

    def _guards(self, wait: int, fill: int) -> bool:
        """Does every execution of the fill come behind a fresh execution of the wait?"""
        flow = self.s.flow
        if not flow.dominates(flow.block_of[wait], flow.block_of[fill]):
            return False
        inner = next((loop for loop in flow.loops if fill in loop), None)
        return inner is None or wait in inner

    def _form(self, at: int, address: Address) -> Affine:
        return self.s.tracer.address_affine(at, address)

    def _unfenced(self, start: int, goals: set[int]) -> bool:
        """Is there a path from ``start`` to one of ``goals`` without a proxy fence?"""
        flow, code = self.s.flow, self.s.code
        seen: set[int] = set()
        stack = [start + 1]
        while stack:
            i = stack.pop()
            b = flow.block_of[i] if i < len(code) else -1
            while b >= 0 and i < flow.ends[b]:
                if i in goals:
                    return True
                if code[i].sync is Sync.FENCE_ASYNC and code[i].guard is None:
                    break
                i += 1
            else:
                if b >= 0:
                    for t in flow.successors[b]:
                        if t not in seen:
                            seen.add(t)
                            stack.append(flow.starts[t])
        return False


def _base(form: Affine) -> set[object]:
    return {a for a, c in form.terms if c == 1}


def _in_region(access: Affine, copy: Affine, bounds: list[tuple[int, bool]]) -> bool:
    """Can the access touch what the copy touches? Unknown bases can."""
    a, b = _base(access), _base(copy)
    leaves_a = {x for x in a if isinstance(x, Leaf) and x.kind == "shared"}
    leaves_b = {x for x in b if isinstance(x, Leaf) and x.kind == "shared"}
    if leaves_a and leaves_b and not leaves_a & leaves_b:
        return False
    if not a & b:
        return True
    at = bisect_right(bounds, (access.constant, True)) - 1
    return at < 0 or bounds[at][1]
