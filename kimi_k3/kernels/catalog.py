"""What an audit of the kernels needs: every prepared variant as compiled code, and the launch order of a layer.

No GPU is needed; compiled code is cached on disk (:mod:`kimi_k3.kernels.compile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.decode.schedule import ATTENTION, FEED_FORWARD, layer_ops
from kimi_k3.kernels.compile import MODULES, compile_all, load_cases
from kimi_k3.kernels.contract import Contract

#: A launch of an op that no kernel here serves. It is made without programmatic dependent launch.
OTHER = "*"

#: op of the schedule -> name of its projection in ``shapes``, by kind of attention
PROJECTIONS = {
    "in_proj": {"kda": "kda_in_proj", "mla": "mla_in_proj"},
    "oproj_publish": {"kda": "o_proj", "mla": "o_proj"},
    "moe_front": {"kda": "moe_front", "mla": "moe_front"},
    "dense_gate_up": {"kda": "dense_gate_up", "mla": "dense_gate_up"},
    "dense_down_push": {"kda": "dense_down", "mla": "dense_down"},
}


class CompileError(Exception):
    """Kernels that do not compile; one line each."""


@dataclass(frozen=True)
class Variant:
    """``name``: module and case. ``source``: the kernel's file, relative to the repository root."""

    name: str
    arch: str
    ptx: str
    cubin: bytes
    source: str
    contract: Contract


def variants(arch: str, jobs: int = 0, cache: Path | None = None, kinds: bool = False) -> Iterator[Variant]:
    """Every prepared variant for ``arch``, in ``jobs`` processes (0: one per core); of equal code only the first.

    ``kinds``: one variant of every kind of code. Raises :class:`CompileError` before the first variant.
    """
    results = compile_all(MODULES, (arch,), cache, jobs, kinds=kinds)
    broken = [f"{r.module}/{r.case} for {r.arch}: {r.error}" for r in results if r.error]
    if broken:
        raise CompileError("\n".join(broken))
    seen: set[bytes] = set()
    for r in results:
        code = Path(r.cubin).read_bytes()
        if code in seen:
            continue
        seen.add(code)
        ptx = Path(r.ptx).read_text(encoding="utf-8")
        contract = load_cases(r.module, arch)[r.case].contract
        yield Variant(f"{r.module}/{r.case}", arch, ptx, code, f"kimi_k3/kernels/{r.module}.py", contract)


def schedules() -> dict[str, tuple[str, ...]]:
    """Launches of a layer on the main stream, as contract kernels, for every kind of layer, shard and batch.

    Equal orders appear once, under the smallest of their batches. What lies on other streams is left out.
    """
    from kimi_k3.kernels import shapes

    found: dict[tuple[str, ...], str] = {}
    for attention in ATTENTION:
        for feed_forward in FEED_FORWARD:
            for tp in (8, 16):
                for m in shapes.PREPARED_ROWS:
                    order = tuple(_collapsed(attention, feed_forward, tp, m))
                    found.setdefault(order, f"{attention}-{feed_forward}-tp{tp}-m{m}")
    return {name: order for order, name in found.items()}


def _collapsed(attention: str, feed_forward: str, tp: int, m: int) -> Iterator[str]:
    """One layer; neighbouring launches without a kernel count as one."""
    last = ""
    for op, stream in layer_ops(attention, feed_forward):
        kernel = contract_of(op, attention, tp, m) if stream == "main" else last
        if kernel != OTHER or last != OTHER:
            last = kernel
            if stream == "main":
                yield kernel


def contract_of(op: str, attention: str, tp: int, m: int) -> str:
    """The kernel that serves ``op`` of the full model at ``m`` rows, or :data:`OTHER`."""
    from kimi_k3.kernels import attn_res, kda_core, shapes
    from kimi_k3.kernels.stream_projection import ROWS_CONTRACT, TILES_CONTRACT
    from kimi_k3.kernels.stream_projection_settings import setting_for

    if op in PROJECTIONS:
        shape = shapes.shard(shapes.FULL, tp).projections()[PROJECTIONS[op][attention]]
        return (ROWS_CONTRACT if setting_for(shape, m).kind == "rows" else TILES_CONTRACT).kernel
    served = {"attn_res": attn_res.CONTRACT, "kda_core": kda_core.CONTRACT}
    return served[op].kernel if op in served else OTHER
