"""A model of the tiled projection's barriers, run under random schedules.

Every block of a cluster has a producer and consumer warps that take the kernel's steps one at a time, in any order
that its waits allow. Copies, multicast pieces, remote releases and slabs are messages that arrive whenever they like.
What must never happen raises :class:`Fault`: a slot that is overwritten before everyone has read it, a reader that
finds another stage, a barrier that gets more than it waits for or in the wrong phase, a message to a block that has
ended, a deadlock. It models order and lifetime, not the memory model: what a fence makes visible is the audit's to
check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

Ready = Callable[[], bool]
Steps = Generator[Ready | None, None, None]
W_BYTES, X_BYTES = 64, 32  #: of a box and of one block's piece of x; any numbers do


class Fault(AssertionError):
    """Something the protocol must exclude."""


@dataclass(frozen=True)
class Ring:
    """The geometry of a compiled kernel, as :class:`TilesKernel` names it."""

    nst: int
    stages: int
    xstages: int
    xcast: int = 1
    ksplit: int = 1
    warps: int = 2
    wgmma: bool = False
    prompt: bool = False

    @classmethod
    def of(cls, k: Any) -> Ring:
        return cls(k.nst, k.stages, k.xstages, k.xcast, k.ksplit, min(k.warps, 4), k.wgmma, k.prompt)

    @property
    def late(self) -> bool:
        """A slot is released one stage after it was read."""
        return self.wgmma and not self.prompt


class Barrier:
    """An mbarrier: arrivals and bytes that are still missing, and the number of phases that are complete."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, expect: int = 0) -> None:
        self.missing, self.bytes = self.missing - 1, self.bytes + expect
        if self.missing < 0:
            raise Fault("a barrier got more arrivals than it counts")
        self._turn()

    def complete(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Block:
    place: int
    ring: Ring
    started: bool = False
    drained: bool = False  #: the ring's memory is used for partial sums
    running: int = 0  #: warps
    at_barrier: list[int] = field(default_factory=lambda: [0, 0])
    released: dict[int, set[int]] = field(default_factory=dict)  #: stage -> warps that have read it
    received: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        r = self.ring
        self.rank, self.member = self.place % r.ksplit, self.place // r.ksplit
        self.running = r.warps + 1
        self.full = [Barrier(1) for _ in range(r.stages)]
        self.empty = [Barrier(r.warps * r.xcast) for _ in range(r.stages)]
        self.exchange = Barrier(1)
        self.w: list[int | None] = [None] * r.stages
        self.x: list[dict[int, int]] = [{} for _ in range(r.xstages)]  #: piece -> stage
        self.reading: list[int] = []  #: stages, one entry per warp that reads

    def must_live(self, what: str) -> None:
        if not self.started:
            raise Fault(f"{what} reaches a block that has not started")
        if not self.running:
            raise Fault(f"{what} reaches a block that has ended")

    def may_fill(self, what: str, stage: int, ring: int) -> None:
        if self.drained:
            raise Fault(f"{what} arrives in memory that holds partial sums")
        before = stage - ring
        if before >= 0 and (before in self.reading or len(self.released.get(before, ())) < self.ring.warps):
            raise Fault(f"{what} of stage {stage} overwrites stage {before}, which was not read yet")


class Cluster:
    """``without``: steps of the protocol that are left out, to see that they are needed."""

    def __init__(self, ring: Ring, seed: int, without: frozenset[str] = frozenset()) -> None:
        self.ring, self.without, self.random = ring, without, random.Random(seed)
        self.blocks = [Block(place, ring) for place in range(ring.ksplit * ring.xcast)]
        self.messages: list[Callable[[], None]] = []
        self.arrived, self.phase = 0, 0
        self.turns: dict[tuple[int, int], list[int]] = {}  #: warp -> [arrivals, waits] at the cluster's barrier

    def run(self) -> None:
        threads: list[tuple[Steps, list[Ready | None]]] = []
        for block in self.blocks:
            threads += [(self.warp(block, w), [None]) for w in range(self.ring.warps + 1)]
        pace = [self.random.choice((0.05, 0.3, 1.0, 3.0)) for _ in threads]
        prompt = self.random.choice((0.08, 0.5, 0.9))  # how soon messages arrive
        live = list(range(len(threads)))
        while live or self.messages:
            ready = [i for i in live if (wait := threads[i][1][0]) is None or wait()]
            if not ready and not self.messages:
                raise Fault("deadlock")
            if self.messages and (not ready or self.random.random() < prompt):
                self.messages.pop(self.random.randrange(len(self.messages)))()
                continue
            i = self.random.choices(ready, [pace[i] for i in ready])[0]
            steps, wait_for = threads[i]
            try:
                wait_for[0] = next(steps)
            except StopIteration:
                live.remove(i)

    # ------------------------------------------------------------------------------------------------- cluster barrier

    def arrive(self, warp: tuple[int, int]) -> None:
        turn = self.turns.setdefault(warp, [0, 0])
        if turn[0] != turn[1]:
            raise Fault("a warp arrives at the cluster's barrier twice without waiting")
        turn[0] += 1
        self.arrived += 1
        if self.arrived == len(self.blocks) * (self.ring.warps + 1):
            self.arrived, self.phase = 0, self.phase + 1

    def wait(self, warp: tuple[int, int]) -> Steps:
        turn = self.turns.get(warp, [0, 0])
        if turn[0] != turn[1] + 1:
            raise Fault("a warp waits at the cluster's barrier without having arrived")
        yield lambda: self.phase > turn[1]
        turn[1] += 1

    # ---------------------------------------------------------------------------------------------------------- copies

    def load_w(self, block: Block, stage: int) -> None:
        def deliver() -> None:
            block.must_live("W")
            block.may_fill("W", stage, self.ring.stages)
            block.w[stage % self.ring.stages] = stage
            block.full[stage % self.ring.stages].complete(W_BYTES)

        self.messages.append(deliver)

    def load_x(self, block: Block, stage: int) -> None:
        r = self.ring
        for member in range(r.xcast):

            def deliver(to: Block = self.blocks[block.rank + member * r.ksplit]) -> None:
                to.must_live("x")
                to.may_fill("x", stage, r.xstages)
                if to.full[stage % r.stages].phase != stage // r.stages:
                    raise Fault(f"x of stage {stage} completes another phase")
                to.x[stage % r.xstages][block.member] = stage
                to.full[stage % r.stages].complete(X_BYTES)

            self.messages.append(deliver)

    def release(self, block: Block, stage: int, warp: int) -> None:
        r = self.ring
        block.released.setdefault(stage, set()).add(warp)
        for member in range(r.xcast):

            def deliver(to: Block = self.blocks[block.rank + member * r.ksplit]) -> None:
                to.must_live("a release")
                if to.empty[stage % r.stages].phase != stage // r.stages:
                    raise Fault(f"a release of stage {stage} counts in another phase")
                to.empty[stage % r.stages].arrive()

            if r.xcast == 1:
                deliver()
            else:
                self.messages.append(deliver)

    def send(self, block: Block) -> None:
        for owner in range(self.ring.ksplit):

            def deliver(to: Block = self.blocks[block.member * self.ring.ksplit + owner]) -> None:
                to.must_live("a slab")
                if not block.running:
                    raise Fault("a slab's source has ended")
                if len(to.released) < self.ring.nst:
                    raise Fault("a slab overwrites a ring that is in use")
                to.received.add(block.rank)
                to.exchange.complete(1)

            if owner != block.rank:
                self.messages.append(deliver)

    # ----------------------------------------------------------------------------------------------------------- warps

    def warp(self, block: Block, warp: int) -> Steps:
        r, me = self.ring, (block.place, warp)
        if warp == 0:
            block.started = True
        if r.xcast > 1:
            self.arrive(me)
        block.at_barrier[0] += 1
        yield lambda: block.at_barrier[0] > r.warps
        if warp == 0 and r.ksplit > 1:
            block.exchange.arrive(expect=r.ksplit - 1)
        yield from self.produce(block, me) if warp == r.warps else self.consume(block, me)
        if r.ksplit > 1:
            self.arrive(me)
        block.at_barrier[1] += 1
        yield lambda: block.at_barrier[1] > r.warps
        block.drained = True
        yield None
        if r.ksplit > 1:
            yield from self.wait(me)
            if warp == 0:
                self.send(block)
            yield lambda: block.exchange.passed(0)
            if len(block.received) != r.ksplit - 1:
                raise Fault("the exchange is over before every slab is here")
            self.arrive(me)
        if r.xcast > 1 and warp == r.warps and "tail" not in self.without:
            for slot in range(r.stages):
                uses = -(-(r.nst - slot) // r.stages)
                yield lambda slot=slot, uses=uses: block.empty[slot].passed((uses - 1) % 2)  # type: ignore[misc]
                if block.empty[slot].phase != uses:
                    raise Fault("the tail passes before the last release")
        if r.ksplit > 1:
            yield from self.wait(me)
        block.running -= 1

    def produce(self, block: Block, me: tuple[int, int]) -> Steps:
        r = self.ring
        expected = W_BYTES + r.xcast * X_BYTES
        for i in range(r.stages):
            block.full[i].arrive(expected)
            self.load_w(block, i)
            yield None
        if r.xcast > 1:
            if "cluster wait" in self.without:
                self.turns[me][1] += 1
            else:
                yield from self.wait(me)
        for i in range(r.xstages):
            self.load_x(block, i)
            yield None
        for j in range(r.nst - r.xstages):
            slot = j % r.stages
            if "empty wait" not in self.without:
                yield lambda slot=slot, j=j: block.empty[slot].passed((j // r.stages) % 2)  # type: ignore[misc]
                if block.empty[slot].phase != j // r.stages + 1:
                    raise Fault("the producer passes in another phase")
            more = j < r.nst - r.stages
            if more:
                block.full[slot].arrive(expected)
                yield None
            self.load_x(block, j + r.xstages)
            yield None
            if more:
                self.load_w(block, j + r.stages)
                yield None

    def consume(self, block: Block, me: tuple[int, int]) -> Steps:
        r, warp = self.ring, me[1]
        if r.xcast > 1:
            yield from self.wait(me)
        for i in range(r.nst):
            yield lambda i=i: block.full[i % r.stages].passed((i // r.stages) % 2)  # type: ignore[misc]
            pieces = dict.fromkeys(range(r.xcast), i)
            if block.w[i % r.stages] != i or block.x[i % r.xstages] != pieces:
                raise Fault(f"stage {i} is read and is not there")
            block.reading.append(i)
            yield None
            done = i - 1 if r.late else i
            if "read before release" in self.without and done >= 0:
                self.release(block, done, warp)
                yield None
                block.reading.remove(done)
            elif done >= 0:
                block.reading.remove(done)
                self.release(block, done, warp)
            yield None
        if r.late:
            block.reading.remove(r.nst - 1)
            if r.xcast > 1 and "last release" not in self.without:
                self.release(block, r.nst - 1, warp)
            else:
                block.released.setdefault(r.nst - 1, set()).add(warp)
