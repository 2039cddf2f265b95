"""The KDA decode core without a GPU: its reference against formulas written out, limits, contract, compiled code."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

from kimi_k3.kernels import cubin
from kimi_k3.kernels.compile import CompileCase, _compile
from kimi_k3.kernels.kda_core import CONTRACT, HEAD, KdaCore, Settings
from kimi_k3.kernels.kda_core_cases import Inputs, compare, make_inputs
from kimi_k3.kernels.kda_core_launch import PreparedKdaCore, choose, kernel_args
from kimi_k3.kernels.shapes import PREPARED_ROWS, pad16


def pitch_of(heads: int) -> int:
    return pad16(4 * heads * HEAD + HEAD + heads)


def inputs(requests: int = 4, heads: int = 1, tokens: int = 1, native: bool = False, **kw) -> Inputs:
    return make_inputs(requests, heads, pitch_of(heads), tokens=tokens, native=native, draft_length=7 * native, **kw)


def by_the_formulas(i: Inputs, request: int, head: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [tokens, 128] and states after each token of one head, from the published formulas, S as [k, v], FP64."""
    heads = i.a_log.shape[0]
    width = heads * HEAD
    table = i.slots.reshape(i.slots.shape[0], -1)[request].tolist()
    a = 1 if i.accepted is None else int(i.accepted[request])
    x = i.projected.double().view(-1, i.tokens, i.projected.shape[1])[request]
    history = i.conv_state[table[0]].double()
    own = slice(head * HEAD, (head + 1) * HEAD)
    state = i.state[table[a - 1], head].double().T
    outputs, states = [], []
    for t in range(i.tokens):
        vectors = []
        for kind in range(3):
            channels = slice(kind * width + head * HEAD, kind * width + (head + 1) * HEAD)
            y = torch.zeros(HEAD, dtype=torch.float64)
            for j in range(4):
                past = t - 3 + j
                source = x[past, channels] if past >= 0 else history[a - 1 + 3 + past, channels]
                y = y + i.conv_weight[kind, j, own].double() * source
            vectors.append(y / (1 + torch.exp(-y)))
        q, k, v = vectors
        q = q / math.sqrt(float(q @ q) + 1e-6) * HEAD**-0.5
        k = k / math.sqrt(float(k @ k) + 1e-6)
        raw = (i.f_b[own].double() @ x[t, 4 * width : 4 * width + HEAD]).bfloat16().double()
        scaled = math.exp(float(i.a_log[head])) * (raw + i.dt_bias[own].double())
        decay = torch.exp(-5.0 / (1 + torch.exp(-scaled)))
        beta = 1 / (1 + math.exp(-float(x[t, 4 * width + HEAD + head])))
        state = torch.diag(decay) @ state
        u = beta * (v - state.T @ k)
        state = state + torch.outer(k, u)
        o = state.T @ q
        gate = 1 / (1 + torch.exp(-x[t, 3 * width :][own]))
        outputs.append(o / math.sqrt(float(o @ o) / HEAD + 1e-5) * i.norm_weight.double() * gate)
        states.append(state.T)
    return torch.stack(outputs), states


@pytest.mark.parametrize(("tokens", "native"), [(1, False), (1, True), (5, True), (8, True)])
def test_reference_follows_the_formulas(tokens, native):
    before = inputs(3, 2, tokens, native, seed=tokens)
    after = before.clone()
    after.state = after.state.double()
    got = after.apply(compute=torch.float64).view(3, tokens, 2, HEAD)
    for request in range(3):
        for head in range(2):
            outputs, states = by_the_formulas(before, request, head)
            torch.testing.assert_close(got[request, :, head], outputs, rtol=1e-9, atol=1e-12)
            table = before.slots.reshape(3, -1)[request].tolist()
            for t in range(tokens):
                torch.testing.assert_close(after.state[table[t], head], states[t], rtol=1e-9, atol=1e-12)


def test_reference_shifts_the_history():
    before = inputs(2, 1, 4, True, accepted=3)
    after = before.clone()
    after.apply()
    rows = before.projected.view(2, 4, -1)[:, :, : 3 * HEAD]
    for r in range(2):
        slot = int(before.slots[r, 0])
        want = torch.cat([before.conv_state[slot, 3:5], rows[r], before.conv_state[slot, 6:]])
        assert torch.equal(after.conv_state[slot], want)


@pytest.mark.parametrize("kind", ["coded", "adversarial"])
@pytest.mark.parametrize(("tokens", "native"), [(1, False), (1, True), (8, True)])
def test_ideally_rounded_and_fp32_results_pass(kind, tokens, native):
    before = inputs(6, 2, tokens, native, kind=kind, padding=2)
    ideal, single = before.clone(), before.clone()
    ideal.apply(compute=torch.float64)  # the state is rounded when stored
    single.apply()
    for got in (ideal, single):
        result = compare(got, before)
        assert result["out"] <= 1, result
        assert result["state"] <= 1, result
        assert result["untouched"] == 0, result
        assert result["history"] == 0, result
        assert result["nan"] == 0, result
    padded = single.out.view(6, tokens, -1)[4:]
    assert torch.equal(padded, torch.zeros_like(padded))


def _drop_inputs(i: Inputs) -> None:
    i.projected[:, 4 * HEAD + 96 : 4 * HEAD + 128] = 0  # a K block of the F_B product


def _older_history(i: Inputs) -> None:
    i.conv_state[:, 1:3] = i.conv_state[:, 0:2].clone()


def _no_update(i: Inputs) -> None:
    i.projected[:, 5 * HEAD :] = -200.0  # beta = 0


def _stale_rows(i: Inputs) -> None:
    i.state[:, :, 64:72] = i.state[:, :, 56:64].clone()  # a chunk of rows read before it arrived


def _wrong_gate(i: Inputs) -> None:
    i.projected[:, 3 * HEAD : 4 * HEAD] = i.projected[:, 3 * HEAD : 4 * HEAD].roll(4, dims=1)


FAULTS = [_drop_inputs, _older_history, _no_update, _stale_rows, _wrong_gate]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_limits_notice_a_fault(fault):
    before = inputs(3, 1)
    broken = before.clone()
    fault(broken)
    broken.apply()
    result = compare(broken, before)
    assert max(result["out"], result["state"]) > 2, result


def test_limits_notice_a_write_to_another_slot_and_a_skipped_shift():
    before = inputs(3, 1)
    got = before.clone()
    got.apply()
    free = next(s for s in range(1, got.state.shape[0]) if s not in before.slots.tolist())
    got.state[free, 0, 0, 0] = 1.0
    assert compare(got, before)["untouched"] == 1
    got.conv_state[int(before.slots[0])] = before.conv_state[int(before.slots[0])]
    assert compare(got, before)["history"] > 0


def test_null_slots_inside_a_request_are_not_written():
    before = inputs(2, 1, 8, True, accepted=2)
    before.slots[0, 5] = 0
    after = before.clone()
    after.apply()
    result = compare(after, before)
    assert result["untouched"] == 0
    assert torch.equal(after.state[0].isnan(), before.state[0].isnan())


@pytest.mark.parametrize("heads", [12, 6, 16, 2, 1])
def test_every_step_has_a_setting(heads):
    for rows in PREPARED_ROWS:
        for tokens in (1, 4, 5, 6, 7, 8):
            if rows % tokens == 0:
                s = choose(heads, tokens, rows // tokens)
                kernel = KdaCore(heads, pitch_of(heads), tokens, 0 if tokens == 1 else 8, 4, s)
                assert kernel.smem * s.occupancy <= 233472
                assert kernel.passes * kernel.rpp * kernel.warps * s.cluster == HEAD


def test_requests_are_spread_evenly():
    assert Settings().groups(12, 64, 132) == 64
    assert Settings(resident=2).groups(12, 64, 132) == 22  # 264 blocks, three turns
    assert Settings(resident=2).groups(12, 16, 132) == 16
    assert Settings(resident=1).groups(200, 5, 132) == 1


def test_contract_names_the_kernel_parameters():
    names = list(inspect.signature(KdaCore.kernel).parameters)
    assert names[-len(CONTRACT.parameters) :] == [p.name for p in CONTRACT.parameters]
    for p in CONTRACT.parameters:
        assert p.role == "weight" or not p.early or p.reason, p


@pytest.fixture(scope="module")
def compiled():
    kernel = KdaCore(12, pitch_of(12), 1, 0, 4, Settings(lanes=16))
    return {a: _compile(_case(kernel), a) for a in ("sm_90a", "sm_103a")}


def _case(kernel: KdaCore) -> CompileCase:
    return CompileCase(kernel, kernel_args(), kernel.threads, kernel.smem, CONTRACT)


def test_compiled_code_is_named_clean_and_reads_early(compiled):
    for ptx, binary in compiled.values():
        assert re.search(r"\.entry (\w+)", ptx)[1].startswith(CONTRACT.kernel)
        assert "ld.global.nc" not in ptx
        assert not cubin.resources(binary)[0].spills
        code = cubin.sass(binary)
        if code:  # the state copies and the F_B loads are above the dependency wait
            wait = next(n for n, line in enumerate(code) if "ACQBULK" in line)
            assert sum("UBLKCP" in line for line in code[:wait]) == 2
            assert sum("LDG.E.128" in line for line in code[:wait]) >= 13
            assert not any("STG" in line for line in code[:wait])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pitch": 100}, "pitch: 100 must be a multiple of 8"),
        ({"tokens": 2}, "tokens: 2 must be 1 to 8, and at most the 0 columns"),
        ({"tokens": 9, "columns": 9}, "tokens: 9 must be 1 to 8"),
        ({"index_dtype": torch.int16}, "index_dtype: torch.int16 must be int32 or int64"),
        ({}, "f_b: expected a CUDA tensor"),
    ],
)
def test_bad_arguments_are_one_clear_line(change, message):
    i = inputs()
    kw = {"pitch": pitch_of(1), **change}
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        PreparedKdaCore(i.f_b, i.conv_weight, i.a_log, i.dt_bias, i.norm_weight, **kw)
    assert "\n" not in str(raised.value)
