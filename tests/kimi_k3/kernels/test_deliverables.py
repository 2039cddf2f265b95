"""Every kernel that the decode path needs is among the compiled cases, for both models and both sizes of the group.

The widths of the full model are written out here, not taken from ``shapes``: a shard that changed would be noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("cutlass")

from kimi_k3.kernels import shapes
from kimi_k3.kernels.arch import ARCHES as LIMITS
from kimi_k3.kernels.attn_res_launch import choose as choose_residual
from kimi_k3.kernels.compile import ARCHES, MODULES, CompileCase, load_cases
from kimi_k3.kernels.kda_core_launch import choose as choose_kda
from kimi_k3.kernels.shapes import PREPARED_ROWS
from kimi_k3.kernels.stream_projection import code_key
from kimi_k3.kernels.stream_projection_epilogue import Epilogue
from kimi_k3.kernels.stream_projection_settings import publication, setting_for, token_tiles

#: op -> (N, K) at TP8 and at TP16 of the full model
WIDTHS = {
    "kda_in_proj": ((6288, 7168), (3216, 7168)),
    "mla_in_proj": ((3648, 7168), (2880, 7168)),
    "mla_q_b": ((2304, 1536), (1152, 1536)),
    "o_proj": ((7168, 1536), (7168, 768)),
    "moe_front": ((560, 7168), (288, 7168)),  # router shard, padded to 16, and latent-down shard
    "shared_gate_up": ((1536, 7168), (768, 7168)),
    "shared_down": ((7168, 768), (7168, 384)),
    "dense_gate_up": ((8448, 7168), (4224, 7168)),
    "dense_down": ((7168, 4224), (7168, 2112)),
    "lm_head": ((20480, 7168), (10240, 7168)),
}
SITUS = ("shared_gate_up", "dense_gate_up")
TO_ALL = {"moe_front": (8, 16, 32, 64), "o_proj": (8,)}  #: published to every rank at these rows
TO_OWNERS = {"o_proj": (16, 32, 64), "shared_down": (8, 16, 32, 64), "dense_down": (8, 16, 32, 64)}
HEADS = {("kimi-k3", 8): 12, ("kimi-k3", 16): 6, ("small", 8): 2, ("small", 16): 1}
HIDDEN = {"kimi-k3": 7168, "small": 256}
LONGEST_SITE = 8

Cases = dict[str, dict[str, CompileCase]]


def all_cases(arch: str) -> Cases:
    return {module: dict(load_cases(module, arch)) for module in MODULES}


def missing(cases: Cases, arch: str) -> Iterator[str]:
    """What of the decode path no case compiles."""
    yield from _projections(cases["stream_projection"], LIMITS[arch].warpgroup_mma)
    yield from _kda(cases["kda_core"])
    yield from _residual(cases["attn_res"])
    for model, hidden in HIDDEN.items():
        if not any(c.fn.hidden == hidden for c in cases["embed"].values()):
            yield f"embed of {model}"
    if not cases["prefetch"]:
        yield "prefetch"


def _projections(cases: dict[str, CompileCase], warpgroups: bool) -> Iterator[str]:
    for model in HIDDEN:
        for which, tp in enumerate((8, 16)):
            for op, widths in WIDTHS.items():
                shape = shapes.shard(model, tp).projections()[op]
                for m in (8, 16, 32, 64):
                    case = cases.get(f"{model}-tp{tp}-{op}-m{m}")
                    what = f"{op} of {model}, TP{tp}, {m} rows"
                    if case is None:
                        yield what
                        continue
                    e: Epilogue = case.fn.epilogue
                    if model == "kimi-k3" and (e.shape.n, e.shape.k) != widths[which]:
                        yield f"{what}: {e.shape.n} x {e.shape.k}"
                    to_all, to_owners = m in TO_ALL.get(op, ()), m in TO_OWNERS.get(op, ())
                    wanted = (tp if to_all or to_owners else 0, shape.n // tp if to_owners else 0, op in SITUS)
                    if (e.targets, e.owner_width, e.shape.situ) != wanted:
                        yield f"{what}: epilogue"
                    for rows in (r for r in PREPARED_ROWS if token_tiles(r) == token_tiles(m)):
                        if case.code != code_key(e, setting_for(shape, rows, warpgroups), rows):
                            yield f"{what}: the setting of {rows} rows"
                        if publication(op, shape.n, rows, tp) != wanted[:2]:
                            yield f"{what}: how {rows} rows are published"


def _kda(cases: dict[str, CompileCase]) -> Iterator[str]:
    compiled = {(c.fn.heads, c.fn.pitch, c.fn.tokens, c.fn.columns, c.fn.ib, c.fn.s) for c in cases.values()}
    for (model, tp), heads in HEADS.items():
        pitch = shapes.shard(model, tp).kda_rows
        steps = [(1, columns, index, n) for n in PREPARED_ROWS for columns, index in ((0, 4), (1, 8))]
        lengths = (4, 5, 6, 7, 8) if model == "kimi-k3" else (8,)
        steps += [(t, 8, 8, n) for t in lengths for n in (1, 16 // t, 64 // t)]
        steps += [(t, t, 8, 16 // t) for t in lengths]
        for tokens, columns, index, n in steps:
            if (heads, pitch, tokens, columns, index, choose_kda(heads, tokens, n)) not in compiled:
                yield f"kda_core of {model}, TP{tp}: {n} requests of {tokens} tokens, {columns} slots"


def _residual(cases: dict[str, CompileCase]) -> Iterator[str]:
    compiled = {
        (c.fn.hidden, c.fn.stored, c.fn.update, c.fn.opens, c.fn.tap, c.fn.final, c.fn.s) for c in cases.values()
    }
    for model, hidden in HIDDEN.items():
        sites = [(0, "none", True, False, False), (LONGEST_SITE, "add", False, False, True)]
        sites += [(n, "add", False, False, False) for n in range(1, LONGEST_SITE + 1)]
        sites += [(n, "add", True, False, False) for n in range(1, LONGEST_SITE)]
        sites += [(LONGEST_SITE, "add", False, True, False)]
        for site in sites:
            for rows in PREPARED_ROWS:
                if (hidden, *site, choose_residual(hidden, rows)) not in compiled:
                    yield f"attn_res of {model}: stored, update, opens, tap, final {site}"


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_is_missing(arch: str) -> None:
    assert list(missing(all_cases(arch), arch)) == []


@pytest.mark.parametrize(
    ("module", "start"),
    [
        *[("stream_projection", f"{model}-tp{tp}-{op}-m") for model in HIDDEN for tp in (8, 16) for op in WIDTHS],
        *[("kda_core", f"{model}-tp{tp}-q{q}-") for model, tp in HEADS for q in (1, 8)],
        *[("kda_core", f"kimi-k3-tp16-q{q}-") for q in (4, 5, 6, 7)],
        *[
            ("attn_res", f"h{h}-{site}")
            for h in (7168, 256)
            for site in ("embedding", "stored", "opens", "tap", "final")
        ],
        ("embed", "kimi-k3"),
        ("embed", "small"),
        ("prefetch", "walk"),
    ],
)
def test_whatever_is_removed_is_missed(module: str, start: str) -> None:
    cases = all_cases("sm_90a")
    gone = [name for name in cases[module] if name.startswith(start)]
    assert gone
    for removed in gone if module == "stream_projection" else (start,):
        left = {name: case for name, case in cases[module].items() if not name.startswith(removed)}
        assert next(missing({**cases, module: left}, "sm_90a"), None), removed


def test_another_setting_than_the_compiled_one_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_k3.kernels import stream_projection_settings as settings

    cases = all_cases("sm_90a")
    changed = settings.Setting("rows", 16, 4, ksplit=4)
    monkeypatch.setitem(settings.TUNED[7168, 1536, False], 1, changed)
    assert "o_proj of kimi-k3, TP8, 8 rows: the setting of 1 rows" in list(missing(cases, "sm_90a"))
