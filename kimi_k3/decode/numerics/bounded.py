"""FP64 values that carry a bound on the error of a lower-precision computation of the same formula.

Writing an op's formula once with :class:`Bounded` gives both its oracle and its elementwise limit: each operation adds
its own FP32 rounding and propagates what it was given; :meth:`Bounded.rounded` is a declared rounding point. The terms
(u = 2^-24):

* sum of K products: ``C sqrt(K) u |w|.|x|`` (C = 4; the expected growth of a sum in any fixed order) plus
  ``|w|.e`` for inputs with error e, plus the products that may be flushed near zero;
* rounding to BF16: half a unit in the last place of the largest value allowed so far;
* functions: error times the largest slope in reach, plus ``C u`` relative for the function itself.

Nothing here is tuned to an implementation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

C = 4.0
U = 2.0**-24  #: FP32 unit roundoff
TINY = 2.0**-126  #: below, FP32 results may be flushed to zero
BF16 = (7, -126)  #: stored mantissa bits, smallest normal exponent
E4M3 = (3, -6)
E4M3_MAX = 448.0


def half_ulp(x: Tensor, bits: int, lowest: int) -> Tensor:
    """Half a unit in the last place at |x| of a format with ``bits`` stored mantissa bits, FP64."""
    exponent = torch.frexp(x.abs()).exponent - 1
    exponent = torch.where(x == 0, lowest, exponent).clamp(min=lowest)
    return torch.ldexp(torch.ones_like(x), exponent - bits - 1)


@dataclass
class Bounded:
    """``value`` in FP64 and the largest allowed ``error``, same shape."""

    value: Tensor
    error: Tensor

    @staticmethod
    def of(x: Tensor) -> Bounded:
        """Exactly known values."""
        value = x.double()
        return Bounded(value, torch.zeros_like(value))

    @staticmethod
    def cat(parts: list[Bounded], dim: int) -> Bounded:
        return Bounded(torch.cat([p.value for p in parts], dim), torch.cat([p.error for p in parts], dim))

    def map(self, name: str, *args: object) -> Bounded:
        """The same view or reshape of value and error: ``x.map("unflatten", -1, (2, 4))``."""
        return Bounded(getattr(self.value, name)(*args), getattr(self.error, name)(*args))

    def __getitem__(self, index: object) -> Bounded:
        return Bounded(self.value[index], self.error[index])  # type: ignore[index]

    def _own(self, value: Tensor, propagated: Tensor, relative: float = U) -> Bounded:
        return Bounded(value, propagated + relative * (value.abs() + propagated) + TINY * (value != 0))

    def __add__(self, other: Bounded) -> Bounded:
        return self._own(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Bounded) -> Bounded:
        return self._own(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        a, b = self.value.abs(), other.value.abs()
        return self._own(self.value * other.value, a * other.error + b * self.error + self.error * other.error)

    def scaled(self, factor: float) -> Bounded:
        return self._own(self.value * factor, self.error * abs(factor))

    def shifted(self, constant: float) -> Bounded:
        return self._own(self.value + constant, self.error)

    def linear(self, weight: Tensor) -> Bounded:
        """``self`` [..., M, K] times exactly known ``weight`` [..., N, K]."""
        return self.matmul(Bounded.of(weight).map("transpose", -1, -2))

    def matmul(self, other: Bounded) -> Bounded:
        """[..., M, K] @ [..., K, N] with FP32 accumulation in any order."""
        terms = self.value.shape[-1]
        a, b = self.value.abs(), other.value.abs()
        propagated = self.error @ (b + other.error) + a @ other.error
        own = C * math.sqrt(terms) * U * (a @ b) + terms * TINY * U
        return Bounded(self.value @ other.value, propagated + own)

    def sum(self, dim: int, keepdim: bool = False) -> Bounded:
        terms = self.value.shape[dim]
        own = C * math.sqrt(terms) * U * self.value.abs().sum(dim, keepdim)
        return Bounded(self.value.sum(dim, keepdim), self.error.sum(dim, keepdim) + own)

    def rounded(self) -> Bounded:
        """A declared BF16 rounding point."""
        return Bounded(self.value, self.error + half_ulp(self.value.abs() + self.error, *BF16))

    def stored(self, dtype: torch.dtype) -> Bounded:
        """Cast of BF16 values to a storage dtype: exact, or saturating E4M3."""
        if dtype != torch.float8_e4m3fn:
            return self
        value = self.value.clamp(-E4M3_MAX, E4M3_MAX)
        return Bounded(value, self.error + half_ulp((value.abs() + self.error).clamp(max=E4M3_MAX), *E4M3))

    # -- functions --------------------------------------------------------------------------------------------

    def _nearest(self) -> Tensor:
        """Smallest magnitude in reach."""
        return (self.value.abs() - self.error).clamp(min=0)

    def exp(self) -> Bounded:
        value = self.value.exp()
        return self._own(value, value * torch.expm1(self.error), C * U * (1 + float(self.value.abs().max())))

    def sigmoid(self) -> Bounded:
        near = self._nearest()
        slope = near.sigmoid() * (-near).sigmoid()  # 1 - sigmoid(x) would be zero from x = 37 on
        value = self.value.sigmoid()
        # FP32 evaluates exp(-x) with a relative error that grows with |x|.
        relative = C * U * (1 + float(self.value.abs().clamp(max=90).max()))
        return self._own(value, (self.error * slope).clamp(max=1.0), relative)

    def tanh(self) -> Bounded:
        near = 2 * self._nearest()
        slope = 4 * near.sigmoid() * (-near).sigmoid()
        return self._own(self.value.tanh(), (self.error * slope).clamp(max=2.0), C * U)

    def silu(self) -> Bounded:
        return self * self.sigmoid()

    def rsqrt(self, floor: float) -> Bounded:
        """1 / sqrt(self); the exact value cannot be below ``floor`` > 0."""
        lowest = (self.value - self.error).clamp(min=floor)
        value = self.value.rsqrt()
        return self._own(value, 0.5 * self.error * lowest.pow(-1.5), C * U)

    def reciprocal(self) -> Bounded:
        """1 / self, self > 0."""
        lowest = (self.value - self.error).clamp(min=0)
        return self._own(1 / self.value, self.error / (self.value * lowest), C * U)

    def softmax(self, dim: int) -> Bounded:
        value = torch.softmax(self.value, dim)
        below = self.value.amax(dim, keepdim=True) - self.value
        shift = (
            self.error + self.error.amax(dim, keepdim=True) + U * below
        )  # of each exponent, FP32 subtraction included
        numerator = torch.expm1(shift.clamp(max=100.0)) + C * U * (1 + below.clamp(max=100.0))
        total = (value * numerator).sum(dim, keepdim=True) + C * U * math.sqrt(self.value.shape[dim])
        relative = (1 + numerator) / (1 - total.clamp(max=0.5)) - 1
        return Bounded(value, value * relative + TINY)

    def rms(self, eps: float) -> Bounded:
        """x / sqrt(mean(x^2) + eps) over the last dimension."""
        mean = (self * self).sum(-1, keepdim=True).scaled(1 / self.value.shape[-1]).shifted(eps)
        return self * mean.rsqrt(eps)

    def l2(self, eps: float = 1e-6) -> Bounded:
        return self * (self * self).sum(-1, keepdim=True).shifted(eps).rsqrt(eps)

    def situ(self, up: Bounded, beta: float, linear_beta: float) -> Bounded:
        gated = self.scaled(1 / beta).tanh().scaled(beta) * self.sigmoid()
        return gated * up.scaled(1 / linear_beta).tanh().scaled(linear_beta)
