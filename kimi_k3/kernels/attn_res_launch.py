"""Host side of the attention residual: settings, weights, checks, and a launch that allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_k3.kernels.attn_res import AttnRes, Settings
from kimi_k3.kernels.attn_res_cases import Update
from kimi_k3.kernels.runtime import address, check_tensor, compiled, current_stream, fake_address


def choose(hidden: int, rows: int) -> Settings:
    """The setting that was fastest on an H200 (benchmarks/h200/results/attn_res.json)."""
    if hidden % (7 * 256) == 0:
        return Settings(cluster=7)
    if hidden % 512 == 0:
        return Settings(cluster=2)
    return Settings()


def kernel_args() -> tuple[Any, ...]:
    """Stand-ins for the kernel's arguments at compile time."""
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_stream

    bf = fake_address(torch.bfloat16)
    return (bf, bf, bf, fake_address(torch.float32), bf, bf, bf, Int32(1), make_fake_stream())


class PreparedAttnRes:
    """One site: ``query`` [hidden] fp32 (score norm times projection) and ``gamma`` [hidden] bf16.

    ``stored``: readable blocks of a buffer of ``pitch`` blocks a row; the rest as in :class:`AttnRes`. Compiles when
    built, for the given numbers of ``rows``; :meth:`run` only launches. Raises ValueError for wrong shapes, dtypes,
    alignment. ``early``: prefix and blocks may be read before the dependency wait, as the contract says.
    """

    def __init__(
        self,
        query: Tensor,
        gamma: Tensor,
        *,
        stored: int,
        pitch: int = 8,
        update: Update = "add",
        opens: bool = False,
        tap: bool = False,
        final: bool = False,
        rows: tuple[int, ...] = (1,),
        early: bool = True,
        settings: Callable[[int, int], Settings] = choose,
    ) -> None:
        hidden = query.shape[0]
        if hidden % 256:
            raise ValueError(f"hidden: {hidden} must be a multiple of 256")
        if update not in ("add", "replace", "none"):
            raise ValueError(f"update: {update!r} must be add, replace or none")
        if not 0 <= stored + opens <= pitch:
            raise ValueError(f"stored: {stored} blocks and {int(opens)} new one do not fit a buffer of {pitch}")
        check_tensor("query", query, torch.float32, (hidden,))
        check_tensor("gamma", gamma, torch.bfloat16, (hidden,))
        early = early and update != "none"  # without a delta the prefix is the embedding, written just before
        self.weights = (query, gamma)
        self.hidden, self.stored, self.pitch, self.update = hidden, stored, pitch, update
        self.opens, self.tap, self.final = opens, tap, final
        self._fixed = (address(query), address(gamma))
        self._code: dict[int, Any] = {}
        for n in rows:
            given = (hidden, stored, pitch, update, opens, tap, final, settings(hidden, n), early)
            self._code[n] = compiled(("attn_res", *given), AttnRes(*given), kernel_args())

    def run(self, delta: Tensor | None, prefix: Tensor, blocks: Tensor, tap: Tensor | None, out: Tensor) -> None:
        """Launch on the current stream. ``delta`` is not read with update "none", ``tap`` not written without tap."""
        rows = out.shape[0]
        if rows not in self._code:
            raise ValueError(f"rows: {rows} was not prepared; prepared are {sorted(self._code)}")
        shape = (rows, self.hidden)
        check_tensor("prefix", prefix, torch.bfloat16, shape)
        check_tensor("blocks", blocks, torch.bfloat16, (rows, self.pitch, self.hidden))
        check_tensor("out", out, torch.bfloat16, shape)
        if self.update != "none":
            if delta is None:
                raise ValueError(f"delta: needed for update {self.update!r}")
            check_tensor("delta", delta, torch.bfloat16, (None, self.hidden))
        if self.tap:
            if tap is None:
                raise ValueError("tap: this site was prepared with a tap")
            check_tensor("tap", tap, torch.bfloat16, shape)
        for name, t in (("delta", delta), ("prefix", prefix), ("blocks", blocks), ("tap", tap), ("out", out)):
            if t is not None and not t.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, strides are {t.stride()}")
        query, gamma = self._fixed
        self._code[rows](
            address(out if delta is None else delta), address(prefix), address(blocks), query, gamma,
            address(out if tap is None else tap), address(out), rows, current_stream(),
        )  # fmt: skip
