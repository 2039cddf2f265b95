"""The compiled kernels as a whole: resources on every architecture, the audit, the launch order of a layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from fasttrack.audit.run import audit_units
from fasttrack.audit.schedule import check
from fasttrack.audit.unit import Unit, audit_unit
from fasttrack.errors import UsageError
from fasttrack.target import OTHER_LAUNCH, CompiledKernel, KernelTarget
from kimi_k3.kernels import catalog
from kimi_k3.kernels.compile import ARCHES, MODULES, Compiled, _compile, compile_all, load_cases, select, table
from kimi_k3.target import TARGET
from kimi_k3.target_kernels import declared

ROWS, TILES = "k3_stream_projection_rows", "k3_stream_projection_tiles"


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    return list(TARGET.compile_kernels("sm_90a", kinds=True))


def unit(k: CompiledKernel, **changes: object) -> Unit:
    made = Unit(k.name, k.arch, k.ptx, k.cubin, f"{k.name}.ptx", f"{k.name}.cubin", k.source, k.contract)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kind_compiles_without_spills(arch: str) -> None:
    results = compile_all(arches=(arch,), kinds=True)
    assert {r.module for r in results} == set(MODULES)
    bad = [r for r in results if not r.clean]
    assert not bad, "\n" + table(bad)
    assert all(0 < r.registers <= 255 and r.threads and Path(r.cubin).stat().st_size for r in results)
    assert max(r.smem for r in results) <= 227 * 1024


def test_compilations_share_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL names its files after the kernel's class: in a common folder, processes read each other's code."""
    monkeypatch.chdir(tmp_path)
    cases = load_cases("attn_res", "sm_90a")
    first, second = (_compile(cases[name], "sm_90a") for name in ("h256-stored1", "h256-stored2"))
    assert first != second
    assert list(tmp_path.iterdir()) == []


def test_a_spill_is_not_clean() -> None:
    good = Compiled("m", "c", "sm_90a", registers=32, spill_loads=0, spill_stores=0)
    assert good.clean
    for fault in ({"spill_loads": 1}, {"spill_stores": 2}, {"frame": 8}, {"error": "no"}):
        assert not replace(good, **fault).clean  # type: ignore[arg-type]


def test_every_case_belongs_to_a_kind_that_is_compiled() -> None:
    for module in MODULES:
        cases = load_cases(module, "sm_90a")
        chosen = select(module, "sm_90a", kinds=True)
        assert {cases[c].kind or c for c in chosen} == {case.kind or c for c, case in cases.items()}
        assert len(chosen) == len({cases[c].kind or c for c in chosen})


@pytest.mark.slow
def test_the_audit_has_nothing_against_a_kernel_of_every_kind(compiled: list[CompiledKernel]) -> None:
    contracts = {k.contract.kernel: k.contract for k in compiled if k.contract}
    schedules = {name: tuple(order) for name, order in TARGET.schedules().items()}
    report, problems = audit_units([unit(k) for k in compiled], schedules, contracts)
    assert problems == []
    assert [(f.rule, f.variant, f.message) for f in report.open("error") + report.open("warning")] == []
    stages = Counter(a.stage for a in report.audited)
    assert stages["ptx"] == len(compiled)
    assert not report.sass or stages["sass"] == len(compiled)


def only(compiled: list[CompiledKernel], start: str) -> CompiledKernel:
    return next(k for k in compiled if k.name.startswith(start))


@pytest.mark.parametrize(
    "start", ["stream_projection/kimi-k3-tp8-lm_head-m8", "kda_core/kimi-k3-tp8-q1", "attn_res/h7168-stored"]
)
def test_the_audit_notices_a_wait_that_is_gone(compiled: list[CompiledKernel], start: str) -> None:
    kernel = only(compiled, start)
    assert "griddepcontrol.wait;" in kernel.ptx
    spoiled = unit(kernel, ptx=kernel.ptx.replace("griddepcontrol.wait;", ""), cubin=None)
    assert "missing-wait" in {f.rule for f in audit_unit(spoiled).findings}


@pytest.mark.parametrize(
    "start",
    [
        "stream_projection/kimi-k3-tp8-lm_head-m8",
        "stream_projection/kimi-k3-tp8-dense_gate_up-m16",  # the slot is released in other blocks of the cluster, too
        "kda_core/kimi-k3-tp8-q1-n0-i32-c1-l16-p8-r2",
        "kda_core/kimi-k3-tp8-q1-n0-i32-c1-l16-p8-r0-b",  # ordinary stores, then a bulk copy out
    ],
)
def test_the_audit_notices_a_proxy_fence_that_is_gone(compiled: list[CompiledKernel], start: str) -> None:
    """All refill shared memory by bulk copies after ordinary loads, or send what ordinary stores wrote."""
    kernel = only(compiled, start)
    lines = [line for line in kernel.ptx.split("\n") if "fence.proxy.async" not in line]
    assert len(lines) < len(kernel.ptx.split("\n"))
    spoiled = unit(kernel, ptx="\n".join(lines), cubin=None)
    assert "missing-proxy-fence" in {f.rule for f in audit_unit(spoiled).findings}


def test_early_reads_are_judged_by_the_contract(compiled: list[CompiledKernel]) -> None:
    kernel = only(compiled, "kda_core/kimi-k3-tp8-q1")
    assert kernel.contract is not None
    strict = replace(kernel.contract, parameters=tuple(replace(p, early=False) for p in kernel.contract.parameters))
    found = {(f.rule, f.parameter) for f in audit_unit(unit(kernel, contract=strict, cubin=None)).findings}
    assert {("early-load", "state"), ("early-load", "slots"), ("early-load", "conv_state")} <= found


def test_of_equal_code_only_the_first_is_offered(compiled: list[CompiledKernel]) -> None:
    assert isinstance(TARGET, KernelTarget)
    assert len({k.cubin for k in compiled}) == len({k.name for k in compiled}) == len(compiled)
    assert {k.name.split("/")[0] for k in compiled} == set(MODULES)
    for k in compiled:
        assert (Path(__file__).parents[3] / k.source).is_file()


def test_kernels_that_do_not_compile_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Compiled("embed", "small", "sm_90a", error="DSLRuntimeError: no"), Compiled("embed", "x", "s", error="n")]
    monkeypatch.setattr(catalog, "compile_all", lambda *args, **kw: broken)
    with pytest.raises(UsageError, match=r"embed/small for sm_90a: DSLRuntimeError: no \(and 1 more\)") as raised:
        list(TARGET.compile_kernels("sm_90a"))
    assert "\n" not in str(raised.value)


def test_schedules_follow_the_executor() -> None:
    orders = catalog.schedules()
    assert orders["kda-moe-tp8-m1"] == ("k3_attn_res", ROWS, "k3_kda_core", ROWS, OTHER_LAUNCH, ROWS, OTHER_LAUNCH)
    wide = ("k3_attn_res", TILES, OTHER_LAUNCH, TILES, OTHER_LAUNCH, TILES, TILES, OTHER_LAUNCH)
    # under the smallest batch with this order, which the settings decide
    assert [name.rpartition("-m")[0] for name, order in orders.items() if order == wide] == ["mla-dense-tp8"]
    assert len(set(orders.values())) == len(orders)
    known = {case.contract.kernel for m in MODULES for case in load_cases(m, "sm_90a").values()}
    assert {kernel for order in orders.values() for kernel in order} <= known | {OTHER_LAUNCH}


def test_the_schedule_check_is_not_vacuous() -> None:
    """The residual reads the prefix early: right behind the kernel that wrote it that would be a race."""
    contracts = {
        case.contract.kernel: declared(case.contract) for m in MODULES for case in load_cases(m, "sm_90a").values()
    }
    assert check(catalog.schedules(), contracts) == []
    alone = check({"s": ("k3_attn_res", ROWS)}, contracts)
    assert {(f.rule, f.parameter) for f in alone} >= {("exposed-dependent", "prefix"), ("exposed-dependent", "blocks")}


def test_contracts_keep_their_meaning() -> None:
    from kimi_k3.kernels.attn_res import CONTRACT

    given = declared(CONTRACT)
    for ours, theirs in zip(CONTRACT.parameters, given.parameters, strict=True):
        assert all(getattr(ours, name) == getattr(theirs, name) for name in vars(ours))
    assert (given.kernel, given.pdl, given.wait, given.trigger) == ("k3_attn_res", True, "first", "after_wait")
