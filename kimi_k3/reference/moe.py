"""Feed-forward layers: dense SiTU MLP and the latent mixture of MXFP4 experts with a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3.reference import mxfp4
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.numerics import RowParallel, linear, rms_norm, situ_glu, sum_ranks
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.weights import DenseWeights, MoEWeights, MXFP4Tensor

CACHE_LIMIT = 1 << 27  #: expert weights of a layer up to which the dequantised copy is kept


def route(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """``logits`` [T, E] -> expert ids [T, k] and weights [T, k], best first.

    Selection uses sigmoid score + ``bias`` (ties: lower id; NaN is never chosen before a number); the weights are
    the unbiased scores, renormalised over the chosen and scaled.
    """
    scores = torch.sigmoid(logits)
    biased = torch.nan_to_num(scores + bias, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = biased.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * scaling


class DenseMLP:
    """SiTU-GLU MLP; ``weights`` in the compute dtype."""

    def __init__(self, config: KimiK3Config, weights: DenseWeights, precision: Precision, tp: int = 1) -> None:
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.precision = precision
        self.gate_up = torch.cat([weights.gate_proj, weights.up_proj])
        self.down = RowParallel(weights.down_proj, tp, precision)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """[T, H] -> activated intermediate [T, I]."""
        gate, up = linear(x, self.gate_up, self.precision).chunk(2, -1)
        return self.precision.rounded(situ_glu(gate, up, self.beta, self.linear_beta))


class Experts:
    """Routed experts over the latent. Weights are dequantised once, or per step and expert for large layers."""

    def __init__(
        self, config: KimiK3Config, weights: MoEWeights, precision: Precision, tp: int = 1, cached: bool | None = None
    ) -> None:
        self.width, self.latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        if self.width % tp:
            raise ValueError(f"expert intermediate {self.width} cannot be sharded over {tp} ranks")
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.tp, self.precision, self.count = tp, precision, config.num_experts
        self.w1, self.w3, self.w2 = weights.w1, weights.w3, weights.w2
        if cached is None:
            cached = 3 * self.count * self.width * self.latent <= CACHE_LIMIT
        self._all = self._dequantized(slice(None)) if cached else None

    def _dequantized(self, experts: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Gate-up [n, L, 2 * I] and down [n * tp, I / tp, L] of some experts, input-major."""
        dtype = self.precision.compute
        w1, w3, w2 = (
            mxfp4.dequantize(MXFP4Tensor(w.packed[experts], w.scale[experts]), dtype)
            for w in (self.w1, self.w3, self.w2)
        )
        down = w2.mT.unflatten(1, (self.tp, -1)).flatten(0, 1)
        return torch.cat([w1, w3], 1).mT.contiguous(), down.contiguous()

    def __call__(self, latent: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``latent`` [T, L], ``ids`` and ``weights`` [T, k] -> rounded per-rank sums [tp, T, L], before any norm."""
        outputs = self.outputs(latent, ids)
        return self.precision.rounded((outputs * weights.unsqueeze(-1)).sum(-2))

    def outputs(self, latent: Tensor, ids: Tensor) -> Tensor:
        """Rounded expert outputs per rank and slot, [tp, T, k, L]."""
        tokens, top_k = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        active, counts = flat[order].unique_consecutive(return_counts=True)
        group = torch.arange(len(active), device=ids.device).repeat_interleave(counts)
        place = torch.arange(tokens * top_k, device=ids.device) - (counts.cumsum(0) - counts)[group]
        rows = latent.new_zeros(len(active), int(counts.max()), self.latent)
        rows[group, place] = latent[order // top_k]
        if self._all is not None:
            gate_up, down = self._all
            if len(active) < self.count:
                gate_up, down = gate_up[active], down.unflatten(0, (-1, self.tp))[active].flatten(0, 1)
            result = self._mlp(rows, gate_up, down)
        else:
            parts = [self._mlp(rows[i : i + 1], *self._dequantized(active[i : i + 1])) for i in range(len(active))]
            result = torch.cat(parts)
        out = latent.new_empty(tokens * top_k, self.tp, self.latent)
        out[order] = result[group, :, place]
        return out.unflatten(0, (tokens, top_k)).permute(2, 0, 1, 3)

    def _mlp(self, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """``rows`` [n, c, L] -> [n, tp, c, L], rounded."""
        rounded = self.precision.rounded
        gate, up = rounded(rows @ gate_up).chunk(2, -1)
        hidden = rounded(situ_glu(gate, up, self.beta, self.linear_beta))
        shards = hidden.unflatten(-1, (self.tp, -1)).transpose(1, 2).flatten(0, 1)  # [n * tp, c, I / tp]
        return rounded(shards @ down).unflatten(0, (-1, self.tp))


class LatentMoE:
    """Router, latent experts, latent norm, up-projection, and the shared expert on the full hidden state."""

    def __init__(
        self, config: KimiK3Config, weights: MoEWeights, precision: Precision, tp: int = 1, cached: bool | None = None
    ) -> None:
        self.top_k, self.scaling, self.eps = (
            config.num_experts_per_token,
            config.routed_scaling_factor,
            config.rms_norm_eps,
        )
        self.precision = precision
        self.gate, self.bias = weights.gate, weights.correction_bias
        self.latent_down, self.latent_norm, self.latent_up = (
            weights.latent_down,
            weights.latent_norm,
            weights.latent_up,
        )
        self.experts = Experts(config, weights, precision, tp, cached)
        self.shared = DenseMLP(config, weights.shared, precision, tp)
        self.chosen: list[Tensor] | None = None  #: expert ids [T, k] of every call, while somebody wants them

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> expert ids and weights [T, k]. The logits are not rounded."""
        return route(x @ self.gate.T, self.bias, self.top_k, self.scaling)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]. The latent norm is not linear: it comes after the sum over ranks."""
        rounded = self.precision.rounded
        ids, weights = self.route(x)
        if self.chosen is not None:
            self.chosen.append(ids)
        partials = self.experts(linear(x, self.latent_down, self.precision), ids, weights)
        latent = rounded(sum_ranks(partials))
        normed = rounded(rms_norm(latent, self.latent_norm, self.eps))
        return rounded(linear(normed, self.latent_up, self.precision) + self.shared(x))
