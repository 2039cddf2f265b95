"""Streaming projections, embedding and prefetch on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

from kimi_k3.kernels import limits  # noqa: E402
from kimi_k3.kernels import stream_projection as sp  # noqa: E402

NAN = float("nan")
OPS = ("kda_in_proj", "mla_in_proj", "mla_q_b", "o_proj", "moe_front", "shared_gate_up", "shared_down")
ROWS = (1, 2, 3, 5, 8, 9, 16, 31, 32, 33, 64)


def outputs(op: sp.StreamProjection, m: int) -> dict[str, torch.Tensor | None]:
    """NaN-filled outputs with one guard row."""
    live = op.epilogue.live
    y32 = torch.full((m + 1, live), NAN, device="cuda") if live else None
    return {"y": torch.full((m + 1, op.columns), NAN, device="cuda", dtype=torch.bfloat16), "y32": y32}


def cut(out: dict[str, torch.Tensor | None], m: int) -> dict[str, torch.Tensor | None]:
    return {k: None if t is None else t[:m] for k, t in out.items()}


def excess(op: sp.StreamProjection, x: torch.Tensor, w: torch.Tensor, out: dict[str, torch.Tensor | None]) -> float:
    shape, live, m = op.shape, op.epilogue.live, x.shape[0]
    exact, exact32 = sp.reference(shape, x, w, live, torch.float64)
    y, y32 = out["y"], out["y32"]
    assert y is not None
    limit = limits.situ_limit(x, w) if shape.situ else limits.projection_limit(x, w[shape.fp32_rows :], exact)
    worst = limits.excess(y[:m], exact, limit)
    if exact32 is not None and y32 is not None:
        bound = limits.accumulation(x, w[:live]) + 2.0**-24 * exact32.abs() + 2.0**-149
        worst = max(worst, limits.excess(y32[:m], exact32, bound))
    return worst


@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("prefix", ["kimi-k3-tp8", "kimi-k3-tp16", "small-tp8", "small-tp16"])
def test_within_limits_and_nothing_else_written(prefix: str, op_name: str) -> None:
    shape, live = sp.cases()[f"{prefix}-{op_name}"]
    op = sp.StreamProjection(shape, ROWS, live=live)
    for m in ROWS:
        for kind in ("random", "adversarial", "coded"):
            x, w = sp.make_inputs(shape, m, m, kind)
            out = outputs(op, m)
            op.check(x, w, **cut(out, m))
            op.run(x, w, **cut(out, m))
            assert excess(op, x, w, out) <= 1, (m, kind)
            assert all(t is None or bool(t[m].isnan().all()) for t in out.values()), "the guard row was written"


def test_replays_and_batch_changes_are_bit_identical() -> None:
    shape, _ = sp.cases()["kimi-k3-tp16-o_proj"]
    rows = (1, 8, 16, 32, 64)
    op = sp.StreamProjection(shape, rows)
    data = {m: (*sp.make_inputs(shape, m, 7), outputs(op, m)) for m in rows}
    first = {}
    for m, (x, w, out) in data.items():
        op.run(x, w, **cut(out, m))
        first[m] = out["y"][:m].clone()  # type: ignore[index]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for a in rows:  # every ordered pair of sizes
            for b in rows:
                for m in (a, b):
                    x, w, out = data[m]
                    op.run(x, w, **cut(out, m))
    for _ in range(1000):
        for _, _, out in data.values():
            out["y"].fill_(NAN)  # type: ignore[union-attr]
        graph.replay()
        for m, (_, _, out) in data.items():
            assert torch.equal(out["y"][:m].view(torch.int16), first[m].view(torch.int16)), m  # type: ignore[index]


@pytest.mark.parametrize("m", [1, 8, 16, 64])
@pytest.mark.parametrize("owners", [False, True])
def test_publishing_in_loopback(m: int, owners: bool) -> None:
    ranks, shape = 8, sp.cases()["kimi-k3-tp8-o_proj"][0]
    width = shape.n // ranks if owners else shape.n
    op = sp.StreamProjection(shape, (m,), targets=ranks, owner_width=width if owners else 0)
    idle = torch.tensor(-(2**31), dtype=torch.int32)
    box = torch.full((ranks, ranks, 64, width // 2), idle.item(), dtype=torch.int32, device="cuda")
    x, w = sp.make_inputs(shape, m, 3, "adversarial")  # holds exact zeros and a row of -0
    rank = 5
    slots = [(box[d, rank].data_ptr(), 0) for d in range(ranks)]
    table = torch.tensor(slots, dtype=torch.int64, device="cuda")
    op.check(x, w, table=table)
    op.run(x, w, table=table, pitch=(width, 0))
    store = sp.StreamProjection(shape, (m,))
    y = torch.empty(m, shape.n, dtype=torch.bfloat16, device="cuda")
    store.run(x, w, y)
    wanted = y + 0.0
    got = box.view(torch.bfloat16)[:, rank, :m]
    assert not bool((box[:, rank, :m] == idle).any()), "a published word looks idle"
    for d in range(ranks):
        part = wanted[:, d * width : (d + 1) * width] if owners else wanted
        assert torch.equal(got[d].view(torch.int16), part.contiguous().view(torch.int16)), d
    box[:, rank, :m] = idle
    assert bool((box == idle).all()), "a word outside the slot was written"


def test_front_publishes_logits_and_latent_columns() -> None:
    shape, live = sp.cases()["kimi-k3-tp8-moe_front"]
    ranks, rank, m, latent = 8, 3, 5, shape.n - shape.fp32_rows
    op = sp.StreamProjection(shape, (m,), targets=ranks, live=live)
    logits = torch.full((ranks, 64, live * ranks), NAN, device="cuda")
    columns = torch.full((ranks, 64, latent * ranks), NAN, device="cuda", dtype=torch.bfloat16)
    slots = [(columns[d, :, rank * latent :].data_ptr(), logits[d, :, rank * live :].data_ptr()) for d in range(ranks)]
    table = torch.tensor(slots, dtype=torch.int64, device="cuda")
    x, w = sp.make_inputs(shape, m, 11)
    op.run(x, w, table=table, pitch=(latent * ranks, live * ranks))
    y, y32 = sp.reference(shape, x, w, live)
    for d in range(ranks):
        torch.testing.assert_close(columns[d, :m, rank * latent : (rank + 1) * latent], y, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(logits[d, :m, rank * live : (rank + 1) * live], y32, rtol=1e-4, atol=1e-4)
    assert int((~logits.isnan()).sum()) == ranks * m * live
    assert int((~columns.isnan()).sum()) == ranks * m * latent


def test_outputs_that_wide_stores_would_miss_are_refused() -> None:
    shape, _ = sp.cases()["small-tp8-o_proj"]
    op = sp.StreamProjection(shape, (3,))
    x, w = sp.make_inputs(shape, 3, 1)
    whole = torch.empty(3, op.columns + 12, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiple of 8 elements apart"):
        op.check(x, w, whole[:, : op.columns])
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        op.check(x, w, torch.empty(3 * op.columns + 4, device="cuda", dtype=torch.bfloat16)[4:].view(3, op.columns))


def test_mailbox_rows_that_wide_stores_would_miss_are_refused() -> None:
    shape, _ = sp.cases()["small-tp8-o_proj"]
    op = sp.StreamProjection(shape, (3,), targets=2)
    x, w = sp.make_inputs(shape, 3, 1)
    table = sp.publication_table([(4096, 0), (8192, 0)], "cuda")
    op.check(x, w, table=table, pitch=(264, 0))
    with pytest.raises(ValueError, match="published rows must be"):
        op.check(x, w, table=table, pitch=(260, 0))


def test_no_compilation_during_capture() -> None:
    from kimi_k3.kernels import runtime

    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="prepare it before"):
        runtime.compiled("never prepared", None, ())


def test_embedding() -> None:
    from kimi_k3.kernels import embed

    for hidden, copies in ((7168, 1), (256, 8), (128, 2)):
        table = torch.randn(1000, hidden, device="cuda", dtype=torch.bfloat16)
        op = embed.Embed(hidden, copies)
        for m in (1, 7, 64):
            ids = torch.randint(90, 1200, (m,), device="cuda")
            ids[0], ids[-1] = 100, 1099  # the first and the last row of the shard
            whole = torch.full((copies * m + 1, hidden), NAN, device="cuda", dtype=torch.bfloat16)
            out = whole[:-1].view(copies, m, hidden)
            op.run(ids, table, out, first=100)
            assert torch.equal(out, embed.reference(ids, table, copies, first=100))
            assert bool(whole[-1].isnan().all()), "the guard row was written"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                op.run(ids, table, out, first=100)
            ids.copy_(ids.flip(0))  # a replay reads the ids of its own time
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out, embed.reference(ids, table, copies, first=100))


def test_embedding_rows_beyond_32_bits() -> None:
    """A table of more than 2^31 bytes: the last row's address does not fit 32 bits."""
    from kimi_k3.kernels import embed

    table = torch.zeros(163840, 7168, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([0, 163839, 150000], device="cuda")
    table[ids] = torch.randn(3, 7168, device="cuda", dtype=torch.bfloat16)
    out = torch.full((1, 3, 7168), NAN, device="cuda", dtype=torch.bfloat16)
    embed.Embed(7168, 1).run(ids, table, out)
    assert torch.equal(out[0], table[ids])


@pytest.mark.parametrize("sizes", [(8,), (8192,), (8200, 16, 100_000), (8, 3_000_001)])
def test_prefetch_of_pieces_and_tails_changes_nothing(sizes: tuple[int, ...]) -> None:
    from kimi_k3.kernels.prefetch import Prefetch

    weights = [torch.randn(n, device="cuda").bfloat16() for n in sizes]
    before = [w.clone() for w in weights]
    walker = Prefetch(weights)
    graph = torch.cuda.CUDAGraph()
    walker.run()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):  # forked and joined, as on a side stream of a step
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            walker.run()
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))


def test_prefetch_changes_nothing_and_brings_weights_into_l2() -> None:
    from kimi_k3.kernels.prefetch import Prefetch

    w = torch.randn(12_000_000, device="cuda").bfloat16()  # 24 MB: about 5 us from memory, half of that from L2
    evict = torch.empty(200_000_000, dtype=torch.uint8, device="cuda")
    before, walker, total = w.clone(), Prefetch([w]), torch.empty((), dtype=torch.int64, device="cuda")
    torch.sum(w.view(torch.int32), 0, out=total)
    reading = torch.cuda.CUDAGraph()
    with torch.cuda.graph(reading):
        torch.sum(w.view(torch.int32), 0, out=total)

    def read(prefetched: bool) -> float:
        times = []
        for _ in range(9):
            evict.fill_(1)
            if prefetched:
                walker.run()
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # 1 ms: everything below is enqueued meanwhile, so that no host time counts
            start.record()
            reading.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return sorted(times)[4]

    cold, warm = read(False), read(True)
    assert torch.equal(w, before)
    assert warm < 0.95 * cold, (warm, cold)
