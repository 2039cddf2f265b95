"""The attention residual without a GPU: its reference against formulas written out, limits, contract, compiled code."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

from kimi_k3.kernels import cubin
from kimi_k3.kernels.attn_res import CONTRACT, AttnRes, Settings, compile_cases
from kimi_k3.kernels.attn_res_cases import Inputs, compare, make_inputs
from kimi_k3.kernels.attn_res_launch import PreparedAttnRes, choose, kernel_args
from kimi_k3.kernels.compile import CompileCase, _compile

SITES = {
    "embedding": {"stored": 0, "opens": True, "update": "none"},
    "opens": {"stored": 3, "opens": True},
    "replace": {"stored": 2, "update": "replace"},
    "eight": {"stored": 8},
    "final": {"stored": 8, "final": True},
}


def by_the_formulas(i: Inputs, row: int, site: dict) -> torch.Tensor:
    update, stored = site.get("update", "add"), site["stored"]
    prefix = i.prefix[row].float()
    if update == "add":
        prefix = prefix + i.delta[row].float()
    elif update == "replace":
        prefix = i.delta[row].float()
    prefix = prefix.bfloat16()
    sources = [i.blocks[row, b].double() for b in range(stored)] + [prefix.double()]
    scores = []
    for v in sources:
        rms = math.sqrt(float(v @ v) / v.numel() + 1e-5)
        scores.append(sum(float(a) * float(w) for a, w in zip(v, i.query, strict=True)) / rms)
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    mix = sum(w / sum(weights) * v for w, v in zip(weights, sources, strict=True))
    if site.get("final"):
        mix = mix.bfloat16().double()
    return mix / math.sqrt(float(mix @ mix) / mix.numel() + 1e-5) * i.gamma.double()


@pytest.mark.parametrize("site", SITES)
def test_reference_follows_the_formulas(site):
    kw = SITES[site]
    before = make_inputs(2, 256, stored=kw["stored"], update=kw.get("update", "add"), tap=True)
    after = before.clone()
    exact, _ = after.apply(**kw, compute=torch.float64)
    for row in range(2):
        torch.testing.assert_close(exact[row], by_the_formulas(before, row, kw), rtol=1e-9, atol=1e-12)
    assert torch.equal(after.tap, after.prefix)
    changed = (after.blocks.view(torch.int16) != before.blocks.view(torch.int16)).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == ([kw["stored"]] if kw.get("opens") else [])
    if kw.get("opens"):
        assert torch.equal(after.blocks[:, kw["stored"]], after.prefix)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["random", "adversarial", "coded"])
def test_ideally_rounded_and_fp32_results_pass(site, kind):
    kw = SITES[site]
    before = make_inputs(6, 512, stored=kw["stored"], update=kw.get("update", "add"), kind=kind, seed=3)
    for compute in (torch.float64, torch.float32):
        got = before.clone()
        got.apply(**kw, compute=compute)
        result = compare(got, before, **kw)
        assert result["out"] <= 1, result
        assert result["bits"] == 0, result
        assert result["nan"] == 0, result


def _stale_block(i: Inputs) -> None:
    i.blocks[:, 2] = i.blocks[:, 1]


def _missing_columns(i: Inputs) -> None:
    i.query[128:160] = 0  # a warp's dot products did not arrive


def _old_prefix(i: Inputs) -> None:
    i.delta.zero_()


@pytest.mark.parametrize("fault", [_stale_block, _missing_columns, _old_prefix], ids=lambda f: f.__name__)
def test_limits_notice_a_fault(fault):
    before = make_inputs(3, 256, stored=4)
    broken = before.clone()
    fault(broken)
    broken.apply(stored=4)
    assert compare(broken, before, stored=4)["out"] > 2


def test_limits_notice_a_skipped_store():
    before = make_inputs(3, 256, stored=3)
    got = before.clone()
    got.apply(stored=3)
    assert compare(got, before, stored=3, opens=True)["bits"] == 3 * 256


def test_every_hidden_size_has_a_setting():
    for hidden in (256, 512, 1024, 7168):
        for rows in (1, 8, 64):
            kernel = AttnRes(hidden, 8, 8, settings=choose(hidden, rows))
            assert kernel.threads * 8 * kernel.s.vectors * kernel.s.cluster == hidden


def test_contract_names_the_kernel_parameters():
    names = list(inspect.signature(AttnRes.kernel).parameters)
    assert names[-len(CONTRACT.parameters) :] == [p.name for p in CONTRACT.parameters]
    for p in CONTRACT.parameters:
        assert p.role == "weight" or not p.early or p.reason, p


def test_the_first_site_waits_before_it_reads():
    """Without a delta the prefix is the embedding, which the kernel right before may still be writing."""
    case = compile_cases()["h7168-embedding"]
    code = cubin.sass(_compile(case, "sm_90a")[1])
    if code:
        wait = next(n for n, line in enumerate(code) if "ACQBULK" in line)
        assert not any("LDG" in line for line in code[:wait])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_compiled_code_is_named_clean_and_reads_early(arch):
    kernel = AttnRes(7168, 8, 8, settings=Settings(7))
    ptx, binary = _compile(CompileCase(kernel, kernel_args(), kernel.threads, kernel.smem, CONTRACT), arch)
    assert re.search(r"\.entry (\w+)", ptx)[1].startswith(CONTRACT.kernel)
    assert "ld.global.nc" not in ptx
    assert not cubin.resources(binary)[0].spills
    code = cubin.sass(binary)
    if code:  # eight blocks, prefix, query twice, gamma; only the delta is read after the wait
        wait = next(n for n, line in enumerate(code) if "ACQBULK" in line)
        assert sum("LDG.E.128" in line for line in code[:wait]) == 12
        assert sum("LDG.E.128" in line for line in code[wait:]) == 1
        assert not any("STG" in line for line in code[:wait])


@pytest.mark.parametrize(
    ("hidden", "change", "message"),
    [
        (300, {}, "hidden: 300 must be a multiple of 256"),
        (256, {"stored": 8, "opens": True}, "stored: 8 blocks and 1 new one do not fit a buffer of 8"),
        (256, {"update": "sub"}, "update: 'sub' must be add, replace or none"),
        (256, {}, "query: expected a CUDA tensor"),
    ],
)
def test_bad_arguments_are_one_clear_line(hidden, change, message):
    query, gamma = torch.ones(hidden), torch.ones(hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(message)):
        PreparedAttnRes(query, gamma, **{"stored": 1, **change})
