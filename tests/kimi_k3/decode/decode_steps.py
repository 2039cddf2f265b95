"""Drives the stock model and executors over the same steps in tests."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kimi_k3.decode import registry
from kimi_k3.decode.executor import Executor
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.registry import Provider
from kimi_k3.reference.batch import RequestRows, StepBatch, build_batch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.config import PRESETS
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.weights import ModelWeights

PAGE = 4


@cache
def weights(preset: str = "tiny-a", seed: int = 0) -> ModelWeights:
    return random_weights(PRESETS[preset], seed)


@cache
def model(precision: str = "fp64", preset: str = "tiny-a", tp: int = 1) -> Model:
    return Model(PRESETS[preset], weights(preset), PRECISIONS[precision], tp=tp)


def prompts(count: int, length: int = 6, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 500, (count, length), generator=generator).tolist()


@dataclass
class Requests:
    """Sequences on one set of caches. Unused cache memory is NaN, pages and slots are shuffled."""

    model: Model
    count: int
    draft_length: int = 0
    max_tokens: int = 48
    context: list[int] = field(init=False)
    accepted: list[int] = field(init=False)
    caches: Caches = field(init=False)

    def __post_init__(self) -> None:
        shuffle = random.Random(self.count)
        width, each = 1 + self.draft_length, -(-self.max_tokens // PAGE)
        pages, slots = list(range(self.count * each)), list(range(1, 1 + self.count * width))
        shuffle.shuffle(pages)
        shuffle.shuffle(slots)
        self.pages = [pages[i * each : (i + 1) * each] for i in range(self.count)]
        self.slots = [slots[i * width : (i + 1) * width] for i in range(self.count)]
        self.context, self.accepted = [0] * self.count, [1] * self.count
        self.caches = Caches.allocate(
            self.model.config,
            self.model.precision,
            pages=len(pages),
            page_size=PAGE,
            slots=1 + len(slots),
            draft_length=self.draft_length,
        )
        for tensor in all_tensors(self.caches):
            tensor.copy_(torch.full(tensor.shape, float("nan")).to(tensor.dtype))

    def batch(self, rows: Sequence[Sequence[int]], prefill: bool = False) -> StepBatch:
        parts = [
            RequestRows(ids, self.context[i], prefill, self.pages[i], self.slots[i], self.accepted[i], len(ids) - 1)
            for i, ids in enumerate(rows)
        ]
        return build_batch(parts, PAGE)

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Run the prompts on the stock path; the greedy next token of each."""
        hidden = self.model.forward(self.batch(rows, prefill=True), self.caches)
        last = torch.tensor([len(ids) for ids in rows]).cumsum(0) - 1
        self.context = [len(ids) for ids in rows]
        return self.greedy(hidden[last])

    def greedy(self, hidden: Tensor) -> list[int]:
        return self.model.compute_logits(hidden).argmax(-1).tolist()

    def accept(self, counts: Sequence[int]) -> None:
        """After a verify step: so many rows of each request stand."""
        self.context = [c + n for c, n in zip(self.context, counts, strict=True)]
        self.accepted = list(counts)

    def fork(self) -> Requests:
        """The same sequences with caches of their own."""
        twin = copy.copy(self)
        twin.caches = copy.deepcopy(self.caches)
        twin.context, twin.accepted = list(self.context), list(self.accepted)
        return twin

    def executor(self, tp: int, **options: Any) -> Executor:
        return Executor(self.model, self.caches, tp=tp, draft_length=self.draft_length, **options)

    def decode(self, first: Sequence[int], steps: int, run: Callable[[StepBatch], Tensor]) -> list[list[int]]:
        """Greedy tokens per request, ``first`` included; ``run`` computes the hidden states of a step."""
        tokens = [[t] for t in first]
        for _ in range(steps):
            hidden = run(self.batch([[ids[-1]] for ids in tokens]))
            for ids, token in zip(tokens, self.greedy(hidden), strict=True):
                ids.append(token)
            self.accept([1] * self.count)
        return tokens


def specialized(executor: Executor) -> Callable[[StepBatch], Tensor]:
    """Runs every step specialised, or fails."""

    def run(batch: StepBatch) -> Tensor:
        plan = executor.plan(batch)
        assert plan.specialized, plan.reason
        return executor.run(plan, batch)

    return run


def stock(requests: Requests) -> Callable[[StepBatch], Tensor]:
    return lambda batch: requests.model.forward(batch, requests.caches)


def all_tensors(caches: Caches) -> list[Tensor]:
    return [t for store in (caches.kv, caches.conv, caches.recurrent) for t in store.values()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def worst(a: Caches, b: Caches) -> float:
    """Largest difference of two sets of caches; NaN must be in the same places."""
    pairs = zip(all_tensors(a), all_tensors(b), strict=True)
    assert all(torch.equal(x.isnan(), y.isnan()) for x, y in pairs)
    pairs = zip(all_tensors(a), all_tensors(b), strict=True)
    return max(float((x - y).nan_to_num().abs().max()) for x, y in pairs)


def _provider(op: str, change: Callable[[tuple[Any, ...]], None], after: bool) -> dict[str, Provider]:
    registry.load("torch")
    real = registry._PROVIDERS[op]["torch"].run

    def run(context: OpContext, *args: Any) -> None:
        if not after:
            change(args)
        real(context, *args)
        if after:
            change(args)

    return {op: Provider(op, "torch", run)}


def spoiled_after(op: str, change: Callable[[tuple[Any, ...]], None]) -> dict[str, Provider]:
    """A provider that does what torch does, then ``change``s the arguments."""
    return _provider(op, change, after=True)


def spoiled_before(op: str, change: Callable[[tuple[Any, ...]], None]) -> dict[str, Provider]:
    """A provider that ``change``s the arguments, then does what torch does."""
    return _provider(op, change, after=False)
