"""Elementary operations of the model, each with its declared accumulation and rounding.

Activations travel in the compute dtype and hold values of the activation dtype: a product of BF16 values in FP32
followed by one rounding is what a BF16 GEMM with FP32 accumulation computes, and much faster than BF16 on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.reference.precision import FP8, Precision

FP8_MAX = 448.0  #: largest finite E4M3 value


def linear(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """``x`` [..., in] times ``weight`` [out, in], accumulated in the compute dtype and rounded once."""
    return precision.rounded(x @ weight.T)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in the dtype of ``x``; not rounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last dimension; not rounded."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``; not rounded."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def to_fp8(x: Tensor) -> Tensor:
    """Saturating cast to E4M3 with scale 1; NaN stays NaN."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a storage dtype; saturating where it is E4M3."""
    return to_fp8(x) if dtype == FP8 else x.to(dtype)


def sum_ranks(partials: Tensor) -> Tensor:
    """[ranks, ...] -> [...], added in rank order in the dtype of ``partials``."""
    total = partials[0]
    for rank in range(1, partials.shape[0]):
        total = total + partials[rank]
    return total


class RowParallel:
    """A linear layer whose input columns are sharded over ``tp`` ranks.

    Each rank's partial product is rounded to the activation dtype, the partials are added in rank order in the
    compute dtype, and the sum is rounded: the arithmetic of a GEMM followed by an all-reduce. With one rank this
    is :func:`linear`.
    """

    def __init__(self, weight: Tensor, tp: int, precision: Precision) -> None:
        inputs = weight.shape[1]
        if inputs % tp:
            raise ValueError(f"{inputs} input columns cannot be sharded over {tp} ranks")
        self.tp = tp
        self.precision = precision
        self.shards = weight.unflatten(1, (tp, inputs // tp)).permute(1, 2, 0).contiguous()  # [tp, in / tp, out]

    def partials(self, x: Tensor) -> Tensor:
        """``x`` [T, in] -> rounded partials [tp, T, out]."""
        return self.precision.rounded(x.unflatten(-1, (self.tp, -1)).transpose(0, 1) @ self.shards)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, in] -> [T, out]."""
        return self.precision.rounded(sum_ranks(self.partials(x)))
