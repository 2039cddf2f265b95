"""The attention residual on a GPU: against FP64 with derived limits, poisoned buffers, replays."""

from __future__ import annotations

import pytest
import torch

from kimi_k3.kernels.attn_res_cases import Inputs, compare, make_inputs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kimi_k3.kernels.attn_res import Settings  # noqa: E402
from kimi_k3.kernels.attn_res_launch import PreparedAttnRes, choose  # noqa: E402
from kimi_k3.kernels.shapes import PREPARED_ROWS  # noqa: E402

SITES = {
    "embedding": {"stored": 0, "opens": True, "update": "none"},
    "one": {"stored": 1},
    "opens": {"stored": 3, "opens": True},
    "opens7": {"stored": 7, "opens": True},
    "replace": {"stored": 2, "update": "replace"},
    "eight": {"stored": 8},
    "final": {"stored": 8, "final": True},
}


def prepare(inputs: Inputs, site: dict, settings: Settings | None = None) -> PreparedAttnRes:
    return PreparedAttnRes(
        inputs.query, inputs.gamma, rows=(inputs.out.shape[0],), tap=inputs.tap is not None,
        settings=choose if settings is None else lambda *_: settings, **site,
    )  # fmt: skip


def launch(kernel: PreparedAttnRes, i: Inputs) -> None:
    kernel.run(i.delta, i.prefix, i.blocks, i.tap, i.out)


def check(rows: int, hidden: int, site: dict, kind: str, settings: Settings | None = None, tap: bool = False) -> None:
    update = site.get("update", "add")
    before = make_inputs(
        rows, hidden, stored=site["stored"], update=update, tap=tap, kind=kind, seed=rows, device="cuda"
    )
    got = before.clone()
    launch(prepare(before, site, settings), got)
    torch.cuda.synchronize()
    result = compare(got, before, **site)
    assert result["out"] <= 1, result
    assert result["bits"] == result["nan"] == 0, result


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["random", "adversarial", "coded"])
@pytest.mark.parametrize("settings", [Settings(7), Settings(4), Settings(2), Settings(1, 2), Settings(2, 2)], ids=str)
def test_every_geometry(site, kind, settings):
    check(5, 7168, SITES[site], kind, settings, tap=site == "one")


@pytest.mark.parametrize("hidden", [7168, 256])
@pytest.mark.parametrize("rows", PREPARED_ROWS)
def test_batches(hidden, rows):
    for site in SITES.values():
        check(rows, hidden, site, "random")
        check(rows, hidden, site, "adversarial", tap=True)


@pytest.mark.parametrize("settings", [Settings(7), Settings(2), Settings(1, 2)], ids=str)
def test_replays_are_bit_identical(settings):
    """1,000 replays of five launches: prefix and blocks restored in between, every bit compared."""
    site = SITES["opens7"]
    before = make_inputs(16, 7168, stored=7, tap=False, device="cuda")
    kernel, want = prepare(before, site, settings), before.clone()
    launch(kernel, want)
    got, bad = before.clone(), torch.zeros((), dtype=torch.int64, device="cuda")

    def once() -> None:
        got.prefix.copy_(before.prefix)
        got.blocks.copy_(before.blocks)
        got.out.fill_(torch.nan)
        launch(kernel, got)
        for a, b in ((got.prefix, want.prefix), (got.blocks, want.blocks), (got.out, want.out)):
            bad.add_((a.view(torch.int16) != b.view(torch.int16)).sum())

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            once()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert int(bad) == 0
