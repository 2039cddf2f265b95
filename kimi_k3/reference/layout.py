"""How the rows of a step are grouped for batched computation: padded blocks of requests x rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3.reference.batch import StepBatch


@dataclass
class RowGroup:
    """``n`` requests with at most ``q`` rows each, computed together. Shorter requests are padded at the end."""

    prefill: bool
    requests: Tensor  #: [n] int64 indices into the batch
    rows: Tensor  #: [n, q] int64 row indices; padding repeats the request's last row
    valid: Tensor  #: [n, q] bool
    lens: Tensor  #: [n] int64 rows per request
    context: Tensor  #: [n] int64 tokens cached before the step
    uniform: bool  #: no padding
    whole: bool  #: the group is the batch, in order and without padding: gathering is a reshape

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    def gather(self, values: Tensor) -> Tensor:
        """[T, ...] -> [n, q, ...]."""
        if self.whole:
            return values.unflatten(0, tuple(self.rows.shape))
        return values[self.rows]

    def scatter(self, out: Tensor, values: Tensor) -> None:
        """Write ``values`` [n, q, ...] of the valid rows to ``out`` [T, ...]."""
        if self.uniform:
            out[self.rows.flatten()] = values.flatten(0, 1)
        else:
            out[self.rows[self.valid]] = values[self.valid]

    def split(self, parts: int) -> list[RowGroup]:
        """The same requests in at most ``parts`` groups, to bound the memory of a step."""
        if parts <= 1 or len(self.requests) == 1:
            return [self]
        columns = [x.chunk(parts) for x in (self.requests, self.rows, self.valid, self.lens, self.context)]
        return [
            RowGroup(self.prefill, requests, rows, valid, lens, context, self.uniform, whole=False)
            for requests, rows, valid, lens, context in zip(*columns, strict=True)
        ]


def group_rows(batch: StepBatch) -> list[RowGroup]:
    """Decode and verify requests form one group; prefill requests are grouped by size, so padding stays below 2x."""
    buckets: dict[int, list[int]] = {}
    for request, length in enumerate(batch.query_lens):
        if length:
            buckets.setdefault(length.bit_length() if batch.is_prefill[request] else 0, []).append(request)
    device = batch.token_ids.device
    lens = torch.tensor(batch.query_lens, dtype=torch.int64)
    starts = lens.cumsum(0) - lens
    context = torch.tensor(batch.context_lens, dtype=torch.int64)
    groups = []
    for bucket, members in sorted(buckets.items()):
        requests = torch.tensor(members)
        own = lens[requests]
        width = int(own.max())
        offsets = torch.arange(width).expand(len(members), width)
        valid = offsets < own[:, None]
        rows = starts[requests][:, None] + torch.minimum(offsets, own[:, None] - 1)
        uniform = bool(valid.all())
        groups.append(
            RowGroup(
                prefill=bucket > 0,
                requests=requests.to(device),
                rows=rows.to(device),
                valid=valid.to(device),
                lens=own.to(device),
                context=context[requests].to(device),
                uniform=uniform,
                whole=uniform and rows.numel() == batch.num_rows,
            )
        )
    return groups
