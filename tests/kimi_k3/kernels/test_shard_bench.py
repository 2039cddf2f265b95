"""Kernel timings of a shard without a GPU: what is timed, bytes and goals, and that the data fits the kernels."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from fasttrack.bundle import seal, verify
from fasttrack.errors import UsageError
from fasttrack.plan import planner
from fasttrack.run.runner import Request, validate
from fasttrack.target import KernelBenchmarkTarget
from kimi_k3 import target_kernels
from kimi_k3.decode.ops import SCHEMAS
from kimi_k3.kernels import attn_res_cases, kda_core_cases, shapes, shard_bench
from kimi_k3.kernels.bench import Timing
from kimi_k3.kernels.bench_inputs import XS, KdaLayers, Peers, ProjectionLayers, ResidualSites
from kimi_k3.kernels.shard_bench import OPS, SITES, Goal, benchmarks
from kimi_k3.kernels.stream_projection import cases, reference
from kimi_k3.target import TARGET

ALL = list(benchmarks())
BY_NAME = {b.name: b for b in ALL}


def test_every_kernel_is_timed_at_every_batch_of_both_sizes() -> None:
    assert len(BY_NAME) == len(ALL)
    rows = {1, 2, 4, 8, 16, 32, 64}
    for op in OPS:
        for tp in (8, 16):
            assert {b.rows for b in ALL if b.name.startswith(f"{op}/tp{tp}/")} == rows, op
    plain = Counter(b.tp for b in ALL if b.op == "kda_core" and b.query_len == 1)
    assert plain == {8: 7, 16: 7}
    assert {b.query_len for b in ALL if b.op == "kda_core"} == {1, 4, 8}
    assert {b.rows for b in ALL if b.name.startswith("attn_res/final/")} == rows
    assert {b.op for b in ALL} - {"lm_head"} <= set(SCHEMAS)
    assert {b.rows for b in benchmarks("smoke")} == {1, 8, 64}
    with pytest.raises(ValueError, match="unknown tier 'tiny'"):
        next(benchmarks("tiny"))


def test_bytes_count_everything_once() -> None:
    assert BY_NAME["kda_in_proj/tp8/m8"].bytes == 2 * (6288 * 7168 + 8 * (7168 + 6288))
    assert BY_NAME["shared_gate_up/tp16/m1"].bytes == 2 * (768 * 7168 + 7168 + 384)
    # router logits are FP32: 112 columns of 4 bytes, 448 of 2
    assert BY_NAME["moe_front/tp8/m2"].bytes == 2 * 560 * 7168 + 2 * (2 * 7168 + 4 * 112 + 2 * 448)
    state = 12 * 128 * 128 * 4
    assert 2 * state * 64 < BY_NAME["kda_core/tp8/b64"].bytes < 2.2 * state * 64
    assert BY_NAME["kda_core/tp8/b8q8"].bytes > 9 * state * 8  # one state in, eight out
    # eight blocks, prefix and delta in, prefix and output out; query FP32 and gamma once
    assert BY_NAME["attn_res/pre8/m4"].bytes == 4 * (8 + 2 + 2) * 7168 * 2 + 7168 * (4 + 2)


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("kda_in_proj/tp8/m8", Goal(fraction=0.95)),
        ("kda_in_proj/tp16/m8", Goal(fraction=0.90)),
        ("o_proj/tp8/m1", Goal(fraction=0.90)),
        ("lm_head/tp16/m64", Goal(fraction=0.85)),
        ("kda_in_proj/tp8/m16", None),
        ("moe_front/tp8/m1", None),
        ("kda_core/tp8/b1", Goal(us=5.0)),
        ("kda_core/tp16/b16", Goal(fraction=0.70)),
        ("kda_core/tp8/b8", None),
        ("kda_core/tp8/b8q8", None),
    ],
)
def test_goals(name: str, goal: Goal | None) -> None:
    assert BY_NAME[name].goal == goal


def test_the_harness_gets_seconds_and_a_floor_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {b.name: b for b in TARGET.kernel_benchmarks("smoke", {"checkpoint": "shard"})}
    assert isinstance(TARGET, KernelBenchmarkTarget)
    assert set(listed) == {b.name for b in benchmarks("smoke")}
    assert {b.tp for b in listed.values()} == {0, 8, 16}
    assert {b.op for b in listed.values()} - {"kimi_k3::lm_head"} <= set(TARGET.describe().ops)
    assert listed["kda_core/tp8/b1"].goal_s == pytest.approx(5e-6)
    assert listed["kda_core/tp8/b1"].goal_fraction is None
    assert listed["o_proj/tp16/m64"].goal_fraction == 0.85

    asked: list[tuple[float, int]] = []

    def time(shape: object, live: int, m: int, floor: float, replays: int) -> tuple[Timing, Timing]:
        asked.append((floor, replays))
        return Timing("ours", 20.0, 19.0, 21.0, replays, 44), Timing("torch.mm", 25.0, 24.0, 26.0, replays, 44)

    monkeypatch.setattr(shard_bench, "time_projection", time)
    monkeypatch.setattr(target_kernels, "_read_floor", lambda: 4.6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    bench = next(b for b in TARGET.kernel_benchmarks("smoke", {}) if b.name == "kda_in_proj/tp8/m8")
    found = bench.run()
    assert asked == [(4.6, 60)]
    assert found.floor_s == pytest.approx(bench.bytes / 4.6e12)
    assert (found.kernel.seconds, found.kernel.samples) == (pytest.approx(20e-6), 60)
    assert found.reference is not None
    assert (found.reference.what, found.reference.seconds) == ("torch.mm", pytest.approx(25e-6))
    assert found.device == "NVIDIA H200"


def test_a_goal_is_met_or_missed() -> None:
    timing = Timing("x", us=10.0, p10=9.0, p90=11.0, replays=60, launches=16, bytes=1, floor_us=9.0)
    assert Goal(fraction=0.90).met(timing)
    assert not Goal(fraction=0.91).met(timing)
    assert Goal(us=10.0).met(timing)
    assert not Goal(us=9.9).met(timing)


@pytest.mark.parametrize("op", ["o_proj", "moe_front", "shared_gate_up"])
def test_projection_data(op: str) -> None:
    shape, live = cases()[f"small-tp8-{op}"]
    layers = ProjectionLayers(shape, live, 3, 20, "cpu")
    assert len({w.data_ptr() for w in layers.weights}) == 20
    i = XS + 1
    y, y32 = reference(shape, layers.xs[i % XS], layers.weights[i], live)
    assert y.shape == layers.y.shape
    assert (y32 is None) == (layers.y32 is None)
    assert y32 is None or layers.y32 is None or y32.shape == layers.y32.shape
    layers.matmul(i)
    assert torch.equal(layers.product, layers.xs[i % XS] @ layers.weights[i].T)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 0), (4, 8)])
def test_kda_data(tokens: int, columns: int) -> None:
    k = KdaLayers(2, 3, tokens, columns, 2, "cpu")
    assert k.pitch == shapes.pad16(4 * 256 + 128 + 2)
    out = k.out[1].clone()
    given = (k.projected, k.f_b[1], k.conv_weight[1], k.a_log[1], k.dt_bias[1], k.norm[1], k.slots, k.accepted)
    before = k.state[1].clone()
    kda_core_cases.reference(*given, k.conv[1], k.state[1], out, tokens)
    assert bool(out.isfinite().all())
    changed = (k.state[1] != before).flatten(1).any(1).sum()
    assert int(changed) == 3 * tokens
    assert int(k.slots.min()) == 1


@pytest.mark.parametrize("site", SITES)
def test_residual_data(site: str) -> None:
    s = ResidualSites(SITES[site], 2, 256, 2, "cpu")
    out = s.out[1].clone()
    attn_res_cases.reference(s.delta[1], s.prefix[1], s.blocks[1], s.query[1], s.gamma[1], None, out, **SITES[site])
    assert bool(out.isfinite().all())


def test_published_outputs_are_timed_and_counted() -> None:
    found = {b.name for b in ALL if b.name.endswith("/published")}
    ops = ("o_proj", "moe_front", "shared_down", "dense_down")
    assert found == {f"{op}/tp{tp}/m{m}/published" for op in ops for tp in (8, 16) for m in (1, 8, 64)}
    assert all(BY_NAME[name].goal is None for name in found)
    weights = 2 * 7168 * 1536
    assert BY_NAME["o_proj/tp8/m8/published"].bytes == weights + 2 * 8 * 1536 + 8 * 2 * 8 * 7168  # to eight ranks
    assert BY_NAME["o_proj/tp8/m64/published"].bytes == BY_NAME["o_proj/tp8/m64"].bytes  # to the owners
    assert BY_NAME["moe_front/tp16/m1/published"].bytes > BY_NAME["moe_front/tp16/m1"].bytes


@pytest.mark.parametrize(("name", "m"), [("o_proj", 8), ("o_proj", 64), ("moe_front", 8), ("shared_down", 1)])
def test_addresses_of_the_peers(name: str, m: int) -> None:
    """Written through the table and the pitch as the kernel does, a rank's columns land where readers look."""
    shape, live = cases()[f"small-tp8-{name}"]
    ranks, rank = 8, 3
    p = Peers(shape, live, m, ranks, rank, "cpu")
    own = shape.n - shape.fp32_rows
    assert p.targets == ranks
    assert p.boxes.shape == (ranks, m, p.owner_width or (own * ranks if live else own))
    for d in range(ranks):
        at = (int(p.table[d, 0]) - p.boxes.data_ptr()) // 2
        assert at == d * m * p.pitch[0] + (rank * own if live else 0)
        assert at + (m - 1) * p.pitch[0] + (p.owner_width or own) <= (d + 1) * m * p.pitch[0]
        if p.logits is not None:
            at = (int(p.table[d, 1]) - p.logits.data_ptr()) // 4
            assert at == d * m * p.pitch[1] + rank * live


@pytest.mark.parametrize("tier", ["smoke", "standard"])
def test_the_manifest_of_an_h200_from_plan_to_verified_bundle(
    tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the GPU: times are made up, 9 us over a floor that makes every goal but a few."""

    def time(*args: object) -> tuple[Timing, Timing]:
        return Timing("ours", 9.0, 8.0, 10.0, 60, 16), Timing("torch.mm", 10.0, 9.0, 11.0, 60, 16)

    for name in ("time_projection", "time_publication", "time_kda", "time_residual"):
        monkeypatch.setattr(shard_bench, name, time)
    monkeypatch.setattr(target_kernels, "_read_floor", lambda: 4.6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(planner, "hardware_gap", lambda manifest: "")
    manifest = Path(__file__).parents[3] / "configs/kimi-k3-h200-shard.yaml"
    outcome = validate(Request(manifest, tier, ("performance",), run_dir=tmp_path / "run"))
    verdicts = {r.gate: r for r in outcome.results}
    assert verdicts["performance.kernels"].verdict == "pass"
    assert "missed: " in verdicts["performance.kernels"].reason
    assert verdicts["numerics.error"].verdict == "not_run"
    numbers = {n.name: n.value for n in verdicts["performance.kernels"].numbers}
    assert numbers["kernels timed"] == len({b.name for b in benchmarks(tier)})
    bundle = seal(tmp_path / "run", tmp_path / "bundles", pr=1)
    sealed = verify(bundle)
    assert sealed.intact
    figure = bundle / "kernels.svg"
    shown = "".join(node.text or "" for node in ElementTree.fromstring(figure.read_text()).iter())
    assert "kda_core/tp8/b*" in shown
    assert "o_proj/tp16/m*/published" in shown
    report = (bundle / "report.md").read_text()
    assert "![kernel times](kernels.svg)" in report
    assert "9.00 us, " in report
    figure.unlink()
    assert any("kernels.svg: is missing" in p for p in verify(bundle).problems)
    assert sealed.verdict == "inconclusive"


def test_options_are_checked_where_no_engine_is_built() -> None:
    with pytest.raises(UsageError, match="unknown option"):
        TARGET.numerics_cases("smoke", {"checkpiont": "shard"})
