"""Host side of the KDA decode core: settings by batch, weights, checks, and a launch that allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kimi_k3.kernels.kda_core import HEAD, TAPS, KdaCore, Settings
from kimi_k3.kernels.runtime import address, check_tensor, compiled, current_stream, fake_address


def choose(heads: int, tokens: int, requests: int) -> Settings:
    """The fastest setting on an H200 (benchmarks/h200/results/kda_core.json) of those the whole test suite ran with.

    What counts is the number of (head, request) pairs, one SM's worth of work each.
    """
    pairs = heads * requests
    if pairs <= 6:
        return Settings(cluster=8, lanes=16, rows_per_pass=2)
    if pairs <= (12 if tokens == 1 else 36):
        return Settings(cluster=4, rows_per_pass=4)
    if pairs <= (24 if tokens == 1 else 66):
        return Settings(cluster=2)
    if tokens == 1 and pairs > 528:
        return Settings(lanes=16, resident=2)
    if tokens == 1 and pairs > 132:
        return Settings(lanes=16, occupancy=3, bulk_store=True)
    return Settings(lanes=16)


def kernel_args(index: torch.dtype = torch.int32) -> tuple[Any, ...]:
    """Stand-ins for the kernel's arguments at compile time."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    bf, fp, align = torch.bfloat16, torch.float32, torch.empty(0, dtype=index).element_size()
    return (
        fake_address(bf), fake_address(bf), fake_address(fp), fake_address(fp, 4), fake_address(fp), fake_address(fp),
        fake_address(index, align), fake_address(index, align), fake_address(bf), fake_address(fp), Int64(0), Int64(0),
        fake_address(bf), Int32(1), Int32(1), make_fake_stream(),
    )  # fmt: skip


class PreparedKdaCore:
    """One layer's KDA core with its weights. Compile with :meth:`prepare` before capture, then call :meth:`run`.

    ``f_b`` [heads 128, 128] bf16, ``conv_weight`` [3, 4, heads 128] fp32 (q, k, v; taps oldest first), ``a_log``
    [heads], ``dt_bias`` [heads 128], ``norm_weight`` [128] fp32. ``pitch``: columns of ``projected``. ``tokens`` per
    request, ``columns`` of the slot table (0: one slot per request and no accepted counts). ``conv_width``: channels of
    q in the convolution history if it holds more heads than these. ``early``: states, history and tables may be read
    before the dependency wait, as the contract says; False for a chain of launches on one layer. ``sms``: plan for
    fewer SMs than the device has. Raises ValueError for wrong shapes, dtypes or alignment.
    """

    kernel: type[KdaCore] = KdaCore  #: a benchmark may leave parts of it out

    def __init__(
        self,
        f_b: Tensor,
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        *,
        pitch: int,
        tokens: int = 1,
        columns: int = 0,
        index_dtype: torch.dtype = torch.int32,
        conv_width: int | None = None,
        early: bool = True,
        sms: int | None = None,
        settings: Callable[[int, int, int], Settings] = choose,
    ) -> None:
        heads = a_log.shape[0]
        self.heads, self.width = heads, heads * HEAD
        if pitch % 8 or pitch < 4 * self.width + HEAD + heads:
            raise ValueError(f"pitch: {pitch} must be a multiple of 8 and at least {4 * self.width + HEAD + heads}")
        if index_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index_dtype: {index_dtype} must be int32 or int64")
        if not 1 <= tokens <= 8 or (tokens > columns if columns else tokens != 1):
            raise ValueError(f"tokens: {tokens} must be 1 to 8, and at most the {columns} columns of the slot table")
        check_tensor("f_b", f_b, torch.bfloat16, (self.width, HEAD))
        check_tensor("conv_weight", conv_weight, torch.float32, (3, TAPS + 1, self.width))
        check_tensor("a_log", a_log, torch.float32, (heads,), 4)
        check_tensor("dt_bias", dt_bias, torch.float32, (self.width,))
        check_tensor("norm_weight", norm_weight, torch.float32, (HEAD,))
        for name, t in (("f_b", f_b), ("conv_weight", conv_weight)):
            if not t.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, strides are {t.stride()}")
        self.weights = (f_b, conv_weight, a_log, dt_bias, norm_weight)
        self.pitch, self.tokens, self.columns, self.index_dtype = pitch, tokens, columns, index_dtype
        self.conv_width, self.early, self.settings = conv_width or self.width, early, settings
        self.sms = sms
        self._fixed = tuple(address(w, 4 if w is a_log else 16) for w in self.weights)
        self._code: dict[int, Any] = {}
        self._groups: dict[int, int] = {}

    def prepare(self, requests: Iterable[int]) -> None:
        """Compile what ``run`` needs for these numbers of requests; call it before graph capture."""
        sms = self.sms or torch.cuda.get_device_properties(self.weights[0].device).multi_processor_count
        for n in requests:
            s = self.settings(self.heads, self.tokens, n)
            index = 4 if self.index_dtype == torch.int32 else 8
            given = (self.heads, self.pitch, self.tokens, self.columns, index, s, self.early, self.conv_width)
            self._groups[n] = s.groups(self.heads, n, sms)
            self._code[n] = compiled((self.kernel, *given), self.kernel(*given), kernel_args(self.index_dtype))

    def run(
        self, projected: Tensor, slots: Tensor, accepted: Tensor | None, conv_state: Tensor, state: Tensor, out: Tensor
    ) -> None:
        """Launch on the current stream; shapes as in ``kda_core_cases.Inputs``. Updates both states and ``out``.

        The states may be slices of caches with more heads: ``conv_state`` from the first q channel on, ``state``
        of this rank's heads.
        """
        n = slots.shape[0]
        if n not in self._code:
            raise ValueError(f"requests: {n} was not prepared; prepared are {sorted(self._code)}")
        rows = n * self.tokens
        check_tensor("projected", projected, torch.bfloat16, (rows, self.pitch))
        check_tensor("slots", slots, self.index_dtype, (n, self.columns) if self.columns else (n,), 4)
        need = TAPS - 1 + max(1, self.columns)
        check_tensor("conv_state", conv_state, torch.bfloat16, (None, None, None), 8)
        check_tensor("state", state, torch.float32, (None, self.heads, HEAD, HEAD))
        check_tensor("out", out, torch.bfloat16, (rows, self.width))
        if self.columns:
            if accepted is None:
                raise ValueError("accepted: needed with a table of slots")
            check_tensor("accepted", accepted, self.index_dtype, (n,), 4)
        rows_ok = conv_state.shape[1] >= need and conv_state.shape[2] >= 2 * self.conv_width + self.width
        if not rows_ok or conv_state.stride(1) != 3 * self.conv_width or conv_state.stride(0) % 4:
            raise ValueError(
                f"conv_state: {need} rows of {3 * self.conv_width} without gaps and a slot stride divisible by 4 are "
                f"needed, got shape {tuple(conv_state.shape)}, strides {conv_state.stride()}"
            )
        if state.stride()[1:] != (HEAD * HEAD, HEAD, 1) or state.stride(0) % 4:
            raise ValueError(
                f"state: heads must be contiguous and the slot stride divisible by 4, got {state.stride()}"
            )
        for name, t in (("projected", projected), ("slots", slots), ("out", out)):
            if not t.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, strides are {t.stride()}")
        align = self.index_dtype.itemsize
        self._code[n](
            address(projected), *self._fixed, address(slots, align),
            address(slots if accepted is None else accepted, align), address(conv_state), address(state),
            conv_state.stride(0), state.stride(0), address(out), n, self._groups[n], current_stream(),
        )  # fmt: skip
