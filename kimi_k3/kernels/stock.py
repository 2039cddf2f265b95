"""vLLM's stock kernels of the same ops, where vLLM is installed: the other side of the timings of a shard.

Projections need nothing from here: vLLM runs them with cuBLAS, as ``torch.mm`` does. Only vLLM's Python interface is
used (0.33.0). A kernel that is missing, raises or computes something else is said on stderr and not compared with.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from kimi_k3.kernels import attn_res_cases, kda_core_cases
from kimi_k3.kernels.bench_inputs import KdaLayers, ResidualSites
from kimi_k3.kernels.kda_core_cases import HEAD, LOWER_BOUND, NORM_EPS

#: relative error of an output against the reference, at most: other rounding points, not another formula
AGREES = 2e-2
#: heads per rank that vLLM's fused decode kernel is built for; other sizes run on several Triton kernels
FUSED_HEADS = (12, 24, 48, 96)

Launch = Callable[[int], None]


@functools.cache
def vllm() -> SimpleNamespace | None:
    """``attn_res``, ``rms_norm`` and ``fused_kda_decode`` of the installed vLLM, or None."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        from vllm import _custom_ops as ops
        from vllm.models.kimi_k3.nvidia.ops import attn_res
    except Exception as error:  # a broken or other installation is not a reason to time nothing
        _say(f"vLLM cannot be used: {type(error).__name__}: {error}")
        return None
    return SimpleNamespace(attn_res=attn_res, rms_norm=ops.rms_norm, fused_kda_decode=ops.fused_kda_decode)


def kda(layers: KdaLayers) -> tuple[str, Launch] | None:
    """F_B by ``torch.mm``, then vLLM's fused decode kernel; for plain decode of the head counts that it serves."""
    found = vllm()
    if found is None or layers.columns or layers.heads not in FUSED_HEADS:
        return None
    k, rows, width = layers, layers.requests, layers.heads * HEAD
    qkv, gate, f_a, beta = k.projected.split([3 * width, width, HEAD, k.pitch - 4 * width - HEAD], 1)
    gate, beta = gate.unflatten(1, (k.heads, HEAD)), beta[:, : k.heads].unsqueeze(0)
    raw = torch.empty(1, rows, k.heads, HEAD, dtype=torch.bfloat16, device=qkv.device)
    flat = raw.view(rows, width)

    def decode(i: int, conv: Tensor, state: Tensor, out: Tensor) -> None:
        torch.mm(f_a, k.f_b[i].T, out=flat)
        found.fused_kda_decode(
            x=qkv, weight=k.conv_weight[i], bias=None, conv_state=conv.transpose(-1, -2), raw_g=raw, raw_beta=beta,
            A_log=k.a_log[i], dt_bias=k.dt_bias[i], state_indices=k.slots, state=state,
            out=out.view(1, rows, k.heads, HEAD), lower_bound=LOWER_BOUND, output_gate=gate, norm_weight=k.norm[i],
            norm_eps=NORM_EPS,
        )  # fmt: skip

    def probe() -> tuple[Tensor, Tensor]:
        given = (k.projected, k.f_b[0], k.conv_weight[0], k.a_log[0], k.dt_bias[0], k.norm[0], k.slots, None)
        outs = []
        for run in (lambda *s: decode(0, *s), lambda *s: kda_core_cases.reference(*given, *s)):
            conv, state, out = k.conv[0].clone(), k.state[0].clone(), torch.zeros_like(k.out[0])
            run(conv, state, out)
            outs.append(out)
        return outs[0], outs[1]

    name = "torch.mm of F_B and vLLM fused_kda_decode"
    return _agreeing(name, probe, lambda i: decode(i, k.conv[i], k.state[i], k.out[i]))


def residual(sites: ResidualSites) -> tuple[str, Launch] | None:
    """vLLM's attention residual; at the final site its RMSNorm as well."""
    found = vllm()
    if found is None:
        return None
    s, final = sites, bool(sites.site.get("final"))
    opened = s.site["stored"] if s.site.get("opens") else -1
    ones = torch.ones(s.hidden, dtype=torch.bfloat16, device=s.prefix.device)
    query = s.query.bfloat16()

    def run(i: int, prefix: Tensor, blocks: Tensor) -> Tensor:
        eps = attn_res_cases.EPS
        gamma = None if final else s.gamma[i]
        out: Tensor = found.attn_res(
            prefix, s.delta[i], blocks, ones, query[i], gamma, num_blocks=s.site["stored"], block_write_idx=opened,
            eps=eps, output_norm_eps=eps,
        )  # fmt: skip
        if final:
            found.rms_norm(s.out[i], out, s.gamma[i], eps)
            return s.out[i]
        return out

    def probe() -> tuple[Tensor, Tensor]:
        theirs = run(0, s.prefix[0].clone(), s.blocks[0].clone()).clone()
        ours = torch.empty_like(theirs)
        given = (s.delta[0], s.prefix[0].clone(), s.blocks[0].clone(), s.query[0], s.gamma[0], None)
        attn_res_cases.reference(*given, ours, **s.site)
        return theirs, ours

    def launch(i: int) -> None:
        run(i, s.prefix[i], s.blocks[i])

    return _agreeing("vLLM attn_res" + (" and rms_norm" if final else ""), probe, launch)


def _agreeing(name: str, probe: Callable[[], tuple[Tensor, Tensor]], launch: Launch) -> tuple[str, Launch] | None:
    try:
        theirs, reference = (t.float() for t in probe())
    except Exception as error:  # another version's interface
        _say(f"{name} is not compared with: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return None
    off = float((theirs - reference).norm() / reference.norm())
    if not off <= AGREES:
        _say(f"{name} is not compared with: its output differs by {off:.3g} of the reference's norm")
        return None
    return name, launch


def _say(text: str) -> None:
    print(f"kimi_k3: {text}", file=sys.stderr)
