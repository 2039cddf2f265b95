"""The optimised path: one op. Not imported while the switch is off."""

import torch


@torch.library.custom_op("hundred::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits [B, VOCAB] of x [B, WIDTH]."""
    return x @ weight
