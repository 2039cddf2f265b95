"""The KDA decode core on a GPU: against FP64 with derived limits, poisoned buffers, replays, launches, rollouts."""

from __future__ import annotations

import pytest
import torch

from kimi_k3.kernels.kda_core_cases import Inputs, compare, make_inputs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kimi_k3.kernels.kda_core import HEAD, Settings  # noqa: E402
from kimi_k3.kernels.kda_core_launch import PreparedKdaCore, choose  # noqa: E402
from kimi_k3.kernels.shapes import PREPARED_ROWS, pad16  # noqa: E402


def pitch_of(heads: int) -> int:
    return pad16(4 * heads * HEAD + HEAD + heads)


def prepare(inputs: Inputs, settings: Settings | None = None, early: bool = True) -> PreparedKdaCore:
    sms = 4 if settings is not None and settings.resident else None  # several turns even with few requests
    i = inputs
    native = i.accepted is not None
    made = PreparedKdaCore(
        i.f_b, i.conv_weight, i.a_log, i.dt_bias, i.norm_weight, pitch=i.projected.shape[1], tokens=i.tokens,
        columns=i.slots.shape[1] if native else 0, index_dtype=i.slots.dtype, early=early, sms=sms,
        settings=choose if settings is None else lambda *_: settings,
    )  # fmt: skip
    made.prepare([i.slots.shape[0]])
    return made


def fresh_rows(rows: int, heads: int, seed: int) -> torch.Tensor:
    """Projected rows whose raw decay logits do not depend on the summation order, as ``make_inputs`` "coded"."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, pitch_of(heads), generator=g, device="cuda")
    at = 4 * heads * HEAD
    x[:, at : at + HEAD] = torch.randint(-16, 17, (rows, HEAD), generator=g, device="cuda") / 16.0
    return x.bfloat16()


def launch(kernel: PreparedKdaCore, i: Inputs) -> None:
    kernel.run(i.projected, i.slots, i.accepted, i.conv_state, i.state, i.out)


def check(before: Inputs, settings: Settings | None = None, early: bool = True) -> None:
    kernel = prepare(before, settings, early)
    for poison in (torch.nan, 7.0):
        got = before.clone()
        got.out.fill_(poison)
        launch(kernel, got)
        torch.cuda.synchronize()
        result = compare(got, before)
        assert max(result["out"], result["state"]) <= 1, result
        assert result["state_relative"] <= 1e-4, result
        assert result["untouched"] == result["history"] == result["nan"] == 0, result


GEOMETRIES = [
    Settings(), Settings(lanes=16), Settings(lanes=32), Settings(resident=1), Settings(resident=2, occupancy=1),
    Settings(resident=2), Settings(lanes=16, resident=2), Settings(occupancy=3), Settings(cluster=2),
    Settings(cluster=2, lanes=16), Settings(cluster=4, rows_per_pass=4), Settings(cluster=4, lanes=16, rows_per_pass=4),
    Settings(cluster=8, lanes=16, rows_per_pass=2), Settings(cluster=8, warps=4, rows_per_pass=4),
    Settings(bulk_store=True), Settings(lanes=16, occupancy=3, bulk_store=True), Settings(cluster=2, bulk_store=True),
]  # fmt: skip


def label(s: Settings) -> str:
    return f"c{s.cluster}w{s.warps}L{s.lanes}o{s.occupancy}r{s.resident}{'b' * s.bulk_store}"


@pytest.mark.parametrize("settings", GEOMETRIES, ids=label)
@pytest.mark.parametrize("kind", ["coded", "adversarial"])
@pytest.mark.parametrize(("tokens", "native"), [(1, False), (1, True), (3, True), (8, True)])
def test_every_geometry(settings, kind, tokens, native):
    for draft_length in (0, 7) if not native else (7,):
        check(
            make_inputs(7, 2, pitch_of(2), tokens=tokens, native=native, draft_length=draft_length, kind=kind,
                        padding=2, seed=tokens, device="cuda"), settings
        )  # fmt: skip


@pytest.mark.parametrize("heads", [12, 6, 16, 2, 1])
@pytest.mark.parametrize("requests", PREPARED_ROWS)
def test_shards_and_batches(heads, requests):
    padding = requests // 4
    check(make_inputs(requests, heads, pitch_of(heads), kind="coded", padding=padding, seed=requests, device="cuda"))


@pytest.mark.parametrize("heads", [12, 6, 2])
@pytest.mark.parametrize(
    ("tokens", "requests"), [(4, 1), (4, 3), (5, 2), (6, 2), (7, 1), (8, 1), (8, 3), (8, 8), (4, 16)]
)
def test_verify(heads, tokens, requests):
    for accepted in (None, 1, 8):
        check(
            make_inputs(requests, heads, pitch_of(heads), tokens=tokens, native=True, draft_length=7, accepted=accepted,
                        padding=requests // 3, seed=requests, device="cuda", index_dtype=torch.int64)
        )  # fmt: skip


@pytest.mark.parametrize("settings", [None, Settings(lanes=16, bulk_store=True)], ids=["chosen", "bulk"])
def test_null_slots_inside_a_request_are_not_written(settings):
    before = make_inputs(3, 2, pitch_of(2), tokens=8, native=True, draft_length=7, accepted=2, device="cuda")
    before.slots[0, 3], before.slots[0, 6], before.slots[2, 7] = 0, -1, 0
    check(before, settings)


def test_slots_beyond_32_bits():
    """Slot strides as of a page pool of many GB: byte offsets above 2**32, element offsets above 2**31."""
    before = make_inputs(2, 1, pitch_of(1), seed=4, device="cuda")
    total, stride = before.state.shape[0], 720_000_000
    big = torch.empty((total - 1) * stride + HEAD * HEAD, device="cuda")
    state = big.as_strided((total, 1, HEAD, HEAD), (stride, HEAD * HEAD, HEAD, 1))
    state.copy_(before.state)
    got = before.clone()
    got.state = state
    launch(prepare(before), got)
    got.state = state.clone()
    result = compare(got, before)
    assert max(result["out"], result["state"]) <= 1, result
    assert result["untouched"] == 0, result


def test_random_logits_stay_within_the_loose_profile():
    """Gaussian F_B and f: a raw logit near a BF16 tie may round the other way, so only norms are bounded."""
    before = make_inputs(16, 12, pitch_of(12), kind="random", device="cuda")
    got, want = before.clone(), before.clone()
    launch(prepare(before), got)
    want.state = want.state.double()
    exact = want.apply(compute=torch.float64, rounded=False)
    assert (got.out.double() - exact).norm() / exact.norm() < 6e-3
    live = before.slots.long()
    assert (got.state[live].double() - want.state[live]).norm() / want.state[live].norm() < 3e-3


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("settings", GEOMETRIES, ids=label)
def test_replays_are_bit_identical(settings, tokens):
    """1,000 replays of a graph of five launches: 5,000 launches, states restored in between, every bit compared."""
    native = tokens > 1
    kw = {"tokens": tokens, "native": native, "draft_length": 7 * native, "padding": 1}
    before = make_inputs(8, 12, pitch_of(12), device="cuda", **kw)
    kernel, want = prepare(before, settings), before.clone()
    launch(kernel, want)
    got, bad = before.clone(), torch.zeros((), dtype=torch.int64, device="cuda")

    def once() -> None:
        got.state.copy_(before.state)
        got.conv_state.copy_(before.conv_state)
        got.out.fill_(torch.nan)
        launch(kernel, got)
        for a, b in ((got.state, want.state), (got.conv_state, want.conv_state), (got.out, want.out)):
            size = torch.int32 if a.dtype == torch.float32 else torch.int16
            bad.add_((a.view(size) != b.view(size)).sum())

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


@pytest.mark.parametrize("heads", [12, 2])
def test_rollout_of_512_steps(heads):
    """The state after 512 steps against FP64 fed with the same rounded logits; plain decode, then verify steps."""
    state = make_inputs(2, heads, pitch_of(heads), seed=0, device="cuda")
    kernel = prepare(state, early=False)
    exact = state.clone()
    exact.state = exact.state.double()
    worst = 0.0
    for step in range(512):
        state.projected = exact.projected = fresh_rows(2, heads, step)
        launch(kernel, state)
        want = exact.apply(compute=torch.float64)
        worst = max(worst, float((state.out.double() - want).norm() / want.norm()))
    live = state.slots.long()
    error = (state.state[live].double() - exact.state[live]).norm() / exact.state[live].norm()
    assert error < 1e-4, float(error)
    assert worst < 4e-3, worst
    assert torch.equal(state.conv_state[live], exact.conv_state[live])


def test_verify_chain_follows_accepted_tokens():
    """Verify steps with random acceptance end in the states of the accepted tokens run one by one."""
    heads, pitch = 2, pitch_of(2)
    verify = make_inputs(2, heads, pitch, tokens=8, native=True, draft_length=7, accepted=1, device="cuda")
    plain = verify.clone()
    plain.slots, plain.accepted, plain.tokens = verify.slots[:, 0].contiguous(), None, 1
    plain.out = plain.out[:2].clone()
    run, step = prepare(verify, early=False), prepare(plain, early=False)
    g = torch.Generator().manual_seed(5)
    for turn in range(12):
        verify.projected = fresh_rows(16, heads, turn)
        launch(run, verify)
        count = int(torch.randint(1, 9, (1,), generator=g))
        for t in range(count):
            plain.projected = verify.projected.view(2, 8, pitch)[:, t].contiguous()
            launch(step, plain)
            rows = verify.out.view(2, 8, -1)[:, t]
            assert (rows.float() - plain.out.float()).norm() / plain.out.float().norm() < 1e-3
        verify.accepted.fill_(count)
        ours = verify.state[verify.slots[:, count - 1].long()]
        theirs = plain.state[plain.slots.long()]
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
