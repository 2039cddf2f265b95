"""Which dtype is used where. One object decides all rounding points of a forward pass.

``rounding(x)`` is applied at every declared BF16 rounding point; with ``activations=float64`` it is the
identity, which turns the same code into the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Precision:
    activations: torch.dtype = torch.bfloat16  #: outputs of GEMMs, norms, convolutions, ...
    compute: torch.dtype = torch.float32  #: reductions, softmax, gates, routing, accumulation
    kv: torch.dtype = torch.bfloat16  #: MLA cache rows; float8_e4m3fn also rounds the query rows
    state: torch.dtype = torch.float32  #: KDA recurrent state
    conv: torch.dtype = torch.bfloat16  #: KDA convolution history

    def rounding(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the activation dtype. Idempotent; the identity when activations are the compute dtype."""
        return x.to(self.activations)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """:meth:`rounding`, handed back in the compute dtype: the form in which activations travel."""
        return x.to(self.activations).to(self.compute)

    @property
    def name(self) -> str:
        for name, value in PRECISIONS.items():
            if value == self:
                return name
        return "/".join(str(getattr(self, f)).removeprefix("torch.") for f in self.__dataclass_fields__)


PRECISIONS = {
    "bf16": Precision(),
    "bf16-kvfp8": Precision(kv=FP8),
    "fp32": Precision(*[torch.float32] * 5),
    "fp64": Precision(*[torch.float64] * 5),
}
