"""The declared schedule: what is guaranteed complete when a kernel starts, and when its wait returns.

Facts used (PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch):

1. a dependent may start once every block of its predecessor has launched dependents or exited;
2. the wait returns when the predecessor has completed and its writes are visible;
3. a grid that waits completes only after its predecessor did. A grid that never waits may complete first, so whatever
   comes behind it has lost the guarantee (the "N+2" hazard).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fasttrack.audit.findings import Finding
from fasttrack.target import OTHER_LAUNCH, KernelContract, KernelParameter


@dataclass
class Step:
    """One launch. ``start`` / ``after_wait`` / ``done``: positions complete when it starts, waited, completed."""

    position: int
    contract: KernelContract
    start: frozenset[int] = frozenset()
    after_wait: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    early_triggers: list[int] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return self.contract.pdl and self.contract.wait != "none"


def simulate(order: Sequence[KernelContract]) -> list[Step]:
    """Guarantees along a chain of launches on one stream."""
    steps: list[Step] = []
    for i, contract in enumerate(order):
        step = Step(i, contract)
        if not contract.pdl:
            step.start = step.after_wait = frozenset(range(i))
        elif steps:
            before = steps[-1]
            trigger = before.contract.trigger
            passed = trigger != "entry" or not before.contract.pdl  # its blocks are behind their own wait
            step.start = before.after_wait if passed else before.start
            step.after_wait = step.start | before.done if step.waits else step.start
        step.done = step.after_wait | {i}
        steps.append(step)
    return steps


def check(
    schedules: Mapping[str, Sequence[str]],
    contracts: Mapping[str, KernelContract],
    stores_after_trigger: Mapping[tuple[str, str], tuple[str, int, str]] | None = None,
    file: str = "",
) -> list[Finding]:
    """Findings of every schedule. ``stores_after_trigger``: (contract, buffer) -> (file, line, instruction) of a store
    that can run after the kernel launched its dependents, from the compiled code."""
    out: list[Finding] = []
    contracts = {**contracts, OTHER_LAUNCH: KernelContract(OTHER_LAUNCH, (), pdl=False, wait="none", trigger="none")}
    for name, order in schedules.items():
        missing = [k for k in order if k not in contracts]
        if missing:
            out.append(
                _finding("contract-mismatch", f"schedule {name}: no contract for {missing[0]}", missing[0], name, file)
            )
            continue
        # twice: the first kernel of a layer follows the last one of the layer before
        chain = simulate([contracts[k] for k in (*order, *order)])
        for step in chain:
            out += _reads(name, chain, step, stores_after_trigger or {}, file)
            out += _writes(name, chain, step, file)
    unique = {(f.rule, f.kernel, f.parameter, f.variant, f.message): f for f in out}
    return list(unique.values())


def buffer_of(p: KernelParameter) -> str:
    return p.buffer or p.name


def _writes_buffer(c: KernelContract, buffer: str) -> bool:
    return any(buffer_of(p) == buffer and p.role in ("output", "scratch", "state") for p in c.parameters)


def _last_writer(chain: list[Step], before: int, buffer: str) -> int | None:
    return next((j for j in range(before - 1, -1, -1) if _writes_buffer(chain[j].contract, buffer)), None)


def _reads(
    name: str,
    chain: list[Step],
    step: Step,
    late_stores: Mapping[tuple[str, str], tuple[str, int, str]],
    file: str,
) -> list[Finding]:
    out = []
    c = step.contract
    for p in c.parameters:
        if p.role not in ("activation", "scratch"):
            continue
        early = p.early or (c.pdl and c.wait == "none")
        writer = _last_writer(chain, step.position, buffer_of(p))
        if writer is None:
            half = len(chain) // 2
            if early and step.position >= half:
                text = f"schedule {name}: {c.kernel} reads {p.name} before its wait, and no kernel is known to write it"
                out.append(_finding("unlinked-early-read", text, c.kernel, name, file, p))
            continue
        complete = step.start if early else step.after_wait
        if writer in complete:
            continue
        w = chain[writer].contract
        culprits = _culprits(chain, writer, step.position)
        because = f"; {', '.join(culprits)} trigger before their own wait or never wait" if culprits else ""
        when = "before its wait" if early else "after its wait"
        text = (
            f"schedule {name}: {c.kernel} reads {p.name} {when}, but {w.kernel} that writes it may still run{because}"
        )
        out.append(_finding("exposed-dependent", text, c.kernel, name, file, p))
        place = late_stores.get((w.kernel, buffer_of(p)))
        if place is not None and early:
            text = f"stores {buffer_of(p)} after launching dependents; {c.kernel} reads it before its wait"
            f = _finding(
                "store-after-trigger",
                f"schedule {name}: {text}",
                w.kernel,
                name,
                place[0],
                next(q for q in w.parameters if buffer_of(q) == buffer_of(p)),
            )
            out.append(Finding(**{**vars(f), "line": place[1], "instruction": place[2]}))
    return out


def _writes(name: str, chain: list[Step], step: Step, file: str) -> list[Finding]:
    """A kernel must not overwrite what an earlier one may still read or write."""
    out = []
    c = step.contract
    for p in c.parameters:
        if p.role not in ("output", "scratch"):
            continue
        for j in range(step.position):
            other = chain[j].contract
            touches = any(
                buffer_of(q) == buffer_of(p) and q.role not in ("weight", "scalar", "mailbox") for q in other.parameters
            )
            if touches and j not in step.after_wait:
                culprits = _culprits(chain, j, step.position)
                because = f"; {', '.join(culprits)} trigger before their own wait or never wait" if culprits else ""
                text = f"schedule {name}: {c.kernel} writes {p.name} while {other.kernel} may still use it{because}"
                out.append(_finding("exposed-dependent", text, c.kernel, name, file, p))
                break
    return out


def _culprits(chain: list[Step], lo: int, hi: int) -> list[str]:
    """Kernels from ``lo`` up to ``hi`` that lose the guarantee: early triggers and missing waits."""
    out = []
    for step in chain[lo : hi + 1]:
        c = step.contract
        lost = c.pdl and (c.wait == "none" or (c.trigger == "entry" and step.position < hi))
        if lost and c.kernel not in out:
            out.append(c.kernel)
    return out


def _finding(
    rule: str, message: str, kernel: str, schedule: str, file: str, parameter: KernelParameter | None = None
) -> Finding:
    return Finding(
        rule,
        message,
        kernel,
        f"schedule {schedule}",
        "",
        "schedule",
        file,
        0,
        parameter=parameter.name if parameter else "",
        role=parameter.role if parameter else "",
        contract=kernel,
    )
