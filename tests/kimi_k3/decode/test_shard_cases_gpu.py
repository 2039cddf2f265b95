"""Numerics cases of one rank's shard at full width on a GPU, every input family, served by the CuTe kernels."""

from __future__ import annotations

import pytest
import torch
from test_shard_cases import good

from kimi_k3.decode.cases import _provider as served_by
from kimi_k3.decode.cases import shard_cases
from kimi_k3.decode.numerics.families import FAMILIES
from kimi_k3.decode.numerics.rig import OpCase

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.mark.parametrize("case", shard_cases("smoke", "cuda"), ids=lambda c: c.name.replace("/", "-"))
def test_full_width(case: OpCase) -> None:
    assert served_by(case, "auto") == "cute"
    for family in FAMILIES:
        good(case, family, "cute")
