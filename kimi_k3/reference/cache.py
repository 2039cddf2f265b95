"""Paged KV cache, KDA state slots, and the allocators of both.

Layouts are the stock ones, whole over all heads; a tensor-parallel rank's share is a slice of the head
dimension. Both paths read and write the same tensors, so a request can change path at any step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import Precision

NULL_SLOT = 0  #: KDA slot that padding rows point at; never written


@dataclass
class Caches:
    """All state that outlives a step.

    ``kv[l]``: [pages, page_size, kv_row], MLA layer ``l`` (key: 0-based layer index).
    ``conv[l]``: [slots, 3 + draft_length, 3 * kda_width], pre-convolution q|k|v rows, oldest first.
    ``recurrent[l]``: [slots, heads, head_dim (v), head_dim (k)].
    """

    page_size: int
    kv: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @staticmethod
    def allocate(
        config: KimiK3Config,
        precision: Precision,
        *,
        pages: int,
        page_size: int,
        slots: int,
        draft_length: int = 0,
        device: torch.device | str = "cpu",
    ) -> Caches:
        """Zero-filled caches. ``slots`` counts the null slot."""
        kv, conv, recurrent = {}, {}, {}
        taps = config.short_conv_kernel_size - 1
        for layer in range(config.num_hidden_layers):
            if config.is_kda(layer):
                conv[layer] = torch.zeros(
                    slots, taps + draft_length, 3 * config.kda_width, dtype=precision.conv, device=device
                )
                recurrent[layer] = torch.zeros(
                    slots,
                    config.kda_num_heads,
                    config.kda_head_dim,
                    config.kda_head_dim,
                    dtype=precision.state,
                    device=device,
                )
            else:
                kv[layer] = torch.zeros(pages, page_size, config.kv_row, dtype=precision.kv, device=device)
        return Caches(page_size, kv, conv, recurrent)
