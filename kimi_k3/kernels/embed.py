"""Embedding gather: out[c, m] = table[ids[m] - first] for every copy c, zeros for ids outside the local shard.

One block per token; 16-byte loads and stores. Ids are int64, the table is BF16 [rows, hidden].
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from torch import Tensor

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels import runtime, shapes
from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.contract import Contract, Parameter

CONTRACT = Contract(
    kernel="k3_embed",
    parameters=(
        Parameter("ids", "table"),
        Parameter("table", "weight", early=True),
        Parameter("out", "output"),
        Parameter("first", "scalar"),
        Parameter("rows", "scalar"),
        Parameter("m", "scalar"),
    ),
)


class EmbedKernel:
    """``copies`` destinations, [m, hidden] each, one after the other."""

    def __init__(self, hidden: int, copies: int) -> None:
        if hidden % 8:
            raise ValueError(f"hidden {hidden}: must be a multiple of 8 (16-byte rows)")
        self.hidden, self.copies = hidden, copies
        self.vectors = hidden // 8
        self.threads = min(128, -(-self.vectors // 32) * 32)
        self.turns = -(-self.vectors // self.threads)

    @cute.jit
    def __call__(self, ids: cute.Pointer, table: cute.Pointer, out: cute.Pointer, first: Int64, rows: Int64, m: Int32,
                 stream) -> None:  # fmt: skip
        self.kernel(ids, table, out, first, rows, m).launch(
            grid=(m, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, ids: cute.Pointer, table: cute.Pointer, out: cute.Pointer, first: Int64, rows: Int64,
               m: Int32) -> None:  # fmt: skip
        token, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        cu.pdl_wait()
        cu.pdl_trigger()
        local = cu.ldg1_64(ids.toint() + Int64(token) * 8) - first
        known = (local >= 0) & (local < rows)
        source = table.toint() + local * (2 * self.hidden)
        v = cute.make_rmem_tensor(cute.make_layout((self.turns, 4), stride=(4, 1)), Uint32)
        v.fill(0)
        if known:
            for t in cutlass.range_constexpr(self.turns):
                at = tid + t * self.threads
                if at < self.vectors:
                    words = cu.ldg4(source + Int64(at * 16))
                    for i in cutlass.range_constexpr(4):
                        v[t, i] = words[i]
        for c in cutlass.range_constexpr(self.copies):
            to = out.toint() + (Int64(c) * m + token) * (2 * self.hidden)
            for t in cutlass.range_constexpr(self.turns):
                at = tid + t * self.threads
                if at < self.vectors:
                    cu.stg4(to + Int64(at * 16), [v[t, i] for i in range(4)])


EmbedKernel.kernel.set_name_prefix("k3_embed", keep_mangled_name=False)


def fake_args() -> tuple[Any, ...]:
    bf = runtime.fake_address(torch.bfloat16)
    return (runtime.fake_address(torch.int64, 8), bf, bf, Int64(0), Int64(1), Int32(1), make_fake_stream())


class Embed:
    """Compiled gather for ``hidden`` columns and ``copies`` equal destinations."""

    def __init__(self, hidden: int, copies: int = 1) -> None:
        self.hidden, self.copies = hidden, copies
        self._code = runtime.compiled(("embed", hidden, copies), EmbedKernel(hidden, copies), fake_args())

    def run(self, ids: Tensor, table: Tensor, out: Tensor, first: int = 0) -> None:
        """``ids`` [m] int64, ``table`` [rows, hidden], ``out`` [copies, m, hidden] BF16; ids count from ``first``."""
        m = ids.shape[0]
        runtime.check_tensor("ids", ids, torch.int64, (m,), align=8)
        runtime.check_tensor("table", table, torch.bfloat16, (None, self.hidden))
        runtime.check_tensor("out", out, torch.bfloat16, (self.copies, m, self.hidden))
        if not (table.is_contiguous() and out.is_contiguous() and ids.is_contiguous()):
            raise ValueError("embed: ids, table and out must be contiguous")
        to = runtime.address
        self._code(to(ids, 8), to(table), to(out), first, table.shape[0], m, runtime.current_stream())


def reference(ids: Tensor, table: Tensor, copies: int, first: int = 0) -> Tensor:
    """[copies, m, hidden] by torch."""
    local = ids - first
    known = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)] * known[:, None]
    return rows.expand(copies, -1, -1).clone()


def compile_cases() -> dict[str, CompileCase]:
    out = {}
    for model in shapes.MODELS.values():
        kernel = EmbedKernel(model.hidden, 1)
        out[model.name] = CompileCase(kernel, fake_args(), kernel.threads, 0, CONTRACT)
    return out
