"""Streaming projection: y[m, n] = x[m, k] @ w[n, k]^T for 1 to 64 rows, bound by reading w once.

BF16 in, FP32 accumulation, one rounding to BF16 (FP32 rows: none). Epilogues: store, publish to mailbox slots, SiTU.
The kernels are in stream_projection_rows (few tokens) and stream_projection_tiles (more), their settings in
stream_projection_settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_ptr

from kimi_k3.kernels import runtime, shapes
from kimi_k3.kernels.arch import ARCHES, of_capability
from kimi_k3.kernels.compile import CompileCase
from kimi_k3.kernels.shapes import PREPARED_ROWS, ProjectionShape
from kimi_k3.kernels.stream_projection_epilogue import SITU_BETA, SITU_LINEAR_BETA, Epilogue
from kimi_k3.kernels.stream_projection_rows import CONTRACT as ROWS_CONTRACT
from kimi_k3.kernels.stream_projection_rows import RowsKernel
from kimi_k3.kernels.stream_projection_settings import Setting, publication, setting_for, token_tiles
from kimi_k3.kernels.stream_projection_tiles import CONTRACT as TILES_CONTRACT
from kimi_k3.kernels.stream_projection_tiles import TilesKernel

CONTRACTS = (ROWS_CONTRACT, TILES_CONTRACT)


def make_kernel(epilogue: Epilogue, setting: Setting, m: int) -> RowsKernel | TilesKernel:
    """The kernel object of a setting for ``m`` rows. Raises ValueError when the geometry does not divide."""
    tiles, s = token_tiles(m), setting
    if s.kind == "rows":
        return RowsKernel(epilogue, s.rows, s.stages, s.kblk, s.ksplit, s.warps, tiles, s.per_sm)
    return TilesKernel(
        epilogue,
        s.rows,
        s.stages,
        s.kblk,
        s.ksplit,
        s.wm,
        s.wk,
        tiles,
        warpgroup_mma=s.kind == "wgmma",
        xstages=s.xstages,
        per_sm=s.per_sm,
        xcast=s.xcast,
        prompt=s.prompt,
        l2=s.l2,
    )


def fake_args() -> tuple[Any, ...]:
    fake = runtime.fake_address
    pointers = (*[fake(torch.bfloat16)] * 3, fake(torch.float32), fake(torch.int64))
    return (*pointers, *[Int32(1)] * 5, make_fake_stream())


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda) in the inputs' dtype."""
    left = SITU_BETA * torch.tanh(gate / SITU_BETA) * torch.sigmoid(gate)
    return left * (SITU_LINEAR_BETA * torch.tanh(up / SITU_LINEAR_BETA))


def reference(
    shape: ProjectionShape, x: torch.Tensor, weight: torch.Tensor, live: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, FP32 columns or None) by torch, with the kernel's rounding points; in float64 without any (the oracle)."""
    out = x.to(dtype) @ weight.to(dtype).T
    exact = dtype == torch.float64

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t if exact else t.to(torch.bfloat16)

    if shape.situ:
        gate, up = (rounded(t).to(dtype) for t in out.chunk(2, dim=1))
        return rounded(situ(gate, up)), None
    if shape.fp32_rows:
        return rounded(out[:, shape.fp32_rows :]), out[:, : live or shape.fp32_rows]
    return rounded(out), None


class StreamProjection:
    """A projection of one shape, compiled and validated for every prepared batch; weights are given per call.

    ``targets``: 0 stores to ``y``; T publishes to T addresses (``table`` [T, 2] int64: where this rank's BF16 and FP32
    columns of token 0 go in every peer's buffer, multiples of 16 and 8 bytes: :func:`publication_table`), with
    ``owner_width`` each column to its owner only. ``live``: FP32
    rows that are written. Nothing is allocated, compiled or read back in :meth:`run`.
    """

    def __init__(
        self,
        shape: ProjectionShape,
        rows: Sequence[int] = PREPARED_ROWS,
        targets: int = 0,
        live: int = 0,
        owner_width: int = 0,
        settings: dict[int, Setting] | None = None,
    ) -> None:
        self.shape = shape
        self.epilogue = Epilogue(shape, targets, live or shape.fp32_rows, owner_width)
        if self.epilogue.live % 2 or self.epilogue.live > shape.fp32_rows:
            raise ValueError(f"{shape.op}: live FP32 rows {live} must be even and at most {shape.fp32_rows}")
        self._code: dict[int, tuple[Any, Setting]] = {}
        fast = of_capability(*torch.cuda.get_device_capability()).warpgroup_mma
        for m in rows:
            setting = (settings or {}).get(m) or setting_for(shape, m, fast)
            kernel = make_kernel(self.epilogue, setting, m)
            key = code_key(self.epilogue, setting, m)
            self._code[m] = (runtime.compiled(key, kernel, fake_args()), setting)

    @property
    def columns(self) -> int:
        """BF16 output columns."""
        return self.epilogue.columns - self.shape.fp32_rows

    def setting(self, m: int) -> Setting:
        return self._code[m][1]

    def check(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor | None = None,
        y32: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        pitch: tuple[int, int] = (0, 0),
    ) -> None:
        """Raise ValueError for tensors that :meth:`run` would misread. Reads nothing back from the device."""
        s, m = self.shape, x.shape[0]
        if m not in self._code:
            raise ValueError(f"{s.op}: {m} rows are not prepared; prepared: {sorted(self._code)}")
        runtime.check_tensor("x", x, torch.bfloat16, (m, s.k))
        runtime.check_tensor("weight", weight, torch.bfloat16, (s.n, s.k))
        if weight.stride(0) != s.k or (x.stride(0) != s.k and m > 1):
            raise ValueError(f"{s.op}: x and weight rows must be {s.k} elements apart")
        if self.epilogue.targets:
            if table is None:
                raise ValueError(f"{s.op}: publishing needs a table of addresses")
            runtime.check_tensor("table", table, torch.int64, (self.epilogue.targets, 2))
            if pitch[0] % 8 or pitch[1] % 2:
                raise ValueError(
                    f"{s.op}: published rows must be a multiple of 8 (FP32: 2) elements apart, got {pitch}"
                )
        elif y is None or (s.fp32_rows and y32 is None):
            raise ValueError(f"{s.op}: storing needs y" + (" and y32" if s.fp32_rows else ""))
        if y is not None:
            runtime.check_tensor("y", y, torch.bfloat16, (m, self.columns))
            if y.stride(0) % 8 and m > 1:
                raise ValueError(f"{s.op}: rows of y must be a multiple of 8 elements apart, got {y.stride(0)}")
        if y32 is not None:
            runtime.check_tensor("y32", y32, torch.float32, (m, self.epilogue.live), align=8)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor | None = None,
        y32: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        pitch: tuple[int, int] = (0, 0),
    ) -> None:
        """Launch on the current stream. ``pitch``: elements between token rows of the published BF16 and FP32 slots."""
        code, setting = self._code[x.shape[0]]
        ldy = pitch[0] if y is None else y.stride(0)
        ld32 = pitch[1] if y32 is None else y32.stride(0)
        code(
            _pointer(x, torch.bfloat16),
            _pointer(weight, torch.bfloat16),
            _pointer(y if y is not None else x, torch.bfloat16),
            _pointer(y32 if y32 is not None else x, torch.float32),
            _pointer(table if table is not None else x, torch.int64),
            x.stride(0),
            ldy,
            ld32,
            x.shape[0],
            setting.trigger,
            runtime.current_stream(),
        )


def publication_table(slots: Sequence[tuple[int, int]], device: torch.device | str) -> torch.Tensor:
    """``table`` of the (BF16, FP32) addresses of a rank's slot in every peer's mailbox; FP32 0 where there is none.

    Raises ValueError for an address that 16- or 8-byte stores cannot take.
    """
    for narrow, wide in slots:
        if narrow % 16 or wide % 8:
            raise ValueError(f"mailbox slots must start at multiples of 16 (FP32: 8) bytes, got {narrow:#x}, {wide:#x}")
    return torch.tensor(list(slots), dtype=torch.int64, device=device)


def _pointer(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    import cutlass.cute as cute

    return make_ptr(runtime.TYPES[dtype], tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)


def code_key(epilogue: Epilogue, setting: Setting, m: int) -> tuple[Any, ...]:
    """Equal for projections that compile to the same code."""
    return ("stream_projection", epilogue, _untriggered(setting), token_tiles(m))


def _untriggered(s: Setting) -> tuple[Any, ...]:
    return (
        s.kind,
        s.rows,
        s.stages,
        s.ksplit,
        s.kblk,
        s.warps,
        s.wm,
        s.wk,
        s.xstages,
        s.xcast,
        s.prompt,
        s.l2,
        s.per_sm,
    )


def make_inputs(
    shape: ProjectionShape, m: int, seed: int, kind: str = "random", device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [m, k], weight [n, k]) BF16.

    ``random``: normal, weights scaled by k**-0.5. ``adversarial``: outlier columns, a row of -0, cancelling pairs,
    subnormals. ``coded``: w = index of its 64-wide K block (+ row parity), x one-hot blocks: an output names the block
    that was read, all values exact.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device=device)

    if kind == "coded":
        blocks = torch.arange(shape.k, device=device) // 64
        w = (blocks + 1)[None, :] + 0.5 * (torch.arange(shape.n, device=device) % 2)[:, None]
        x = torch.zeros(m, shape.k, device=device)
        for token in range(m):
            hot = (token * 5 + seed) % (shape.k // 64)
            x[token, 64 * hot : 64 * hot + 64] = 1.0 / 64.0
        return x.bfloat16(), w.bfloat16()
    x, w = normal(m, shape.k), normal(shape.n, shape.k) * shape.k**-0.5
    if kind == "adversarial":
        x[:, :: shape.k // 4] *= 300.0
        x[0] = -0.0
        x[-1, 1::2] = -x[-1, ::2]
        w[:, 1::2] = w[:, ::2]  # the last token's exact sum is 0
        w[::7] *= 2.0**-126
        x[m // 2] *= 2.0**-100
    elif kind != "random":
        raise ValueError(f"unknown input kind {kind!r}: random, adversarial or coded")
    return x.bfloat16(), w.bfloat16()


def cases() -> dict[str, tuple[ProjectionShape, int]]:
    """name -> (shape, live FP32 rows) of every projection of both models at TP8 and TP16."""
    out = {}
    for model in shapes.MODELS:
        for tp in (8, 16):
            s = shapes.shard(model, tp)
            live = s.model.experts // tp
            for op, shape in s.projections().items():
                out[f"{model}-tp{tp}-{op}"] = (shape, live if shape.fp32_rows else 0)
    return out


def compile_cases(arch: str) -> dict[str, CompileCase]:
    """Every shape at the largest batch of each number of token tiles, with the epilogue that the executor uses."""
    out = {}
    for name, (shape, live) in cases().items():
        ranks = 16 if "-tp16-" in name else 8
        for m in (8, 16, 32, 64):
            targets, owner = publication(shape.op, shape.n, m, ranks)
            setting = setting_for(shape, m, ARCHES[arch].warpgroup_mma)
            used = Epilogue(shape, targets, live, owner)
            kernel, code = make_kernel(used, setting, m), code_key(used, setting, m)
            contract = ROWS_CONTRACT if setting.kind == "rows" else TILES_CONTRACT
            epilogue = ("situ",) * shape.situ + ("fp32",) * bool(live) + ("own" if owner else "all",) * bool(targets)
            ring = ("split",) * (setting.ksplit > 1) + ("share",) * (setting.xcast > 1)
            kind = "-".join((setting.kind, str(token_tiles(m)), *epilogue, *ring))
            case = CompileCase(kernel, fake_args(), kernel.threads, kernel.smem, contract, kind, code)
            out[f"{name}-m{m}"] = case
    return out
