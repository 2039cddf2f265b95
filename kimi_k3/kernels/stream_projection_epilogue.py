"""The last step of the streaming projections: partial sums are added, finished columns go where they belong.

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
        if self.columns % 8 or self.shape.fp32_rows % 8:
            size = f"{self.columns} columns, {self.shape.fp32_rows} of them FP32"
            raise ValueError(f"{self.shape.op}: {size}: both must be multiples of 8")
        if self.owner_width and (self.owner_width % 8 or self.owner_width * self.targets != self.columns):
            owners = f"{self.targets} owners of {self.owner_width} columns"
            raise ValueError(f"{self.shape.op}: {owners} do not cover {self.columns} columns in eights")

    @property
    def columns(self) -> int:
        """Output columns, FP32 ones included."""
        return self.shape.n // 2 if self.shape.situ else self.shape.n


class Output:
    """Mixin of the kernels: the last sums, roundings and stores, 4 or 8 consecutive columns of a token at a time.

    Words of 8 and 16 bytes and several tasks of a thread in flight: one pair of columns after the other took 2 us of
    8.5 for 64 x 64 values.
    """

    epilogue: Epilogue
    threads: int
    tokens: int
    halves: int  #: 2 with SiTU: a tile holds gate columns, then as many up columns

    def wide(self, columns: int) -> int:
        """Columns that a thread takes at once: 8 where that leaves work for every thread."""
        return 8 if columns * self.tokens >= 8 * self.threads else 4

    @cute.jit
    def added(self, at, stride, count: cutlass.Constexpr, wide: cutlass.Constexpr):
        """Floats [``wide``] at the shared address ``at``, added over ``count`` sources ``stride`` bytes apart."""
        total = [Float32(0) for _ in range(wide)]
        for p in cutlass.range_constexpr(count):
            words = [w for c in range(0, wide, 4) for w in cu.lds4(at + p * stride + 4 * c)]
            total = [t + cu.i2f(w) for t, w in zip(total, words, strict=True)]
        return total

    @cute.jit
    def emit_tile(self, tile, out, own: cutlass.Constexpr, count: cutlass.Constexpr, first, b, tid):
        """Add and emit ``own`` columns of ``b`` tokens, column ``first`` of the output first.

        ``tile``: (shared address, bytes between tokens, bytes between the ``count`` sources). ``out``: (y, y32, table,
        ldy, ld32), addresses and elements between tokens.
        """
        base, pitch, stride = tile
        wide: cutlass.Constexpr = self.wide(own)
        groups: cutlass.Constexpr = own // wide
        per: cutlass.Constexpr = min(4, -(-groups * self.tokens // self.threads))
        for start in cutlass.range(tid, groups * b, per * self.threads, unroll=1):
            sums = []
            for n in cutlass.range_constexpr(per):
                i = start + n * self.threads
                token = cutlass.min(i // groups, b - 1)  # beyond the end: computed and dropped
                at = base + token * pitch + i % groups * (4 * wide)
                v = self.added(at, stride, count, wide)
                if cutlass.const_expr(self.halves == 2):
                    up = self.added(at + 4 * own, stride, count, wide)
                    v = [self.situ(v[c], up[c]) for c in range(wide)]
                sums.append(v)
            for n in cutlass.range_constexpr(per):
                i = start + n * self.threads
                if i < groups * b:
                    self.emit(out, i // groups, first + i % groups * wide, sums[n])

    @cute.jit
    def situ(self, gate, up):
        """SiTU of an FP32 gate and up, after rounding both to BF16; FP32."""
        g, u = Float32(BFloat16(gate)), Float32(BFloat16(up))
        left = Float32(SITU_BETA) * cu.tanh_exp(g * Float32(1.0 / SITU_BETA)) * cu.sigmoid(g)
        return left * (Float32(SITU_LINEAR_BETA) * cu.tanh_exp(u * Float32(1.0 / SITU_LINEAR_BETA)))

    @cute.jit
    def emit(self, out, token, column, values):
        """Write 4 or 8 columns of ``token``, the first a multiple of as many."""
        y, y32, table, ldy, ld32 = out
        e: cutlass.Constexpr = self.epilogue
        if column < e.columns:
            if cutlass.const_expr(e.shape.fp32_rows > 0):
                if column < e.shape.fp32_rows:
                    for c in cutlass.range_constexpr(0, len(values), 2):
                        if column + c < e.live:
                            self.emit32(y32, table, ld32, token, column + c, values[c], values[c + 1])
                else:
                    self.emit16(y, table, ldy, token, column - e.shape.fp32_rows, values)
            else:
                self.emit16(y, table, ldy, token, column, values)

    @cute.jit
    def emit16(self, y, table, ldy, token, column, values):
        pairs = [(values[c], values[c + 1]) for c in range(0, len(values), 2)]
        if cutlass.const_expr(self.epilogue.targets > 0):
            words = [cu.clean_pair(*pair) for pair in pairs]
            if cutlass.const_expr(self.epilogue.owner_width > 0):
                owner, own = column // self.epilogue.owner_width, column % self.epilogue.owner_width
                to = cu.ldg1_64(table + Int64(16 * owner)) + (Int64(token) * ldy + own) * 2
                self.publish(to, words)
            else:
                offset = (Int64(token) * ldy + column) * 2
                for t in cutlass.range_constexpr(self.epilogue.targets):
                    self.publish(cu.ldg1_64(table + 16 * t) + offset, words)
        else:
            words = [cu.pack_bf16(*pair) for pair in pairs]
            to = y + (Int64(token) * ldy + column) * 2
            if cutlass.const_expr(len(words) == 4):
                cu.stg4(to, words)
            else:
                cu.stg2(to, words)

    @cute.jit
    def publish(self, to, words):
        """Every word of a mailbox carries its own mark, so that the words of one store need not arrive together."""
        if cutlass.const_expr(len(words) == 4):
            cu.st_relaxed_sys4(to, words)
        else:
            cu.st_relaxed_sys2(to, words)

    @cute.jit
    def emit32(self, y32, table, ld32, token, column, first, second):
        offset = (Int64(token) * ld32 + column) * 4
        if cutlass.const_expr(self.epilogue.targets > 0):
            words = (cu.clean_f32(first), cu.clean_f32(second))
            for t in cutlass.range_constexpr(self.epilogue.targets):
                cu.st_relaxed_sys2(cu.ldg1_64(table + 16 * t + 8) + offset, words)
        else:
            cu.stg2(y32 + offset, (cu.f2i(first), cu.f2i(second)))
