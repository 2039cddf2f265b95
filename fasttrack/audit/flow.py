"""Control flow and definitions: basic blocks, loops, reaching definitions. Sets of definitions are Python integers."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from fasttrack.audit.ir import Function


class Flow:
    """Control-flow graph of a function. Block ``b`` holds instructions ``[starts[b], ends[b])``."""

    def __init__(self, function: Function) -> None:
        self.function = function
        code = function.instructions
        leaders = {0}
        for i, ins in enumerate(code):
            if ins.ends or ins.targets:
                leaders.update(ins.targets)
                leaders.add(i + 1)
        self.starts = sorted(x for x in leaders if x < len(code))
        self.ends = [*self.starts[1:], len(code)]
        self.block_of = [0] * len(code)
        for b, (lo, hi) in enumerate(zip(self.starts, self.ends, strict=True)):
            for i in range(lo, hi):
                self.block_of[i] = b
        self.successors: list[list[int]] = [[] for _ in self.starts]
        self.predecessors: list[list[int]] = [[] for _ in self.starts]
        for b, hi in enumerate(self.ends):
            last = code[hi - 1]
            nxt = [self.block_of[t] for t in last.targets]
            if (not last.ends or last.guard is not None) and hi < len(code):
                nxt.append(b + 1)
            for t in dict.fromkeys(nxt):
                self.successors[b].append(t)
                self.predecessors[t].append(b)

    @cached_property
    def order(self) -> list[int]:
        """Reachable blocks in reverse post-order."""
        seen, out, stack = {0}, [], [(0, iter(self.successors[0]))]
        while stack:
            b, it = stack[-1]
            for t in it:
                if t not in seen:
                    seen.add(t)
                    stack.append((t, iter(self.successors[t])))
                    break
            else:
                out.append(b)
                stack.pop()
        return out[::-1]

    @cached_property
    def reachable(self) -> frozenset[int]:
        return frozenset(self.order)

    @cached_property
    def dominators(self) -> dict[int, int]:
        """Immediate dominator of every reachable block; the entry's is itself."""
        return _dominators(self.order, self.predecessors)

    def dominates(self, a: int, b: int) -> bool:
        """Block ``a`` is on every path from the entry to block ``b``."""
        while b != a:
            up = self.dominators.get(b, b)
            if up == b:
                return False
            b = up
        return True

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, innermost first; loops with one header are merged. Irreducible cycles count by header."""
        place = {b: i for i, b in enumerate(self.order)}
        bodies: dict[int, set[int]] = {}
        for b in self.order:
            for t in self.successors[b]:
                if place[t] <= place[b]:  # a retreating edge
                    body = bodies.setdefault(t, {t})
                    stack = [b]
                    while stack:
                        x = stack.pop()
                        if x not in body and place.get(x, -1) >= place[t]:
                            body.add(x)
                            stack.extend(p for p in self.predecessors[x] if p in place)
        found = [Loop(self, header, frozenset(body)) for header, body in bodies.items()]
        return sorted(found, key=lambda loop: len(loop.blocks))

    def after(self, start: int) -> set[int]:
        """Instructions that can run after instruction ``start`` in the same thread, ``start`` itself if in a loop."""
        b = self.block_of[start]
        out = set(range(start + 1, self.ends[b]))
        seen: set[int] = set()
        stack = list(self.successors[b])
        while stack:
            x = stack.pop()
            if x not in seen:
                seen.add(x)
                out.update(range(self.starts[x], self.ends[x]))
                stack.extend(self.successors[x])
        return out

    # --- definitions -------------------------------------------------------------------------------------------

    @cached_property
    def definitions(self) -> dict[str, list[int]]:
        """Register -> indices of the instructions that write it, in program order."""
        out: dict[str, list[int]] = {}
        for ins in self.function.instructions:
            for d in ins.defs:
                out.setdefault(d, []).append(ins.index)
        return out

    @cached_property
    def _reaching(self) -> tuple[dict[tuple[str, int], int], dict[str, int], list[int], list[tuple[str, int]]]:
        """Bit of each definition of a register with several, mask per register, live-in set per block."""
        bits: dict[tuple[str, int], int] = {}
        names: list[tuple[str, int]] = []
        masks: dict[str, int] = {}
        for reg, places in self.definitions.items():
            if len(places) > 1:
                for i in places:
                    bits[reg, i] = len(names)
                    names.append((reg, i))
                masks[reg] = sum(1 << bits[reg, i] for i in places)
        n = len(self.starts)
        gen, keep = [0] * n, [-1] * n
        code = self.function.instructions
        for b in range(n):
            for i in range(self.starts[b], self.ends[b]):
                for d in code[i].defs:
                    mask = masks.get(d)
                    if mask is None:
                        continue
                    if code[i].guard is None:
                        gen[b] &= ~mask
                        keep[b] &= ~mask
                    gen[b] |= 1 << bits[d, i]
        live = [0] * n
        outs = [0] * n
        work = list(self.order)[::-1]
        queued = set(work)
        while work:
            b = work.pop()
            queued.discard(b)
            value = 0
            for p in self.predecessors[b]:
                value |= outs[p]
            live[b] = value
            new = gen[b] | (value & keep[b])
            if new != outs[b]:
                outs[b] = new
                for t in self.successors[b]:
                    if t not in queued:
                        queued.add(t)
                        work.insert(0, t)
        return bits, masks, live, names

    def defs_of(self, at: int, reg: str) -> list[int]:
        """Definitions of ``reg`` that can reach instruction ``at``; empty: never written."""
        places = self.definitions.get(reg)
        if not places:
            return []
        if len(places) == 1:
            return places
        key = (at, reg)
        hit = self._cache.get(key)
        if hit is None:
            hit = self._cache[key] = self._defs_of(at, reg, places)
        return hit

    @cached_property
    def _cache(self) -> dict[tuple[int, str], list[int]]:
        return {}

    def _unchanged(self, reg: str, first: int, last: int) -> bool:
        """Is the register not written in ``[first, last)`` of one block?"""
        places = self.definitions.get(reg, [])
        k = bisect_left(places, first)
        return k >= len(places) or places[k] >= last

    def _defs_of(self, at: int, reg: str, places: list[int]) -> list[int]:
        b = self.block_of[at]
        code = self.function.instructions
        found: list[int] = []
        held = {code[at].guard} - {None}  # under these guards an earlier definition does not come through
        for k in range(bisect_left(places, at) - 1, -1, -1):
            i = places[k]
            if i < self.starts[b]:
                break
            found.append(i)
            guard = code[i].guard
            if guard is None:
                return found
            if self._unchanged(guard[0], i, at):
                if guard in held:
                    return found
                held.add((guard[0], not guard[1]))
        _, masks, live, names = self._reaching
        value = live[b] & masks[reg]
        while value:
            low = value & -value
            i = names[low.bit_length() - 1][1]
            if i not in found:
                found.append(i)
            value ^= low
        return found


class Loop:
    """A natural loop: ``header`` block and all its ``blocks``."""

    def __init__(self, flow: Flow, header: int, blocks: frozenset[int]) -> None:
        self.flow, self.header, self.blocks = flow, header, blocks

    def __contains__(self, index: int) -> bool:
        """Is instruction ``index`` in the loop?"""
        return index >= 0 and self.flow.block_of[index] in self.blocks

    @property
    def instructions(self) -> list[int]:
        flow = self.flow
        return [i for b in sorted(self.blocks) for i in range(flow.starts[b], flow.ends[b])]

    @cached_property
    def exits(self) -> list[int]:
        """Indices of the instructions that can leave the loop."""
        flow = self.flow
        return [
            flow.ends[b] - 1
            for b in sorted(self.blocks)
            if any(t not in self.blocks for t in flow.successors[b]) or not flow.successors[b]
        ]


def _dominators(order: list[int], predecessors: list[list[int]]) -> dict[int, int]:
    """Cooper, Harvey and Kennedy's iterative algorithm over a reverse post-order."""
    place = {b: i for i, b in enumerate(order)}
    up = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new: int | None = None
            for p in predecessors[b]:
                if p not in up:
                    continue
                if new is None:
                    new = p
                    continue
                x, y = p, new
                while x != y:
                    while place[x] > place[y]:
                        x = up[x]
                    while place[y] > place[x]:
                        y = up[y]
                new = x
            if new is not None and up.get(b) != new:
                up[b] = new
                changed = True
    return up
