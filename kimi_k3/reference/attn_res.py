"""Block attention residuals: the residual stream is a softmax mixture over depth.

A forward pass keeps the running sum of the current block (``prefix``) and one stored sum per finished block.
Every sub-layer reads a mixture of all of them. Nothing here outlives the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.reference.numerics import rms_norm
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.weights import AttnResWeights


def mix_sources(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """Softmax mixture of ``sources`` [T, n, H], scored by RMS-normalised dot products with ``query`` [H].

    ``query`` is score norm times projection, folded. The mixture is over the raw sources; not rounded.
    """
    if sources.shape[1] == 1:
        return sources[:, 0]
    scores = (sources @ query) * torch.rsqrt(sources.square().mean(-1) + eps)
    return (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(1)


class AttnResSite:
    """One of the ``2 * layers + 1`` places where the stream is read."""

    def __init__(self, weights: AttnResWeights, eps: float) -> None:
        self.query = weights.norm * weights.proj  # [H], compute dtype
        self.eps = eps


class ResidualStream:
    """Prefix, pending delta and stored blocks of one forward pass over ``T`` rows.

    The feed-forward output is added lazily, at the next read; a layer that opens a block stores the prefix
    before mixing, and its attention output replaces the prefix instead of being added to it.
    """

    def __init__(self, embedding: Tensor, num_blocks: int, precision: Precision) -> None:
        self.prefix = embedding  # [T, H]
        self.precision = precision
        self._delta: Tensor | None = None
        self._sources = embedding.new_empty(embedding.shape[0], num_blocks + 1, embedding.shape[1])
        self._stored = 0
        self._replace = False

    @property
    def blocks(self) -> Tensor:
        """[T, stored, H]: the finished blocks so far."""
        return self._sources[:, : self._stored]

    def settle(self) -> Tensor:
        """Add the pending feed-forward output; returns the rounded prefix [T, H]."""
        if self._delta is not None:
            self.prefix = self.precision.rounded(self.prefix + self._delta)
            self._delta = None
        return self.prefix

    def _mix(self, readable: int, site: AttnResSite) -> Tensor:
        # The prefix goes right behind the readable blocks; while a block opener's attention is read, the slot
        # already holds the same prefix, as the block just stored.
        self._sources[:, readable] = self.prefix
        return mix_sources(self._sources[:, : readable + 1], site.query, site.eps)

    def read_attention(self, site: AttnResSite, opens_block: bool, norm: Tensor) -> Tensor:
        """Input of the attention: normalised mixture of the earlier blocks and the prefix, rounded once."""
        self.settle()
        readable = self._stored
        if opens_block:
            self._sources[:, self._stored] = self.prefix
            self._stored += 1
        self._replace = opens_block
        return self.precision.rounded(rms_norm(self._mix(readable, site), norm, site.eps))

    def add_attention(self, output: Tensor) -> None:
        self.prefix = output if self._replace else self.precision.rounded(self.prefix + output)

    def read_ffn(self, site: AttnResSite, norm: Tensor) -> Tensor:
        """Input of the feed-forward: normalised mixture of all stored blocks and the prefix, rounded once."""
        return self.precision.rounded(rms_norm(self._mix(self._stored, site), norm, site.eps))

    def add_ffn(self, output: Tensor) -> None:
        self._delta = output

    def tap(self) -> Tensor:
        """What a drafter sees after a layer: the current block's partial sum, rounded, [T, H]."""
        if self._delta is None:
            return self.prefix
        return self.precision.rounded(self.prefix + self._delta)

    def read_final(self, site: AttnResSite) -> Tensor:
        """The final mixture, rounded, before the model's last norm."""
        self.settle()
        return self.precision.rounded(self._mix(self._stored, site))
