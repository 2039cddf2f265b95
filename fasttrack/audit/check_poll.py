"""Rules about memory that other ranks or blocks write while the kernel runs: polls and mailboxes.

A *poll* is a loop that can only be left when a load inside it returns something else: the load's address does not
change from turn to turn, and the comparison does not involve a counter of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasttrack.audit.contracts import Role
from fasttrack.audit.flow import Loop
from fasttrack.audit.ir import Leaf, Sync
from fasttrack.audit.subject import Site, Subject
from fasttrack.audit.trace import Affine, may_alias

_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
_TIMERS = ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi")
_READS = ("load", "atomic")


@dataclass
class Poll:
    loop: Loop
    loads: list[Site]
    bounded: bool


def check(subject: Subject) -> None:
    mailboxes = _mailboxes(subject)
    found = polls(subject, mailboxes)
    polled = {s.index for p in found for s in p.loads}
    subject.polled = {r.parameter for p in found for s in p.loads for r in s.roles}
    for p in found:
        _strength(subject, p, mailboxes)
    _collapsed_loops(subject)
    tables = {r.parameter for s in subject.sites if s.indirect for r in s.roles}
    _single_reads(subject, mailboxes - tables, polled)
    _stores(subject, mailboxes, subject.polled)
    _rearms(subject, mailboxes)


def _mailboxes(s: Subject) -> set[str]:
    if s.contract is not None and s.contract.parameters:
        return {p.name for p in s.contract.parameters if p.role == "mailbox"}
    return {r.parameter for site in s.sites for r in site.roles if r.role == "mailbox"}


def polls(s: Subject, mailboxes: set[str]) -> list[Poll]:
    out: list[Poll] = []
    taken: set[int] = set()
    by_index: dict[int, list[Site]] = {}
    for site in s.sites:
        if site.access.what in _READS:
            by_index.setdefault(site.index, []).append(site)
    for loop in s.flow.loops:
        loads: dict[int, Site] = {}
        bounded = False
        for e in loop.exits:
            guard = s.code[e].guard
            if guard is None:
                continue
            for part in _comparisons(s, e, guard[0], loop):
                counted = _counts(s, part, loop)
                bounded |= counted
                for d in part:
                    for site in by_index.get(d, ()):
                        box = any(r.parameter in mailboxes for r in site.roles)
                        fixed = not s.tracer.varies(
                            d, [t for t in site.access.address.terms if isinstance(t, str)], loop
                        )
                        if (fixed and not counted) or (box and fixed):
                            loads[d] = site
        fresh = [site for d, site in loads.items() if d not in taken]
        if fresh:
            taken.update(loads)
            out.append(Poll(loop, fresh, bounded))
    return out


def _comparisons(s: Subject, exit_at: int, guard: str, loop: Loop) -> list[set[int]]:
    """The slices, inside the loop, of every comparison the exit depends on."""
    whole = s.tracer.slice(exit_at, [guard], loop)
    tests = [d for d in whole if s.code[d].op == "compare"]
    leaves = [d for d in tests if not any(x in tests for x in s.tracer.slice(d, s.code[d].registers(), loop) if x != d)]
    if not leaves:
        return [whole] if whole else []
    parts = [s.tracer.slice(d, s.code[d].registers(), loop) | {d} for d in leaves]
    upper = {d for d in tests if d not in leaves}
    parts += [s.tracer.slice(d, s.code[d].registers(), loop) | {d} for d in upper]
    return parts


def _counts(s: Subject, part: set[int], loop: Loop) -> bool:
    """Does the slice hold a counter of the loop or a clock?"""
    for d in part:
        ins = s.code[d]
        if any(isinstance(a, Leaf) and a.kind == "special" and a.name in _TIMERS for a in ins.args):
            return True
        if ins.op in ("add", "sub") and not ins.accesses:
            regs = [a for a in ins.args if isinstance(a, str)]
            if d in s.tracer.slice(d, regs, loop) and len(regs) < 2:
                return True
    return False


def _strength(s: Subject, poll: Poll, mailboxes: set[str]) -> None:
    for site in poll.loads:
        role = _role(site, mailboxes)
        a = site.access
        if a.order not in _STRONG:
            kind = "non-coherent" if a.order == "nc" else "weak"
            message = f"{role.parameter} is polled with a {kind} load"
            s.report("weak-poll", message, site.instruction, role)
        elif role.role == "mailbox" and role.sure and a.scope in ("cta", "cluster", "gpu") and a.what == "load":
            message = f"{role.parameter} is polled at scope {a.scope}, but its writers are other GPUs (needs sys)"
            s.report("weak-poll", message, site.instruction, role)
    if not poll.bounded:
        site = poll.loads[0]
        role = _role(site, mailboxes)
        s.report("unbounded-poll", f"poll of {role.parameter} has no time or trip limit", site.instruction, role)


def _role(site: Site, mailboxes: set[str]) -> Role:
    return next(
        (r for r in site.roles if r.parameter in mailboxes),
        site.roles[0] if site.roles else Role("?", "", False, False),
    )


def _collapsed_loops(s: Subject) -> None:
    """A loop that nothing can leave and that does nothing, entered because of a loaded value."""
    for loop in s.flow.loops:
        body = [s.code[i] for i in loop.instructions]
        if any(i.accesses or i.sync is not Sync.NONE for i in body) or not _endless(s, loop):
            continue
        for at, guard in _conditions(s, loop):
            whole = s.tracer.slice(at, [guard])
            site = next((x for x in s.sites if x.index in whole and x.access.what in _READS), None)
            if site is not None:
                role = site.roles[0] if site.roles else None
                message = "a loop repeats without reading memory again; what it waits for was loaded once, before it"
                s.report("collapsed-poll", message, site.instruction, role)
                return


def _conditions(s: Subject, loop: Loop) -> list[tuple[int, str]]:
    """Conditions the loop is left on, and those it is entered on, as (instruction, predicate)."""
    out = [(e, guard[0]) for e in loop.exits if (guard := s.code[e].guard) is not None]
    for b in s.flow.order:
        if b not in loop.blocks and any(t in loop.blocks for t in s.flow.successors[b]):
            at, decides = _decides(s, b)
            if decides is not None:
                out.append((at, decides))
    return out


def _endless(s: Subject, loop: Loop) -> bool:
    if not loop.exits:
        return True
    for e in loop.exits:  # left only on a condition that cannot change
        guard = s.code[e].guard
        if guard is None or s.tracer.slice(e, [guard[0]], loop):
            return False
    return True


def _decides(s: Subject, b: int) -> tuple[int, str | None]:
    """The nearest branch at or above block ``b`` that has a condition."""
    while True:
        at = s.flow.ends[b] - 1
        guard = s.code[at].guard
        if guard is not None:
            return at, guard[0]
        up = s.flow.dominators.get(b, b)
        if up == b:
            return at, None
        b = up


def lost_in_assembly(ptx: Subject, sass: Subject) -> None:
    """A parameter that PTX polls and SASS reads without any loop: assemblers drop loops that seem to do nothing."""
    looped = {i for loop in sass.flow.loops for i in loop.instructions}
    for name in sorted(ptx.polled - sass.polled):
        reads = [x for x in sass.sites if x.access.what in _READS and any(r.parameter == name for r in x.roles)]
        if reads and not any(x.index in looped for x in reads):
            role = next(r for r in reads[0].roles if r.parameter == name)
            message = f"{name} is polled in a loop in PTX; the assembler kept one load and no loop"
            sass.report("collapsed-poll", message, reads[0].instruction, role)


def _single_reads(s: Subject, mailboxes: set[str], polled: set[int]) -> None:
    for name in sorted(mailboxes):
        reads = [x for x in s.sites if x.access.what in _READS and any(r.parameter == name for r in x.roles)]
        if not reads:
            continue
        role = next(r for r in reads[0].roles if r.parameter == name)
        if role.sure and not any(x.index in polled for x in reads):
            message = f"{name} is read, but no loop waits for it"
            s.report("collapsed-poll", message, reads[0].instruction, role)
            continue
        for x in reads:
            if x.index not in polled and x.access.order not in _STRONG and role.sure:
                kind = "non-coherent" if x.access.order == "nc" else "weak"
                s.report("weak-poll", f"{name} is read with a {kind} load outside its poll", x.instruction, role)


def _stores(s: Subject, mailboxes: set[str], polled: set[str]) -> None:
    for site in s.sites:
        if site.access.what not in ("store", "reduction"):
            continue
        role = next((r for r in site.roles if r.parameter in mailboxes), None)
        if role is None or (role.parameter in polled and _idle(s, site)):
            continue  # a rearming store is local; the end of the kernel publishes it
        a = site.access
        if a.proxy == "async":
            what = "a bulk copy"
        elif a.order not in _STRONG:
            what = f"a {a.order} store"
        elif a.scope != "sys":
            what = f"a store of scope {a.scope or 'unknown'}"
        else:
            continue
        s.report(
            "weak-mailbox-store", f"{role.parameter} is written with {what}; needs relaxed.sys", site.instruction, role
        )


def _idle(s: Subject, site: Site) -> bool:
    """Is the stored value a constant, as an idle word is?"""
    values = site.access.values
    if s.function.stage == "sass":
        values = values[:1]
    return bool(values) and all(not s.tracer.affine(site.index, v).terms for v in values if isinstance(v, str | int))


def _rearms(s: Subject, mailboxes: set[str]) -> None:
    """A rearming store with a later read of the same word."""
    reads: dict[str, list[Site]] = {}
    for site in s.sites:
        if site.access.what in _READS:
            for r in site.roles:
                if r.parameter in mailboxes:
                    reads.setdefault(r.parameter, []).append(site)
    for site in s.sites:
        if site.access.what != "store" or site.indirect or not _idle(s, site):
            continue
        for role in site.roles:
            for read in reads.get(role.parameter, ()):
                if _same_word_later(s, site, read):
                    message = (
                        f"{role.parameter} is set back to idle and read again afterwards (line {read.instruction.line})"
                    )
                    s.report("early-rearm", message, site.instruction, role)
                    break


def _same_word_later(s: Subject, store: Site, read: Site) -> bool:
    a = s.tracer.address_affine(store.index, store.access.address)
    b = s.tracer.address_affine(read.index, read.access.address)
    size = 16  # widest vector access
    if a.terms == b.terms:
        near = abs(a.constant - b.constant) < size
        return near and _path(s, store.index, read.index, _definitions(a), False)
    # another thread's words: only a barrier makes them meet, and turns of a loop use different slots
    return may_alias(a, b) and _path(s, store.index, read.index, set(), True)


def _definitions(form: Affine) -> set[int]:
    out: set[int] = set()
    for atom, _ in form.terms:
        if isinstance(atom, tuple) and atom[0] == "def":
            out.add(atom[1])
        elif isinstance(atom, tuple) and atom[0] == "join":
            out.update(atom[2])
    return out


def _path(s: Subject, start: int, goal: int, blocked: set[int], through_barrier: bool) -> bool:
    """Can ``goal`` run after ``start`` without crossing ``blocked``; or, forwards only, behind a block-wide barrier?"""
    flow = s.flow
    place = {b: i for i, b in enumerate(flow.order)}
    seen: set[tuple[int, bool]] = set()
    stack = [(start + 1, False)]
    while stack:
        i, crossed = stack.pop()
        if i >= len(s.code) or (i, crossed) in seen:
            continue
        seen.add((i, crossed))
        if i == goal and (crossed or not through_barrier):
            return True
        if i in blocked:
            continue
        crossed = crossed or s.code[i].sync is Sync.BARRIER
        b = flow.block_of[i]
        if i + 1 < flow.ends[b]:
            stack.append((i + 1, crossed))
            continue
        for t in flow.successors[b]:
            if through_barrier and place.get(t, 0) <= place.get(b, 0):
                continue
            stack.append((flow.starts[t], crossed))
    return False
