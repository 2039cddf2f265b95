"""Input families: what random numbers alone do not reach."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

FAMILIES = ("normal", "outliers", "denormals", "negative_zero", "coded")

_STRIDES = (5, 3, 7, 2, 11, 1)  #: per dimension, coprime to 13


class Draw:
    """Seeded tensors of one family, on torch's default device.

    Activations follow the family; weights are normal unless the family is coded.

    ``coded`` values are small multiples of 1/4 that encode their own indices (rank, row, block, column): sums of
    their products are exact, so a result from a wrong block, row or rank is wrong by whole units.
    """

    def __init__(self, family: str, seed: int, rows: int) -> None:
        if family not in FAMILIES:
            raise ValueError(f"unknown input family {family!r}; expected one of {', '.join(FAMILIES)}")
        self.family, self.seed, self.rows = family, seed, rows

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device=torch.get_default_device())
        return generator.manual_seed(int.from_bytes(digest[:7], "little"))

    def coded(self, *shape: int) -> Tensor:
        code = torch.zeros(shape, dtype=torch.int64)
        for dim, size in enumerate(shape):
            index = torch.arange(size) * _STRIDES[dim % len(_STRIDES)]
            code += index.view(-1, *[1] * (len(shape) - dim - 1))
        return (code % 13 - 6).float() / 4

    def activation(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = self._generator(name)
        if self.family == "negative_zero":
            return torch.full(shape, -0.0, dtype=dtype)
        if self.family == "coded":
            return self.coded(*shape).to(dtype)
        values = torch.randn(shape, generator=generator)
        if self.family == "outliers":
            values *= torch.where(torch.rand(shape, generator=generator) < 1 / 64, 100.0, 1.0)
        elif self.family == "denormals":
            values *= 2.0**-130  # subnormal in BF16 and FP32
        return values.to(dtype)

    def weight(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[..., out, in], unit gain."""
        if self.family == "coded":
            return self.coded(*shape).to(dtype)
        return (torch.randn(shape, generator=self._generator(name)) / math.sqrt(shape[-1])).to(dtype)

    def norm(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Norm weights around one; normal in every family."""
        return (1 + torch.randn(shape, generator=self._generator(name)) / 8).to(dtype)

    def normal(self, name: str, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Parameters and states that keep their distribution in every family."""
        return (torch.randn(shape, generator=self._generator(name)) * std).to(dtype)

    def bytes(self, name: str, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator(name), dtype=torch.int64).to(torch.uint8)

    def permutation(self, name: str, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator(name))
