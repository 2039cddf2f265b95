"""Geometry and the last step of the streaming projections: what happens to a finished pair of output columns.

store    y[token, column] BF16, columns of FP32 rows to a second matrix
publish  the same words, -0 rewritten to +0, to every address of a table (mailbox slots, one per peer), or, with
         ``owner_width``, each column to the one peer that owns it
SiTU     first gate and up are rounded and combined: beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from kimi_k3.kernels import cute_util as cu
from kimi_k3.kernels.shapes import ProjectionShape

SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0


@dataclass(frozen=True)
class Epilogue:
    """``targets``: 0 stores to y; T > 0 publishes to T addresses. ``live``: FP32 rows that exist, the rest is padding.

    ``owner_width``: 0 sends every column to every target; else target t gets columns [t width, (t + 1) width) only.
    """

    shape: ProjectionShape
    targets: int = 0
    live: int = 0
    owner_width: int = 0

    def __post_init__(self) -> None:
        if self.owner_width and (self.owner_width % 2 or self.owner_width * self.targets != self.columns):
            owners = f"{self.targets} owners of {self.owner_width} columns"
            raise ValueError(f"{self.shape.op}: {owners} do not cover {self.columns} columns")

    @property
    def columns(self) -> int:
        """Output columns, FP32 ones included."""
        return self.shape.n // 2 if self.shape.situ else self.shape.n


class Output:
    """Mixin of the kernels: ``self.epilogue`` and the two rounding steps."""

    epilogue: Epilogue

    @cute.jit
    def situ(self, gate, up):
        """SiTU of an FP32 gate and up, after rounding both to BF16; FP32."""
        g, u = Float32(BFloat16(gate)), Float32(BFloat16(up))
        left = Float32(SITU_BETA) * cu.tanh_exp(g * Float32(1.0 / SITU_BETA)) * cu.sigmoid(g)
        return left * (Float32(SITU_LINEAR_BETA) * cu.tanh_exp(u * Float32(1.0 / SITU_LINEAR_BETA)))

    @cute.jit
    def emit(self, y, y32, table, ldy, ld32, token, column, first, second):
        """Write columns ``column`` (even) and ``column + 1`` of ``token``; y, y32, table: addresses; ld*: elements."""
        e: cutlass.Constexpr = self.epilogue
        if column < e.columns:
            if cutlass.const_expr(e.shape.fp32_rows > 0):
                if column < e.shape.fp32_rows:
                    if column < e.live:
                        self.emit32(y32, table, ld32, token, column, first, second)
                else:
                    self.emit16(y, table, ldy, token, column - e.shape.fp32_rows, first, second)
            else:
                self.emit16(y, table, ldy, token, column, first, second)

    @cute.jit
    def emit16(self, y, table, ldy, token, column, first, second):
        if cutlass.const_expr(self.epilogue.owner_width > 0):
            owner, own = column // self.epilogue.owner_width, column % self.epilogue.owner_width
            to = cu.ldg1_64(table + Int64(16 * owner)) + (Int64(token) * ldy + own) * 2
            cu.st_relaxed_sys1(to, cu.clean_pair(first, second))
        elif cutlass.const_expr(self.epilogue.targets > 0):
            offset = (Int64(token) * ldy + column) * 2
            word = cu.clean_pair(first, second)
            for t in cutlass.range_constexpr(self.epilogue.targets):
                cu.st_relaxed_sys1(cu.ldg1_64(table + 16 * t) + offset, word)
        else:
            cu.stg1(y + (Int64(token) * ldy + column) * 2, cu.pack_bf16(first, second))

    @cute.jit
    def emit32(self, y32, table, ld32, token, column, first, second):
        offset = (Int64(token) * ld32 + column) * 4
        if cutlass.const_expr(self.epilogue.targets > 0):
            words = (cu.clean_f32(first), cu.clean_f32(second))
            for t in cutlass.range_constexpr(self.epilogue.targets):
                cu.st_relaxed_sys2(cu.ldg1_64(table + 16 * t + 8) + offset, words)
        else:
            cu.stg2(y32 + offset, (cu.f2i(first), cu.f2i(second)))
