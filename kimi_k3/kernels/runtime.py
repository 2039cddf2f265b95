"""Launching compiled kernels from torch tensors: compile once, pass addresses, allocate nothing.

Kernels take raw addresses (``cute.Pointer``), so a launch exports no DLPack capsules and cannot synchronise streams
during graph capture. The launcher that owns a kernel checks shapes, dtypes and alignment; this module moves addresses.
"""

from __future__ import annotations

import os
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import make_ptr

_CODE: dict[Any, Any] = {}

TYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.float16: cutlass.Float16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
    torch.float8_e4m3fn: cutlass.Uint8,
}


def address(tensor: torch.Tensor, align: int = 16) -> Any:
    """A typed global pointer to the first element of ``tensor``, for a parameter compiled with the same alignment."""
    return make_ptr(TYPES[tensor.dtype], tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)


def fake_address(dtype: torch.dtype, align: int = 16) -> Any:
    """A stand-in for :func:`address` at compile time."""
    return make_ptr(TYPES[dtype], align, cute.AddressSpace.gmem, assumed_align=align)


def current_stream() -> CUstream:
    return CUstream(torch.cuda.current_stream().cuda_stream)


def compiled(key: Any, fn: Any, args: tuple[Any, ...]) -> Any:
    """The compiled ``fn`` for the current device, once per process and ``key``."""
    if key not in _CODE:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"kernel {key!r} would be compiled during graph capture: prepare it before")
        arch = os.environ.get("KIMI_K3_CUTE_ARCH", "")
        _CODE[key] = cute.compile(fn, *args, options=f"--gpu-arch {arch}" if arch else "")
    return _CODE[key]


def check_tensor(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], align: int = 16
) -> None:
    """Raise ValueError unless dtype, shape (None: any), inner contiguity, device and alignment are as assumed."""
    ok = tensor.dim() == len(shape) and all(s is None or s == n for s, n in zip(shape, tensor.shape, strict=True))
    if tensor.dtype != dtype or not ok:
        raise ValueError(f"{what}: expected {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{what}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}")
    if not tensor.is_cuda:
        raise ValueError(f"{what}: expected a CUDA tensor, got one on {tensor.device}")
    if tensor.data_ptr() % align:
        raise ValueError(f"{what}: address must be a multiple of {align} bytes")
