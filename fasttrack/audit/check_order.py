"""Rules about the dependency wait, the launch of dependents and non-coherent loads."""

from __future__ import annotations

from fasttrack.audit.ir import Instruction, Sync
from fasttrack.audit.subject import Site, Subject

_WRITES = ("store", "reduction", "atomic")


def check(subject: Subject) -> None:
    if subject.uses_pdl:
        _early_accesses(subject)
        _missing_wait(subject)
    _triggers(subject)
    _nc_loads(subject)
    _shape(subject)


def _early_accesses(s: Subject) -> None:
    if not s.order.waits and (s.contract is None or s.contract.wait != "none"):
        return  # reported once, as missing-wait, instead of for every access
    for site in s.sites:
        if not s.order.early(site.index):
            continue
        writes = site.access.what in _WRITES and site.access.what != "atomic"
        for role in site.roles:
            if role.early or role.role == "scalar":
                continue
            what = _name(site)
            if writes:
                if role.role == "mailbox" and s.contract is not None and s.contract.wait == "none":
                    continue
                message = f"{what} to {role.parameter} ({role.role}) can run before griddepcontrol.wait"
                s.report("early-store", message, site.instruction, role, stronger=role.sure)
            else:
                via = " through a pointer loaded from it" if site.indirect else ""
                unknown = "" if role.sure else "; no contract says that it is static"
                message = f"{what} of {role.parameter} ({role.role}){via} can run before griddepcontrol.wait{unknown}"
                s.report("early-load", message, site.instruction, role)


def _name(site: Site) -> str:
    a = site.access
    kind = {"load": "load", "store": "store", "atomic": "atomic", "reduction": "reduction", "prefetch": "L1 prefetch"}[
        a.what
    ]
    if a.space == "tensor":
        return f"TMA {kind}"
    return f"bulk {kind}" if a.proxy == "async" else f"{'non-coherent ' if a.order == 'nc' else ''}{kind}"


def _missing_wait(s: Subject) -> None:
    if s.contract is not None and s.contract.wait == "none":
        return
    if not s.order.waits:
        why = "its contract declares programmatic dependent launch" if s.contract else "it launches dependents"
        s.report("missing-wait", f"no path contains griddepcontrol.wait, but {why}", _first_trigger(s))
        return
    for i in s.order.skipped_exits[:1]:
        message = "a path that depends on kernel arguments only ends the kernel without griddepcontrol.wait"
        s.report("missing-wait", message, s.code[i])


def _first_trigger(s: Subject) -> Instruction | None:
    return next((i for i in s.code if i.sync is Sync.TRIGGER), None)


def _triggers(s: Subject) -> None:
    c = s.contract
    early = [t for t in s.order.triggers if s.order.early(t)]
    if c is None:
        if early and s.order.waits:
            message = "launches dependents before its own wait; whatever they read before theirs is exposed"
            s.report("early-trigger", message, s.code[early[0]], stronger=False)
        return
    if not s.order.triggers:
        return
    first = s.code[(early or s.order.triggers)[0]]
    if not c.pdl or c.trigger == "none":
        s.report("early-trigger", f"launches dependents, but the contract declares trigger: {c.trigger}", first)
    elif c.trigger == "after_wait" and early and c.wait != "none":
        s.report("early-trigger", "can launch dependents before its own wait; the contract declares after_wait", first)
    elif c.trigger == "end":
        for site in s.sites:
            if site.access.what in _WRITES and site.index in s.order.after_trigger:
                role = site.roles[0] if site.roles else None
                s.report(
                    "early-trigger",
                    "stores after launching dependents; the contract declares end",
                    site.instruction,
                    role,
                )
                break


def _nc_loads(s: Subject) -> None:
    """``ld.global.nc`` of anything but static weights, where another kernel or rank can write meanwhile."""
    written = {r.parameter for site in s.sites if site.access.what in _WRITES for r in site.roles}
    for site in s.sites:
        if site.access.order != "nc":
            continue
        for role in site.roles:
            if role.role in ("weight", "scalar"):
                continue
            own = role.parameter in written
            if own or s.uses_pdl or role.role == "mailbox":
                why = " and the kernel writes it itself" if own else ""
                message = f"non-coherent load of {role.parameter} ({role.role}){why}"
                s.report("nc-load", message, site.instruction, role, stronger=role.sure or own)


def _shape(s: Subject) -> None:
    """The contract's parameters against the kernel's."""
    if s.contract is None or not s.contract.parameters:
        return
    have, want = len(s.function.parameters), len(s.contract.parameters)
    if have != want:
        s.report("contract-mismatch", f"the kernel has {have} parameters, its contract declares {want}")
        return
    for p, declared in zip(s.function.parameters, s.contract.parameters, strict=True):
        if p.size < 8 and declared.role != "scalar":
            text = f"parameter {p.index} has {p.size} bytes; the contract says {declared.name} ({declared.role})"
            s.report("contract-mismatch", text)
            return
    if s.contract.wait == "none" and s.order.waits:
        s.report("contract-mismatch", "the kernel waits, its contract declares wait: none", s.code[s.order.waits[0]])
    for site in s.sites:
        for o in site.origins:
            if o.kind != "param" or o.index >= want or s.contract.parameters[o.index].role != "scalar":
                continue
            if len({x.index for x in site.origins}) == 1:
                role = s.roles.of(o)
                message = f"{_name(site)} through {role.parameter}, which the contract declares a scalar"
                s.report("contract-mismatch", message, site.instruction, role)
    if s.function.stage != "ptx":
        return
    stored = {r.parameter for site in s.sites if site.access.what in _WRITES for r in site.roles if r.sure}
    for declared in s.contract.parameters:
        name = declared.name
        if declared.role == "weight" and name in stored:
            site = next(x for x in s.sites if x.access.what in _WRITES and any(r.parameter == name for r in x.roles))
            message = f"{_name(site)} to {name}, which the contract declares static"
            s.report("contract-mismatch", message, site.instruction, s.roles.resolve(site.origins)[0])
