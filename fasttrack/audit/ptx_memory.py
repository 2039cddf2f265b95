"""What each PTX instruction does to memory and to ordering. One table per instruction family."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrack.audit import ptx_text
from fasttrack.audit.ir import Access, Address, Leaf, Operand, Sync
from fasttrack.audit.ptx_text import Statement

_SPACES = {"global", "shared", "local", "const", "param"}
_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "nc"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}


def address_of(parts: Sequence[Operand]) -> Address:
    """Address operand ``[base+offset]``; coordinates of a tensor access follow the base and are dropped."""
    terms = tuple(a for a in parts if not isinstance(a, int))
    return Address(terms[:1], sum(a for a in parts if isinstance(a, int)))


def sync_of(s: Statement, parts: list[list[Operand]]) -> tuple[Sync, Address | None]:
    """Ordering role of a statement and, for mbarrier operations, the barrier's address."""
    op = s.opcode
    words = op.split(".")
    base = words[0]
    if base == "griddepcontrol":
        return (Sync.WAIT if "wait" in words else Sync.TRIGGER), None
    if base in ("bar", "barrier"):
        if "cluster" in words:
            return (Sync.BARRIER if "wait" in words else Sync.BARRIER_ARRIVE), None
        if "warp" in words:
            return Sync.NONE, None
        if "arrive" in words:
            return Sync.BARRIER_ARRIVE, None
        count = len(s.operands) - (2 if "red" in words else 0)
        return (Sync.PART_BARRIER if count > 1 else Sync.BARRIER), None
    if base == "fence" and "proxy" in words and any(w.startswith("async") for w in words):
        return Sync.FENCE_ASYNC, None
    if base == "mbarrier" or op.startswith("cp.async.mbarrier"):
        spot = next((p for o, p in zip(s.operands, parts, strict=True) if o.startswith("[")), None)
        where = address_of(spot) if spot else None
        if "init" in words:
            return Sync.MBAR_INIT, where
        if "expect_tx" in words or "complete_tx" in words:
            return Sync.MBAR_EXPECT, where
        if "try_wait" in words or "test_wait" in words:
            return Sync.MBAR_WAIT, where
        if any(w.startswith("arrive") for w in words):
            return Sync.MBAR_ARRIVE, where
    return Sync.NONE, None


def accesses_of(s: Statement, parts: list[list[Operand]]) -> tuple[Access, ...]:
    """The memory accesses of a statement, in program order."""
    words = s.opcode.replace("::", "_").split(".")
    base = words[0]
    spots = [i for i, o in enumerate(s.operands) if o.startswith("[")]
    if base == "cp":
        return _copies(s, words, parts, spots)
    if base in ("prefetch", "prefetchu", "discard", "applypriority"):
        if not spots:
            return ()
        level = "L1" if "L1" in words else "L2"
        space = "tensor" if "tensormap" in words else _space(words, parts[spots[0]])
        return (Access("prefetch", space, address_of(parts[spots[0]]), order=level),)
    if not spots:
        return ()
    where = address_of(parts[spots[0]])
    width = ptx_text.type_bytes(words[-1])
    space, (order, scope) = _space(words, parts[spots[0]]), _strength(words)
    if base in ("ld", "ldu"):
        if space == "param":
            return ()
        if base == "ldu":
            order = "nc"
        return (Access("load", space, where, width, order, scope),)
    if base == "st":
        if space == "param":
            return ()
        if "async" in words or "bulk" in words:
            return (Access("store", "shared", where, width, "weak", scope, "async"),)
        return (Access("store", space, where, width, order, scope, values=_after(parts, spots[0])),)
    if base in ("atom", "red"):
        if "async" in words:
            return (Access("reduction", "shared", where, width, "relaxed", scope, "async"),)
        what = "atomic" if base == "atom" else "reduction"
        order = order if order != "weak" else "relaxed"
        return (Access(what, space, where, width, order, scope or "gpu", values=_after(parts, spots[0])),)
    if base == "multimem":
        kind = {"ld_reduce": "load", "st": "store", "red": "reduction"}.get(words[1])
        if kind is None:
            return ()
        return (Access(kind, "global", where, width, order, scope, values=_after(parts, spots[0])),)
    if base in ("ldmatrix", "wmma") and "store" not in words:
        return (Access("load", space if space != "generic" or base == "wmma" else "shared", where, width),)
    if base == "wmma":
        return (Access("store", space, where, width),)
    if base == "stmatrix":
        return (Access("store", "shared", where, width),)
    if base in ("tex", "tld4"):
        return (Access("load", "global", where, 4, "nc"),)
    if base in ("suld", "sust", "sured"):
        return (Access({"suld": "load", "sust": "store"}.get(base, "reduction"), "global", where, 4),)
    if base == "tensormap":
        return (Access("store", space, where, 8),)
    return ()


def _copies(s: Statement, words: list[str], parts: list[list[Operand]], spots: list[int]) -> tuple[Access, ...]:
    """``cp.async``, ``cp.async.bulk[.tensor]`` and ``cp.reduce.async.bulk[.tensor]``."""
    if not spots or "mbarrier" in words:
        return ()
    joined = ".".join(words)
    tensor = "tensor" in words
    if "prefetch" in words:
        where = parts[spots[0]]
        return (Access("prefetch", "tensor" if tensor else "global", address_of(where), order="L2"),)
    if "bulk" not in words:  # cp.async.ca/cg.shared.global
        return (
            Access("load", "global", address_of(parts[spots[1]]), 0),
            Access("store", "shared", address_of(parts[spots[0]]), 0),
        )
    first, second = parts[spots[0]], parts[spots[1]]
    barrier = address_of(parts[spots[2]]) if len(spots) > 2 else None
    if ".global.shared_cta" in joined:  # shared to global
        what = "reduction" if "reduce" in words else "store"
        place = address_of(first[:1] if tensor else first)
        return (
            Access("load", "shared", address_of(second), proxy="async"),
            Access(what, "tensor" if tensor else "global", place, proxy="async"),
        )
    if ".shared_cta" in joined and ".global" not in joined:  # shared to another block's shared memory
        return (
            Access("load", "shared", address_of(second), proxy="async"),
            Access("store", "shared", address_of(first), proxy="async", barrier=barrier),
        )
    place = address_of(second[:1] if tensor else second)
    return (
        Access("load", "tensor" if tensor else "global", place, proxy="async"),
        Access("store", "shared", address_of(first), proxy="async", barrier=barrier),
    )


def _space(words: list[str], parts: Sequence[Operand]) -> str:
    for w in words[1:]:
        plain = w.split("_", 1)[0]
        if plain in _SPACES:
            return plain
    if parts and isinstance(parts[0], Leaf) and parts[0].kind == "local":
        return "local"
    return "generic"


def _strength(words: list[str]) -> tuple[str, str]:
    order = next((w for w in words if w in _ORDERS), "weak")
    scope = next((w for w in words[1:] if w in _SCOPES), "")
    if "cv" in words:  # "don't cache and fetch again": what compilers emit for volatile without saying so
        order = "volatile"
    if order == "volatile":
        scope = "sys"
    return order, scope


def _after(parts: list[list[Operand]], spot: int) -> tuple[Operand, ...]:
    return tuple(a for p in parts[spot + 1 :] for a in p)
