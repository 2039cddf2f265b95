"""MXFP4: E2M1 values packed two per byte, one E8M0 scale per 32 consecutive inputs of a row.

Byte ``j`` of a row holds element ``2j`` in its low nibble and ``2j + 1`` in its high nibble. Bit 3 of a nibble
is the sign (8 is -0). A scale byte ``b`` means ``2 ** (b - 127)``; 255 is NaN. Every dequantised value of the
scales that occur is exact in BF16. Format: OCP Microscaling 1.0; packing: compressed-tensors
``mxfp4-pack-quantized``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.reference.weights import MXFP4Tensor

GROUP = 32  #: elements that share a scale
SCALE_BIAS = 127
MAX_EXPONENT = 2  #: exponent of the largest E2M1 value, 6 = 1.5 * 2**2
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  #: codes 0..7; codes 8..15 are their negatives

_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  #: midpoints between neighbouring magnitudes


def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    magnitudes = torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
    return torch.cat([magnitudes, -magnitudes])


def unpack_codes(packed: Tensor) -> Tensor:
    """uint8 [..., K / 2] -> uint8 codes [..., K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] (K even) -> uint8 [..., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 bytes -> powers of two in ``dtype``; 255 -> NaN."""
    value = torch.ldexp(torch.ones_like(scale, dtype=dtype), scale.to(torch.int32) - SCALE_BIAS)
    return torch.where(scale == 255, torch.full_like(value, float("nan")), value)


def dequantize(weight: MXFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``packed`` [..., out, in / 2] and ``scale`` [..., out, in / 32] -> [..., out, in] in ``dtype``."""
    codes = unpack_codes(weight.packed)
    groups = weight.scale.shape[-1]
    values = _table(dtype, codes.device)[codes.to(torch.int64)].unflatten(-1, (groups, -1))
    return (values * scale_values(weight.scale, dtype).unsqueeze(-1)).flatten(-2)


def quantize(values: Tensor, group: int = GROUP) -> MXFP4Tensor:
    """[..., out, in] floats -> MXFP4, round to nearest with ties to the even code.

    The scale is ``2 ** (floor(log2(amax)) - 2)`` per group (OCP MX 1.0, section 6.3), 1 for an all-zero group;
    magnitudes above 6 saturate.
    """
    if values.shape[-1] % group:
        raise ValueError(f"MXFP4 needs a multiple of {group} inputs per row, got {values.shape[-1]}")
    grouped = values.float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 1 - MAX_EXPONENT, torch.zeros_like(amax).int())
    scale = (exponent + SCALE_BIAS).clamp(0, 254)
    scaled = grouped / torch.ldexp(torch.ones_like(amax), scale - SCALE_BIAS).unsqueeze(-1)
    magnitude = scaled.abs().contiguous()
    boundaries = torch.tensor(_BOUNDARIES, device=values.device)
    below = torch.bucketize(magnitude, boundaries)  # a tie falls to the lower code ...
    above = torch.bucketize(magnitude, boundaries, right=True)
    code = torch.where(below % 2 == 0, below, above)  # ... and moves up where the lower code is odd
    code = code + 8 * torch.signbit(scaled)
    return MXFP4Tensor(pack_codes(code.flatten(-2).to(torch.uint8)), scale.to(torch.uint8))
