"""Where a forward pass rounds to the activation dtype: the declared points, all of them and no others."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from model_steps import Driver, tokens
from torch import Tensor

from kimi_k3.reference.config import TINY_B
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.mla import MLA
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import PRECISIONS, Precision

T = 3  #: rows of the step; all widths below are TINY-B's

EMBEDDING = [("embedding", (T, 128))]
READ = [("attention residual after its norm", (T, 128))]
KDA = [
    ("packed projection", (T, 4 * 256 + 16 + 16)),
    ("decay logits", (T, 256)),
    ("convolution", (1, T, 3 * 256)),
    ("o", (1, T, 16, 16)),
    ("gated o", (1, T, 16, 16)),
    ("o_proj partial", (1, T, 128)),
    ("o_proj sum", (T, 128)),
]
MLA_PROJECTIONS = [
    ("packed projection", (T, 48 + 40 + 256)),
    ("normed query latent", (T, 48)),
    ("normed kv latent", (T, 32)),
    ("query", (T, 16 * 24)),
]
UNABSORBED = [("expanded keys and values", (1, T, 16 * 32)), ("o", (1, T, 16, 16))]
ABSORBED = [("absorbed query", (1, T, 16, 32)), ("latent output", (1, T, 16, 32)), ("o", (1, T, 16, 16))]
GATED_O_PROJ = [("gated o", (T, 256)), ("o_proj partial", (1, T, 128)), ("o_proj sum", (T, 128))]
ADD = [("prefix after an add", (T, 128))]


def mlp(width: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("gate and up", (T, 2 * width)),
        ("SiTU", (T, width)),
        ("down partial", (1, T, 128)),
        ("down sum", (T, 128)),
    ]


def moe() -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("latent", (T, 32)),
        ("expert gate and up", (-1, -1, 512)),
        ("expert SiTU", (-1, -1, 256)),
        ("expert output", (-1, -1, 32)),
        ("weighted sum", (1, T, 32)),
        ("latent after the reduction", (T, 32)),
        ("latent after the norm", (T, 32)),
        ("up-projection", (T, 128)),
        *mlp(256),
        ("up-projection + shared", (T, 128)),
    ]


FINAL = [*ADD, ("final mixture", (T, 128)), ("final norm", (T, 128))]


@dataclass(frozen=True)
class Recording(Precision):
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def rounded(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return super().rounded(x)


def expected(attention: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Layers KDA+dense (opener), KDA, KDA (opener), MLA, MLA (opener)."""
    points = list(EMBEDDING)
    for layer in range(5):
        opener = layer % 2 == 0
        points += ADD * (layer > 0) + READ
        points += KDA if layer < 3 else attention
        points += ADD * (not opener) + READ
        points += mlp(256) if layer == 0 else moe()
    return points + FINAL


@pytest.mark.parametrize("prefill", [True, False])
def test_rounding_happens_exactly_at_the_declared_points(prefill: bool) -> None:
    base = PRECISIONS["bf16"]
    recording = Recording(base.activations, base.compute, base.kv, base.state, base.conv)
    model = Model(TINY_B, random_weights(TINY_B, 0), recording)
    driver = Driver(model, draft_length=T - 1)
    if not prefill:
        driver.step({0: tokens(1)})
    recording.shapes.clear()
    hidden = driver.step({0: tokens(T)})[0]
    # keys are expanded for the whole context; here the step is the context
    attention = MLA_PROJECTIONS + (UNABSORBED if prefill else ABSORBED) + GATED_O_PROJ
    points = expected(attention)
    assert len(recording.shapes) == len(points)
    for got, (name, shape) in zip(recording.shapes, points, strict=True):
        if name.startswith("expert"):  # as many groups as the router chose
            assert len(got) == 3, name
            assert got[-1] == shape[-1], name
        else:
            assert got == shape, name
    recording.shapes.clear()
    model.compute_logits(hidden)
    assert recording.shapes == [(T, 512)]


def test_without_rounding_the_compute_dtype_is_kept() -> None:
    precision = PRECISIONS["fp64"]
    x = torch.randn(4, dtype=torch.float64)
    assert torch.equal(precision.rounded(x), x)


def test_prefill_expands_rows_and_decode_absorbs(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(Model(TINY_B, random_weights(TINY_B, 0), PRECISIONS["bf16"]))

    def refuse(*args: Tensor) -> Tensor:
        raise AssertionError("wrong form of attention")

    with monkeypatch.context() as patch:
        patch.setattr(MLA, "absorbed", refuse)
        driver.step({0: tokens(4)})
    monkeypatch.setattr(MLA, "unabsorbed", refuse)
    driver.step({0: [1]})
