"""What a timed graph of one kernel runs on: weights, states and activations of many layers, so that L2 is cold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_k3.kernels.attn_res import Settings as ResidualSettings
from kimi_k3.kernels.attn_res_launch import PreparedAttnRes
from kimi_k3.kernels.attn_res_launch import choose as choose_residual
from kimi_k3.kernels.kda_core import HEAD, KdaCore, Settings
from kimi_k3.kernels.kda_core_launch import PreparedKdaCore, choose
from kimi_k3.kernels.shapes import ProjectionShape, pad16
from kimi_k3.kernels.stream_projection import StreamProjection, publication_table
from kimi_k3.kernels.stream_projection_settings import publication

XS = 8  #: distinct activations of a projection


def normal_on(device: str, seed: int = 1) -> Callable[..., Tensor]:
    """``normal(*shape, scale=1.0, dtype=torch.float32)`` from one generator."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    return normal


class Peers:
    """Mailboxes of ``ranks`` peers for one projection of ``m`` rows, all on this GPU, as the executor lays them out.

    ``boxes`` [ranks, m, columns of all ranks] BF16 for what goes to everyone, or [ranks, m, own columns]; ``logits``
    [ranks, m, FP32 columns of all ranks] FP32 where there are any. The playing rank is ``rank``. NaN is idle. ``rows``:
    of the mailboxes, default ``m``.
    """

    def __init__(
        self,
        shape: ProjectionShape,
        live: int,
        m: int,
        ranks: int,
        rank: int = 0,
        device: str = "cuda",
        rows: int = 0,
    ) -> None:
        self.targets, self.owner_width = publication(shape.op, shape.n, m, ranks)
        own = shape.n - shape.fp32_rows
        spread = ranks if shape.fp32_rows else 1  # every rank has its own columns of the front; partials overlap
        self.first, self.first32 = (rank * own, rank * live) if shape.fp32_rows else (0, 0)
        width = self.owner_width or own * spread
        self.boxes = torch.full((ranks, rows or m, width), torch.nan, dtype=torch.bfloat16, device=device)
        self.logits = torch.full((ranks, rows or m, ranks * live), torch.nan, device=device) if live else None
        self.pitch = (width, ranks * live)
        slots = [
            (
                self.boxes[d, :, self.first :].data_ptr(),
                0 if self.logits is None else self.logits[d, :, self.first32 :].data_ptr(),
            )
            for d in range(ranks)
        ]
        self.table = publication_table(slots, device)

    def arm(self) -> None:
        for box in (self.boxes, self.logits):
            if box is not None:
                box.fill_(torch.nan)

    def published(self, y: Tensor, y32: Tensor | None) -> list[Tensor]:
        """What the mailboxes hold once ``y`` [m, columns] and ``y32`` [m, FP32 columns] are published, -0 as +0."""
        found = [torch.full_like(self.boxes, torch.nan)]
        values = (y + 0.0).to(torch.bfloat16)
        if self.owner_width:
            found[0][:, : len(y)] = values.unflatten(1, (-1, self.owner_width)).transpose(0, 1)
        else:
            found[0][:, : len(y), self.first : self.first + y.shape[1]] = values
        if self.logits is not None and y32 is not None:
            found.append(torch.full_like(self.logits, torch.nan))
            found[1][:, : len(y), self.first32 : self.first32 + y32.shape[1]] = y32 + 0.0
        return found


class ProjectionLayers:
    """``count`` weights [n, k] and :data:`XS` activations [m, k]; one output that every launch writes."""

    def __init__(self, shape: ProjectionShape, live: int, m: int, count: int, device: str = "cuda") -> None:
        normal, bf = normal_on(device), torch.bfloat16
        self.shape, self.live, self.count = shape, live, count
        self.weights = [normal(shape.n, shape.k, scale=shape.k**-0.5, dtype=bf) for _ in range(min(count, 16))]
        while len(self.weights) < count:  # equal contents at other addresses are as cold
            self.weights.append(self.weights[len(self.weights) % 16].clone())
        self.xs = [normal(m, shape.k, dtype=bf) for _ in range(XS)]
        columns = (shape.n // 2 if shape.situ else shape.n) - shape.fp32_rows
        self.y = torch.full((m, columns), torch.nan, dtype=bf, device=device)
        self.y32 = torch.full((m, live), torch.nan, device=device) if live else None
        self.product = torch.empty(m, shape.n, dtype=bf, device=device)

    def launch(self, op: StreamProjection, i: int) -> None:
        op.run(self.xs[i % XS], self.weights[i], self.y, self.y32)

    def publish(self, op: StreamProjection, peers: Peers, i: int) -> None:
        op.run(self.xs[i % XS], self.weights[i], table=peers.table, pitch=peers.pitch)

    def matmul(self, i: int) -> None:
        """The same product by torch, without an epilogue."""
        torch.mm(self.xs[i % XS], self.weights[i].T, out=self.product)


class KdaLayers:
    """``count`` layers' weights, states and tables for ``requests`` requests of ``tokens`` rows.

    ``columns``: slots per request, 0 for plain decode without a table.
    """

    def __init__(self, heads: int, requests: int, tokens: int, columns: int, count: int, device: str = "cuda") -> None:
        self.heads, self.tokens, self.columns, self.count, self.requests = heads, tokens, columns, count, requests
        width, bf = heads * HEAD, torch.bfloat16
        normal = normal_on(device)
        self.pitch = pad16(4 * width + HEAD + heads)
        per = max(1, columns)
        slots = requests * per + 1
        self.f_b = normal(count, width, HEAD, scale=HEAD**-0.5, dtype=bf)
        self.conv_weight = normal(count, 3, 4, width, scale=0.5)
        self.a_log = normal(count, heads, scale=0.5)
        self.dt_bias = normal(count, width)
        self.norm = 1 + normal(count, HEAD, scale=0.1)
        self.state = [normal(slots, heads, HEAD, HEAD, scale=0.3) for _ in range(count)]
        self.conv = normal(count, slots, 2 + per, 3 * width, dtype=bf)
        self.projected = normal(requests * tokens, self.pitch, dtype=bf)
        g = torch.Generator(device=device).manual_seed(2)
        order = (torch.randperm(slots - 1, generator=g, device=device) + 1).int()
        self.slots = order.view(requests, per) if columns else order
        self.accepted = torch.randint(1, per + 1, (requests,), generator=g, device=device).int() if columns else None
        self.out = torch.empty(count, requests * tokens, width, dtype=bf, device=device)

    def prepared(self, settings: Settings | None = None, kernel: type[KdaCore] = KdaCore) -> list[PreparedKdaCore]:
        """A launcher per layer; ``settings`` None: those of the launcher."""
        made = []
        for i in range(self.count):
            p = PreparedKdaCore(
                self.f_b[i], self.conv_weight[i], self.a_log[i].clone(), self.dt_bias[i], self.norm[i],
                pitch=self.pitch, tokens=self.tokens, columns=self.columns,
                settings=choose if settings is None else lambda *_: settings,
            )  # fmt: skip
            p.kernel = kernel
            p.prepare([self.requests])
            made.append(p)
        return made

    def launch(self, kernels: list[PreparedKdaCore], i: int) -> None:
        kernels[i].run(self.projected, self.slots, self.accepted, self.conv[i], self.state[i], self.out[i])


class ResidualSites:
    """``count`` sites with their own rows, blocks and weights. ``site``: keywords of :class:`PreparedAttnRes`."""

    def __init__(self, site: dict[str, Any], rows: int, hidden: int, count: int, device: str = "cuda") -> None:
        normal, bf = normal_on(device), torch.bfloat16
        self.site, self.rows, self.hidden, self.count = site, rows, hidden, count
        self.delta = normal(count, rows, hidden, scale=1e-3, dtype=bf)  # prefix grows by it with every replay
        self.prefix, self.blocks = normal(count, rows, hidden, dtype=bf), normal(count, rows, 8, hidden, dtype=bf)
        self.query, self.gamma = normal(count, hidden, scale=hidden**-0.5), normal(count, hidden, dtype=bf)
        self.out = torch.empty(count, rows, hidden, dtype=bf, device=device)

    def prepared(self, settings: ResidualSettings | None = None) -> list[PreparedAttnRes]:
        chosen = choose_residual if settings is None else lambda *_: settings
        return [
            PreparedAttnRes(self.query[i], self.gamma[i], rows=(self.rows,), settings=chosen, **self.site)
            for i in range(self.count)
        ]

    def launch(self, kernels: list[PreparedAttnRes], i: int) -> None:
        kernels[i].run(self.delta[i], self.prefix[i], self.blocks[i], None, self.out[i])
