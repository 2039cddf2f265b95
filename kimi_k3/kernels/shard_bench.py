"""The kernel timings of one rank's shard: which there are, the bytes they must move, and the goals they are held to.

Enumerating needs no GPU; :meth:`Benchmark.time` does. A time is that of :mod:`kimi_k3.kernels.bench`: the median over
replays of a CUDA graph, per launch, with own weights or states for every launch so that L2 is cold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kimi_k3.kernels import bench, shapes
from kimi_k3.kernels.attn_res_cases import moved_bytes as residual_bytes
from kimi_k3.kernels.bench import Timing
from kimi_k3.kernels.kda_core_cases import moved_bytes as kda_bytes
from kimi_k3.kernels.shapes import FULL, ModelShape, ProjectionShape
from kimi_k3.kernels.stream_projection_settings import publication

ROWS = {"smoke": (1, 8, 64), "standard": (1, 2, 4, 8, 16, 32, 64), "full": (1, 2, 4, 8, 16, 32, 64)}
VERIFY = (4, 8)  #: rows per request of the timed verify steps
VERIFY_SLOTS = 8

#: projection of ``shapes`` -> op of the schedule
OPS = {
    "kda_in_proj": "in_proj",
    "mla_in_proj": "in_proj",
    "mla_q_b": "mla_query",
    "o_proj": "oproj_publish",
    "moe_front": "moe_front",
    "shared_gate_up": "shared_gate_up",
    "shared_down": "shared_down_push",
    "dense_gate_up": "dense_gate_up",
    "dense_down": "dense_down_push",
    "lm_head": "lm_head",
}
#: published in the executor: to all ranks or to the owners of the columns; timed like that at these rows as well
PUBLISHED = ("o_proj", "moe_front", "shared_down", "dense_down")
PUBLISHED_ROWS = (1, 8, 64)
LARGE = ("kda_in_proj", "mla_in_proj", "o_proj", "dense_gate_up", "dense_down", "lm_head")

#: attention-residual sites: before attention with the most and the fewest saved blocks, a block opener, the last one
SITES: dict[str, dict[str, Any]] = {
    "pre8": {"stored": 8},
    "pre1": {"stored": 1},
    "open7": {"stored": 7, "opens": True},
    "final": {"stored": 8, "final": True},
}


@dataclass(frozen=True)
class Goal:
    """``fraction``: of the read floor of the same run, at least. ``us``: microseconds per launch, at most."""

    fraction: float | None = None
    us: float | None = None

    def met(self, timing: Timing) -> bool:
        fast = self.us is None or timing.us <= self.us
        return fast and (self.fraction is None or timing.fraction >= self.fraction)


@dataclass(frozen=True)
class Benchmark:
    """One kernel at one size. ``bytes``: what a launch must move through device memory, everything once.

    ``time(floor in TB/s, replays)`` builds the data, compiles, times and frees; the second timing, if any, is a
    library's kernel of the same product in the same run.
    """

    op: str
    name: str
    shape: str
    tp: int  #: 0: the same on every rank of any group
    requests: int
    query_len: int
    bytes: int
    goal: Goal | None
    time: Callable[[float, int], tuple[Timing, Timing | None]]

    @property
    def rows(self) -> int:
        return self.requests * self.query_len


def projection_goal(op: str, tp: int, m: int) -> Goal | None:
    """95 % of the floor for the KDA input projection of TP8 and 90 % for other large ones up to 8 rows, 85 % at 64."""
    if op not in LARGE or 8 < m < 64:
        return None
    if m == 64:
        return Goal(fraction=0.85)
    return Goal(fraction=0.95 if op == "kda_in_proj" and tp == 8 else 0.90)


def kda_goal(requests: int, query_len: int) -> Goal | None:
    """At most 5 us for one request, 70 % of the floor from 16 on, plain decode."""
    if query_len > 1:
        return None
    if requests == 1:
        return Goal(us=5.0)
    return Goal(fraction=0.70) if requests >= 16 else None


def benchmarks(tier: str = "standard", tps: Sequence[int] = (8, 16), model: ModelShape = FULL) -> Iterator[Benchmark]:
    """Projections, KDA core and attention residual at every batch of the tier."""
    if tier not in ROWS:
        raise ValueError(f"unknown tier {tier!r}; expected one of {', '.join(ROWS)}")
    for tp in tps:
        shard = shapes.shard(model, tp)
        for shape in shard.projections().values():
            live = model.experts // tp if shape.fp32_rows else 0
            for m in ROWS[tier]:
                time = partial(time_projection, shape, live, m)
                goal = projection_goal(shape.op, tp, m)
                size, name = shape.bytes(m), f"{shape.op}/tp{tp}/m{m}"
                sizes = f"{shape.n} x {shape.k}" + (", SiTU" if shape.situ else "")
                yield Benchmark(OPS[shape.op], name, sizes, tp, m, 1, size, goal, time)
        for shape in (s for op, s in shard.projections().items() if op in PUBLISHED):
            live = model.experts // tp if shape.fp32_rows else 0
            for m in PUBLISHED_ROWS:
                size, name = published_bytes(shape, m, tp), f"{shape.op}/tp{tp}/m{m}/published"
                time = partial(time_publication, shape, live, m, tp, size)
                sizes = f"{shape.n} x {shape.k}, published"
                yield Benchmark(OPS[shape.op], name, sizes, tp, m, 1, size, None, time)
        plain = [(m, 1) for m in ROWS[tier]]
        verify = [(m // q, q) for q in VERIFY for m in ROWS[tier] if m % q == 0]
        for requests, q in (*plain, *verify):
            size = kda_bytes(requests, q, shard.heads, shard.kda_rows)
            time = partial(time_kda, shard.heads, requests, q, size)
            name = f"kda_core/tp{tp}/b{requests}" + (f"q{q}" if q > 1 else "")
            sizes = f"{shard.heads} heads, {requests} requests of {q} rows"
            yield Benchmark("kda_core", name, sizes, tp, requests, q, size, kda_goal(requests, q), time)
    for site, keywords in SITES.items():  # replicated: the same on every rank
        for m in ROWS[tier]:
            stored, opens = keywords["stored"], keywords.get("opens", False)
            size = residual_bytes(m, model.hidden, stored, "add", opens, False)
            time = partial(time_residual, site, m, model.hidden, size)
            sizes = f"{stored} blocks of {model.hidden}"
            yield Benchmark("attn_res", f"attn_res/{site}/m{m}", sizes, 0, m, 1, size, None, time)


def time_projection(
    shape: ProjectionShape, live: int, m: int, floor: float, replays: int = 60
) -> tuple[Timing, Timing | None]:
    """The projection storing its output, and ``torch.mm`` of the same product (without SiTU, all BF16)."""
    from kimi_k3.kernels.bench_inputs import ProjectionLayers
    from kimi_k3.kernels.stream_projection import StreamProjection

    op = StreamProjection(shape, (m,), live=live)
    count = bench.distinct(shape.weight_bytes)
    layers = ProjectionLayers(shape, live, m, count)
    name, size = f"{shape.op} {shape.n}x{shape.k} m{m}", shape.bytes(m)
    return _both(name, partial(layers.launch, op), ("torch.mm", layers.matmul), count, size, floor, replays)


def published_bytes(shape: ProjectionShape, m: int, ranks: int) -> int:
    """As :meth:`ProjectionShape.bytes`, with the output written once per rank that it goes to."""
    copies = 1 if publication(shape.op, shape.n, m, ranks)[1] else ranks
    return shape.bytes(m) + (copies - 1) * 2 * m * (shape.n + shape.fp32_rows)


def time_publication(
    shape: ProjectionShape, live: int, m: int, ranks: int, size: int, floor: float, replays: int = 60
) -> tuple[Timing, Timing | None]:
    """The projection with the executor's epilogue; all mailboxes are on this GPU, so no link is in it."""
    from kimi_k3.kernels.bench_inputs import Peers, ProjectionLayers
    from kimi_k3.kernels.stream_projection import StreamProjection

    peers = Peers(shape, live, m, ranks)
    op = StreamProjection(shape, (m,), targets=peers.targets, live=live, owner_width=peers.owner_width)
    count = bench.distinct(shape.weight_bytes)
    layers = ProjectionLayers(shape, live, m, count)
    name = f"{shape.op} {shape.n}x{shape.k} m{m} published"
    return _both(name, partial(layers.publish, op, peers), None, count, size, floor, replays)


def time_kda(
    heads: int, requests: int, query_len: int, size: int, floor: float, replays: int = 60
) -> tuple[Timing, Timing | None]:
    from kimi_k3.kernels import stock
    from kimi_k3.kernels.bench_inputs import KdaLayers

    count = bench.distinct(size, most=256)
    layers = KdaLayers(heads, requests, query_len, VERIFY_SLOTS if query_len > 1 else 0, count)
    kernels = layers.prepared()
    name = f"kda_core h{heads} B{requests} q{query_len}"
    ours, theirs = partial(layers.launch, kernels), stock.kda(layers)
    return _both(name, ours, theirs, count, size, floor, replays)


def time_residual(
    site: str, rows: int, hidden: int, size: int, floor: float, replays: int = 60
) -> tuple[Timing, Timing | None]:
    from kimi_k3.kernels import stock
    from kimi_k3.kernels.bench_inputs import ResidualSites

    count = bench.distinct(size, total=400_000_000, most=256)
    sites = ResidualSites(SITES[site], rows, hidden, count)
    ours, theirs = partial(sites.launch, sites.prepared()), stock.residual(sites)
    return _both(f"attn_res {site} H{hidden} M{rows}", ours, theirs, count, size, floor, replays)


def _both(
    name: str,
    ours: Callable[[int], None],
    theirs: tuple[str, Callable[[int], None]] | None,
    count: int,
    size: int,
    floor: float,
    replays: int,
) -> tuple[Timing, Timing | None]:
    def timed(name: str, launch: Callable[[int], None]) -> Timing:
        return bench.time_launches(name, launch, count, bytes_per_launch=size, floor_tbps=floor, replays=replays)

    mine, library = timed(name, ours), None
    if theirs is not None:
        try:
            library = timed(*theirs)
        except RuntimeError as error:  # a kernel of somebody else that cannot be captured is not ours to fail for
            print(f"kimi_k3: {theirs[0]} could not be timed: {str(error).splitlines()[0]}", file=sys.stderr)
    return mine, library
