"""Derived error limits of kernel outputs, elementwise; nothing here is tuned.

Against a float64 reference: the FP32 accumulation bound ``c 2^-24 sqrt(K) |w|.|x|`` with c = 4, plus every declared
intermediate rounding, propagated by derivatives, plus half a unit in the last place of what is rounded. That is the
inexact value, whose unit can be twice that of the exact one: errors may carry it over a power of two.
"""

from __future__ import annotations

import torch

ACCUMULATION = 4.0


def ulp_bf16(x: torch.Tensor) -> torch.Tensor:
    """Distance between BF16 neighbours at |x|, float64; 2^-133 at zero and among the subnormals."""
    exponent = torch.frexp(x.double()).exponent - 1
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent.clamp(min=-126) - 7)


def rounding(exact: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Bound on rounding to BF16 a value within ``error`` of ``exact``."""
    return 0.5 * ulp_bf16(exact.abs() + error)


def accumulation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Bound on the FP32 accumulation error of x @ weight^T: [m, n] float64."""
    k = x.shape[1]
    return ACCUMULATION * 2.0**-24 * k**0.5 * (x.double().abs() @ weight.double().abs().T)


def projection_limit(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Limit for a BF16-rounded projection; ``exact`` is x @ weight^T in float64."""
    error = accumulation(x, weight)
    return rounding(exact, error) + error


def situ_limit(x: torch.Tensor, weight: torch.Tensor, beta: float = 4.0, linear: float = 25.0) -> torch.Tensor:
    """Limit for SiTU of a [gate; up] projection, with gate, up and the result rounded to BF16."""
    exact = x.double() @ weight.double().T
    gate, up = exact.chunk(2, dim=1)
    eg, eu = projection_limit(x, weight, exact).chunk(2, dim=1)
    tanh, sigmoid = torch.tanh(gate / beta), torch.sigmoid(gate)
    left = beta * tanh * sigmoid
    slope = (1 - tanh**2) * sigmoid + beta * tanh * sigmoid * (1 - sigmoid)
    right = linear * torch.tanh(up / linear)
    right_slope = 1 - torch.tanh(up / linear) ** 2
    h = left * right
    # curvature of both factors is below 1: second-order terms are bounded by the squares
    first = (right.abs() * slope.abs() * eg) + (left.abs() * right_slope * eu)
    second = eg * eu * 1.2 + eg**2 * right.abs() + eu**2 * left.abs() / linear
    functions = 2.0**-18 * h.abs()  # exp2, reciprocal and the tanh formula
    error = first + second + functions
    return rounding(h, error) + error


def excess(out: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> float:
    """Largest |out - exact| / limit; NaN anywhere counts as infinite. At most 1 passes."""
    ratio = (out.double() - exact).abs() / limit
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())
