"""What a run on an H200 does before and between its kernels, with the launches left out: providers, checks, tables,
addresses and argument lists, at full width. Nothing is computed, so nothing is compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from kimi_k3.decode import cases
from kimi_k3.decode.numerics import rig
from kimi_k3.decode.numerics.families import Draw
from kimi_k3.decode.ops import OpContext
from kimi_k3.kernels import (
    attn_res_launch,
    bench,
    bench_inputs,
    kda_core_launch,
    runtime,
    shard_bench,
    stock,
    stream_projection,
)
from kimi_k3.target import TARGET

LAUNCHERS = (attn_res_launch, kda_core_launch)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keys of the kernels that were launched; a launch checks its arguments against those of the compilation."""
    keys: list[Any] = []
    checked = runtime.check_tensor

    def compiled(key: Any, fn: Any, args: tuple[Any, ...]) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            assert len(given) == len(args), key
            pointers = [
                ("Pointer" in type(a).__name__, "Pointer" in type(g).__name__) for a, g in zip(args, given, strict=True)
            ]
            assert all(a == g for a, g in pointers), key
            keys.append(key)

        return launch

    def check_tensor(what: str, tensor: torch.Tensor, *args: Any, **kw: Any) -> None:
        with pytest.raises(ValueError, match=f"^{what}: expected a CUDA tensor, got one on cpu$"):
            checked(what, tensor, *args, **kw)
        assert tensor.data_ptr() % kw.get("align", args[2] if len(args) > 2 else 16) == 0, what

    for name, stand_in in (("compiled", compiled), ("check_tensor", check_tensor), ("current_stream", lambda: None)):
        for module in (runtime, *LAUNCHERS):
            monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(OpContext, "beside", lambda self, device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: SimpleNamespace(multi_processor_count=132))
    for module in (rig, cases):
        monkeypatch.setattr(module, "device_family", lambda device: "sm_90")

    def zeros(self: Draw, name: str, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.zeros(shape, dtype=torch.float32 if std != 1.0 else dtype)

    for name in ("weight", "activation"):
        monkeypatch.setattr(Draw, name, zeros)
    return keys


def test_numerics_of_a_shard(launched: list[Any]) -> None:
    ops = set()
    for case in cases.shard_cases("standard", "cpu"):
        if case.shape.tp != 16 or (case.shape.rows, case.shape.query_len) not in ((8, 1), (16, 8)):
            continue
        assert cases._provider(case, "auto") == "cute", case.name
        bound, before = cases.bind(case, "cute"), len(launched)
        bound.run(bound.inputs("normal", 3), float("nan"))
        assert len(launched) == before + 1, case.name
        ops.add(case.op)
    assert ops == {
        "attn_res", "in_proj", "kda_core", "embed", "oproj_publish", "dense_gate_up", "dense_down_push", "moe_front",
        "shared_gate_up", "shared_down_push", "prefetch",
    }  # fmt: skip


def test_benchmarks_of_a_shard(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (bench_inputs.ProjectionLayers, bench_inputs.KdaLayers, bench_inputs.ResidualSites, bench_inputs.Peers)
    for kind in inputs:
        defaults = tuple("cpu" if d == "cuda" else d for d in kind.__init__.__defaults__ or ())
        monkeypatch.setattr(kind.__init__, "__defaults__", defaults)

    def normal_on(device: str, seed: int = 1) -> Callable[..., torch.Tensor]:
        return lambda *shape, scale=1.0, dtype=torch.float32: torch.zeros(shape, dtype=dtype)

    def time_launches(name: str, launch: Callable[[int], None], count: int, **kw: Any) -> bench.Timing:
        if name != "torch.mm":
            launch(count - 1)
        return bench.Timing(name, 1.0, 1.0, 1.0, 1, count)

    monkeypatch.setattr(bench_inputs, "normal_on", normal_on)
    monkeypatch.setattr(bench, "distinct", lambda *args, **kw: 1)
    monkeypatch.setattr(bench, "time_launches", time_launches)
    monkeypatch.setattr(stock, "vllm", lambda: None)
    timed = [b for b in shard_bench.benchmarks("standard") if b.tp in (0, 16) and b.rows in (8, 16)]
    for b in timed:
        mine, library = b.time(4.6, 1)
        assert mine.us == 1.0
        assert (library is None) == ("/published" in b.name or b.op in ("kda_core", "attn_res")), b.name
    assert len(launched) == len(timed) == 38
    assert {b.name for b in TARGET.kernel_benchmarks("standard", {})} >= {b.name for b in timed}


def test_a_launch_with_an_unaligned_or_wrong_buffer_is_noticed(launched: list[Any]) -> None:
    """The stand-ins are not deaf."""
    shape, _ = stream_projection.cases()["small-tp8-o_proj"]
    op = stream_projection.StreamProjection(shape, (2,))
    x, w = torch.zeros(2, shape.k, dtype=torch.bfloat16), torch.zeros(shape.n, shape.k, dtype=torch.bfloat16)
    y = torch.zeros(2, shape.n, dtype=torch.bfloat16)
    op.check(x, w, y)
    with pytest.raises(AssertionError):
        op.check(x, w, torch.zeros(2, shape.n))
    with pytest.raises(AssertionError, match="weight"):
        op.check(x, torch.zeros(w.numel() + 1, dtype=torch.bfloat16)[1:].view(w.shape), y)
    op.run(x, w, y)
    assert len(launched) == 1
