"""Where the time goes inside a launch: when the blocks of a projection reach each phase, in a chain of launches.

    phases.py --case kimi-k3-tp8-o_proj --rows 64 [--set stages=6 --set xcast=1 ...]

The kernel is compiled from a copy of its source into which one thread per role writes %globaltimer (steps of 250 ns on
an H200) to memory that stands in for the FP32 output. Times are microseconds after the last block of the previous
launch was finished: over the blocks, then the median over launches. The stamps cost a few per cent.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kimi_k3.kernels import bench, runtime
from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels import stream_projection_rows as rows_module
from kimi_k3.kernels import stream_projection_tiles as tiles_module
from kimi_k3.kernels.stream_projection_settings import Setting, setting_for

PHASES = (
    "entered",
    "first W asked for",
    "dependency",
    "last W asked for",
    "first stage here",
    "multiplied",
    "finished",
)
CLOCKS = 8  #: words of a block, so that its place is aligned
STAMP = """
from cutlass.cutlass_dsl import dsl_user_op
from kimi_k3.kernels.cute_asm import asm


@dsl_user_op
def stamp(addr, *, loc=None, ip=None):
    code = "{ .reg .b64 t; mov.u64 t, %globaltimer; st.global.b64 [$0], t; }"
    asm(None, [Int64(addr).ir_value(loc=loc, ip=ip)], code, "l", True, loc, ip)


"""


def _mark(phase: int, who: str, indent: int) -> str:
    return f"{' ' * indent}if {who}:\n{' ' * indent}    stamp(clocks + {8 * phase})\n"


def stamped(module: ModuleType) -> str:
    """The module's source with the stamps in it. Raises ValueError when a place is not found exactly once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    lane, first = "tid % 32 == 0", "tid == 0"

    def put(before: str, text: str, after: str) -> None:
        nonlocal source
        if source.count(before + after) != 1:
            raise ValueError(
                f"{module.__name__}: {before + after!r} is there {source.count(before + after)} times, not once"
            )
        source = source.replace(before + after, before + text + after)

    put("from kimi_k3.kernels import cute_util as cu\n", STAMP, "")
    start = "        S: cutlass.Constexpr = self.stages\n        {} cutlass.Constexpr"
    where = f"        clocks = y32.toint() + Int64({8 * CLOCKS}) * (rank + self.ksplit * block)\n"
    if module is tiles_module:
        put("", where + _mark(0, first, 8), start.format("X:"))
        put("", _mark(1, lane, 12), "            cu.pdl_wait()\n            if cutlass.const_expr(self.xcast > 1):\n"
            "                cute.arch.cluster_wait()\n            for i")  # fmt: skip
        put("            cu.pdl_wait()\n", _mark(2, lane, 12), "            if cutlass.const_expr(self.xcast > 1):\n"
            "                cute.arch.cluster_wait()\n            for i")  # fmt: skip
        put("", _mark(3, lane, 12), "        else:\n            acc.fill(0.0)\n")
        for name in ("multiply_warpgroup", "multiply"):
            put(f"self.{name}(ring, bars, acc, warp, tid % 32, rank", ", clocks", ")\n")
            put(f"def {name}(self, ring, bars, acc, warp, lane, rank", ", clocks", "):\n")
        here = _mark(4, "(i == 0) & (warp == 0) & (lane == 0)", 12)
        put("            cu.wait_uniform(bars + s, (i // S) % 2)\n", here, "            at = base + s * self.wbox\n")
        put("            cu.wait_uniform(bars + s, (i // S) % 2)\n", here, "            for j in")
        put("", _mark(5, first, 8), "        cu.fence_async_shared()  # also completes")
        put(
            "ld32), b, rank, block, tid)\n",
            _mark(6, first, 8),
            "        if cutlass.const_expr(self.xcast > 1):  # noqa",
        )
    else:
        put("", where + _mark(0, first, 8), start.format("W:"))
        put("", _mark(1, lane, 12), "            cu.pdl_wait()\n            late")
        put("            cu.pdl_wait()\n", _mark(2, lane, 12), "            late")
        put("", _mark(3, lane, 12), "        else:\n            self.consume(")
        put("self.consume(ring, bars, red, x, ldx, b, rank, warp, tid % 32", ", clocks", ")\n")
        put("def consume(self, ring, bars, red, x, ldx, b, rank, warp, lane", ", clocks", "):\n")
        put("", _mark(4, "(turn == 0) & (warp == 0) & (lane == 0)", 16), "                at = wbase + s * self.box\n")
        put("", _mark(5, first, 8), "        out = (y.toint(), y32.toint()")
        put("        self.finish(red, part, bars + 2 * S, out, b, rank, block, tid)\n", _mark(6, first, 8), "")
    return source


def kernel_class(module: ModuleType, folder: Path) -> Any:
    """RowsKernel or TilesKernel with stamps; CuTe DSL reads sources from files, so ``folder`` must stay."""
    path = folder / f"stamped_{module.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(stamped(module), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made.TilesKernel if module is tiles_module else made.RowsKernel


def kernel(case: str, m: int, changes: dict[str, Any], folder: Path) -> tuple[Any, Setting]:
    """The stamped kernel object of a case whose outputs are BF16 only."""
    shape, _ = sp.cases()[case]
    if shape.fp32_rows:
        raise ValueError(f"{case}: the clocks take the place of its FP32 output")
    setting = replace(setting_for(shape, m), **changes)
    sp.RowsKernel = kernel_class(rows_module, folder)  # type: ignore[misc]
    sp.TilesKernel = kernel_class(tiles_module, folder)  # type: ignore[misc]
    return sp.make_kernel(sp.Epilogue(shape), setting, m), setting


def trace(case: str, m: int, changes: dict[str, Any], launches: int, folder: Path) -> None:
    k, setting = kernel(case, m, changes, folder)
    shape, bf = k.epilogue.shape, torch.bfloat16
    code = runtime.compiled(("phases", case, m, setting), k, sp.fake_args())
    weights = [torch.randn(shape.n, shape.k, device="cuda", dtype=bf) * shape.k**-0.5 for _ in range(launches)]
    x = torch.randn(m, shape.k, device="cuda", dtype=bf)
    y = torch.empty(m, k.epilogue.columns, device="cuda", dtype=bf)
    sharing = getattr(k, "xcast", 1)
    blocks = k.ksplit * (-(-k.blocks // sharing) * sharing)
    clocks = torch.zeros(launches, blocks, CLOCKS, dtype=torch.int64, device="cuda")

    def launch(i: int) -> None:
        at = partial(sp._pointer, dtype=bf)
        pointers = (at(x), at(weights[i]), at(y), sp._pointer(clocks[i], torch.float32), sp._pointer(x, torch.int64))
        code(*pointers, x.stride(0), y.stride(0), 0, m, setting.trigger, runtime.current_stream())

    graph = bench.graph_of(launch, launches)
    us, _, _ = bench.time_graph(graph, launches, 15)
    graph.replay()
    torch.cuda.synchronize()
    found = clocks.cpu().double() / 1000
    print(f"{case}, {m} rows, {blocks} blocks of {k.smem} bytes, {us:.2f} us a launch with stamps: {setting}")
    print(f"  {'us after the last launch':24s} {'first':>8s} {'median':>8s} {'last':>8s}")
    for phase, name in enumerate(PHASES):
        since = torch.stack(
            [found[i, :, phase] - found[i - 1, :, len(PHASES) - 1].max() for i in range(8, launches - 2)]
        )
        edges = (since.amin(1).median(), since.median(1).values.median(), since.amax(1).median())
        print(f"  {name:24s} " + " ".join(f"{float(e):8.2f}" for e in edges))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the setting")
    parser.add_argument("--launches", type=int, default=24)
    args = parser.parse_args()
    kinds = {f.name: type(f.default) for f in fields(Setting)}
    changes = {}
    for field, _, value in (s.partition("=") for s in args.set):
        changes[field] = value if field == "kind" else value == "True" if kinds[field] is bool else int(value)
    with tempfile.TemporaryDirectory() as folder:
        for m in args.rows:
            trace(args.case, m, changes, args.launches, Path(folder))


if __name__ == "__main__":
    main()
