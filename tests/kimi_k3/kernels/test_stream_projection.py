"""Streaming projections without a GPU: limits, references, settings, and what the compiled code contains."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from kimi_k3.kernels import compile as cross
from kimi_k3.kernels import cubin, limits, shapes
from kimi_k3.kernels import stream_projection as sp
from kimi_k3.kernels.arch import ARCHES
from kimi_k3.kernels.stream_projection_epilogue import Epilogue
from kimi_k3.kernels.stream_projection_settings import TUNED, Setting, setting_for, token_tiles

SHAPE = shapes.ProjectionShape("test", 96, 512)
SITU = shapes.ProjectionShape("situ", 64, 512, situ=True)


def excess(shape: shapes.ProjectionShape, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> float:
    exact, _ = sp.reference(shape, x, w, dtype=torch.float64)
    limit = limits.situ_limit(x, w) if shape.situ else limits.projection_limit(x, w, exact)
    return limits.excess(out, exact, limit)


@pytest.mark.parametrize("kind", ["random", "adversarial", "coded"])
@pytest.mark.parametrize("shape", [SHAPE, SITU], ids=lambda s: s.op)
def test_ideal_rounding_and_reference_pass_the_limit(shape: shapes.ProjectionShape, kind: str) -> None:
    x, w = sp.make_inputs(shape, 8, 1, kind, device="cpu")
    exact, _ = sp.reference(shape, x, w, dtype=torch.float64)
    assert excess(shape, x, w, exact.bfloat16()) <= 1
    assert excess(shape, x, w, sp.reference(shape, x, w)[0]) <= 1


def test_declared_roundings_alone_pass_the_limit_near_powers_of_two() -> None:
    """Many outputs, so that some lie just below a power of two and are rounded above it, where units are larger."""
    shape = shapes.ProjectionShape("situ", 2048, 512, situ=True)
    x, w = sp.make_inputs(shape, 64, 4, device="cpu")
    gate, up = (t.bfloat16().double() for t in (x.double() @ w.double().T).chunk(2, dim=1))
    out = sp.situ(gate, up).bfloat16()
    exact, _ = sp.reference(shape, x, w, dtype=torch.float64)
    crossed = torch.frexp(out.double()).exponent > torch.frexp(exact).exponent
    assert int(crossed.sum()) > 10
    assert excess(shape, x, w, out) <= 1


@pytest.mark.parametrize("shape", [SHAPE, SITU], ids=lambda s: s.op)
def test_limit_notices_a_dropped_block_a_dropped_rank_and_a_stale_slot(shape: shapes.ProjectionShape) -> None:
    x, w = sp.make_inputs(shape, 8, 2, device="cpu")
    dropped = x.clone()
    dropped[:, 64:128] = 0
    assert excess(shape, x, w, sp.reference(shape, dropped, w)[0]) > 1
    ranked = x.clone()
    ranked[:, 256:] = 0  # one of two K ranges
    assert excess(shape, x, w, sp.reference(shape, ranked, w)[0]) > 1
    stale = w.clone()
    stale[:, 64:128] = w[:, 320:384]
    assert excess(shape, x, w, sp.reference(shape, x, stale)[0]) > 1
    missing = sp.reference(shape, x, w)[0]
    missing[3, 5] = float("nan")
    assert excess(shape, x, w, missing) == float("inf")


def test_coded_inputs_name_the_block() -> None:
    x, w = sp.make_inputs(SHAPE, 5, 0, "coded", device="cpu")
    out, _ = sp.reference(SHAPE, x, w)
    hot = torch.tensor([(t * 5) % 8 for t in range(5)])
    assert torch.equal(out[:, 0].float(), hot + 1.0)
    assert torch.equal(out[:, 1].float(), hot + 1.5)


def test_router_columns_stay_fp32() -> None:
    shape = shapes.ProjectionShape("front", 48, 256, fp32_rows=16)
    x, w = sp.make_inputs(shape, 3, 0, device="cpu")
    y, logits = sp.reference(shape, x, w, live=14)
    assert logits is not None
    assert y.shape == (3, 32)
    assert logits.shape == (3, 14)
    assert logits.dtype == torch.float32
    assert torch.equal(y, (x.float() @ w[16:].float().T).bfloat16())


def test_every_shard_shape_has_a_setting_that_fits() -> None:
    for name, (shape, live) in sp.cases().items():
        for arch in ARCHES.values():
            for m in shapes.PREPARED_ROWS:
                setting = setting_for(shape, m, arch.warpgroup_mma)
                kernel = sp.make_kernel(Epilogue(shape, live=live), setting, m)
                assert arch.warpgroup_mma or setting.kind != "wgmma", name
                assert kernel.smem + 1024 <= arch.smem_block, (name, m)
                assert kernel.blocks * kernel.half >= (shape.n // 2 if shape.situ else shape.n), name
                assert kernel.stages == kernel.nst or kernel.stages >= 2, (name, m)


def test_tuned_settings_are_for_shapes_that_exist() -> None:
    known = {(s.n, s.k, s.situ) for s, _ in sp.cases().values()}
    assert set(TUNED) <= known
    assert all(set(entry) <= {1, 2, 4, 8} for entry in TUNED.values())


@pytest.mark.parametrize(
    ("shape", "m", "message"),
    [
        (shapes.ProjectionShape("odd", 96, 100), 1, "K 100"),
        (shapes.ProjectionShape("odd", 90, 512), 1, "N 90"),
        (SHAPE, 65, "rows 65"),
    ],
)
def test_shapes_without_a_kernel_are_refused(shape: shapes.ProjectionShape, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setting_for(shape, m)


def test_a_ring_that_would_wait_for_itself_is_refused() -> None:
    late = Setting("wgmma", 64, 4, kblk=64, xstages=1)
    with pytest.raises(ValueError, match="two slots of x"):
        sp.make_kernel(Epilogue(SHAPE), late, 64)
    sp.make_kernel(Epilogue(SHAPE), replace(late, prompt=True), 64)
    sp.make_kernel(Epilogue(SHAPE), replace(late, xstages=2), 64)
    with pytest.raises(ValueError, match="cannot share"):
        sp.make_kernel(Epilogue(SHAPE), replace(late, xstages=2, xcast=3), 64)
    with pytest.raises(ValueError, match="cannot share"):  # a cluster of more than eight blocks
        sp.make_kernel(Epilogue(SHAPE), replace(late, xstages=2, xcast=4, ksplit=4), 64)


def test_token_tiles_cover_the_prepared_rows() -> None:
    assert [token_tiles(m) for m in (1, 8, 9, 16, 17, 32, 33, 64)] == [1, 1, 2, 2, 4, 4, 8, 8]


def test_owner_columns_must_cover_the_output() -> None:
    Epilogue(SHAPE, targets=4, owner_width=24)
    with pytest.raises(ValueError, match="do not cover"):
        Epilogue(SHAPE, targets=4, owner_width=16)
    with pytest.raises(ValueError, match="in eights"):  # a store of 16 bytes would cross two owners
        Epilogue(SHAPE, targets=8, owner_width=12)


@pytest.mark.parametrize(("n", "fp32"), [(90, 0), (104, 12)])
def test_columns_that_wide_stores_would_overrun_are_refused(n: int, fp32: int) -> None:
    with pytest.raises(ValueError, match="must be multiples of 8"):
        Epilogue(shapes.ProjectionShape("odd", n, 512, fp32_rows=fp32))


@pytest.mark.parametrize("slot", [(4104, 0), (4096, 4)])
def test_mailbox_slots_that_wide_stores_would_miss_are_refused(slot: tuple[int, int]) -> None:
    assert sp.publication_table([(4096, 8)], "cpu").tolist() == [[4096, 8]]
    with pytest.raises(ValueError, match="multiples of 16"):
        sp.publication_table([(4096, 0), slot], "cpu")


CACHE = cross.default_cache()
CASES = (
    "kimi-k3-tp8-kda_in_proj-m8",
    "kimi-k3-tp8-o_proj-m64",
    "small-tp16-moe_front-m8",
    "kimi-k3-tp16-kda_in_proj-m64",
    "kimi-k3-tp8-kda_in_proj-m64",
)


@pytest.mark.parametrize("arch", sorted(ARCHES))
@pytest.mark.parametrize("case", CASES)
def test_compiled_code(case: str, arch: str) -> None:
    result = cross.cross_compile("stream_projection", case, arch, CACHE)
    assert result.clean, result.error or "spills"
    assert 0 < result.registers <= 255
    ptx = Path(result.ptx).read_text()
    assert ".nc" not in "".join(re.findall(r"ld\.global[.\w]*", ptx)), "a load that may cross the dependency wait"
    if "wgmma" not in ptx:  # ordinary shared loads of a ring that TMA refills
        release = ptx.index("fence.proxy.async")
        assert "mbarrier.arrive" in ptx[release : release + 1500]
    code = cubin.sass(Path(result.cubin).read_bytes())
    if code:
        waits = [i for i, line in enumerate(code) if "ACQBULK" in line]
        assert waits, "no dependency wait"
        assert any("UTMALDG" in line for line in code[: waits[0]]), "no weights are requested before the wait"
        assert any("PREEXIT" in line for line in code), "dependents are never released"


def test_cross_compilation_is_cached_and_failures_are_results(tmp_path: Path) -> None:
    cache = tmp_path
    first = cross.cross_compile("prefetch", "walk", "sm_90a", cache)
    assert cross.cross_compile("prefetch", "walk", "sm_90a", cache) == first
    assert cross.cache_key("prefetch", "walk", "sm_90a") != cross.cache_key("prefetch", "walk", "sm_103a")
    bad = cross.cross_compile("prefetch", "nothing", "sm_90a", cache)
    assert not bad.clean
    assert "nothing" in bad.error


def test_contract_names_the_compiled_kernel() -> None:
    from kimi_k3.kernels import embed, prefetch, stream_read

    for module, case, contract in (
        ("stream_projection", CASES[0], sp.CONTRACTS[0]),
        ("stream_projection", CASES[3], sp.CONTRACTS[1]),
        ("embed", "small", embed.CONTRACT),
        ("prefetch", "walk", prefetch.CONTRACT),
        ("stream_read", "read", stream_read.CONTRACT),
    ):
        result = cross.cross_compile(module, case, "sm_90a", CACHE)
        found = cubin.resources(Path(result.cubin).read_bytes())
        assert len(found) == 1
        assert found[0].kernel.startswith(contract.kernel)
        parameters = re.findall(
            r"_param_\d+[,\[\n]", Path(result.ptx).read_text().split(".entry")[1].split(")")[0] + "\n"
        )
        assert len(parameters) == len(contract.parameters)
        assert cross.load_cases(module, "sm_90a")[case].contract == contract


def test_prefetch_table_is_capped() -> None:
    from kimi_k3.kernels.prefetch import entries

    weights = [torch.zeros(100, 8, dtype=torch.bfloat16) for _ in range(3)]
    assert [size for _, size in entries(weights, cap=2000)] == [1600, 400]
    assert entries(weights, cap=0) == []


def test_embedding_reference_zeroes_foreign_rows() -> None:
    from kimi_k3.kernels import embed

    table = torch.arange(32, dtype=torch.bfloat16).view(4, 8)
    out = embed.reference(torch.tensor([9, 10, 14, 13]), table, copies=2, first=10)
    assert out.shape == (2, 4, 8)
    assert torch.equal(out[0, 1], table[0])
    assert torch.equal(out[1, 3], table[3])
    assert not out[:, [0, 2]].any()
