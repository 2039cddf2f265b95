"""No test may leave PyTorch changed for the tests after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def _torch_state() -> dict[str, object]:
    drawn = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.randn": torch.randn,
        "a seeded draw": drawn.tolist(),
    }


@pytest.fixture(autouse=True)
def torch_stays_as_it_was() -> Iterator[None]:
    before, threads = _torch_state(), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # engines of the tiny presets set it for the whole process
    after = _torch_state()
    assert {name: (before[name], now) for name, now in after.items() if now != before[name]} == {}
