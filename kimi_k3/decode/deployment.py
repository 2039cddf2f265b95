"""The deployment gate: every reason why the specialised path cannot serve a deployment, all at once, at start.

A refused deployment never degrades silently to the stock path; only single steps do, with a named reason
(``plan.py``). Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kimi_k3.names import DRAFT_LENGTHS, TENSOR_PARALLEL
from kimi_k3.reference.config import KimiK3Config

DEVICE_FAMILIES = ("cpu", "sm_90", "sm_100", "sm_103")
KV_DTYPES = ("bfloat16", "float8_e4m3fn", "float32", "float64")  #: the last two are emulation only
STATE_DTYPES = ("float32", "float64")
CONV_DTYPES = ("bfloat16", "float32", "float64")
SPECULATORS = ("none", "dspark")


@dataclass(frozen=True)
class Deployment:
    """Everything the gate looks at. Defaults are a deployment that passes, apart from the model's own widths."""

    config: KimiK3Config
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    draft_length: int = 0
    speculator: str = "none"
    adaptive_verification: bool = False
    state_scheme: str = "native"  #: "native" state slots or "recover" (one checkpoint and records)
    expert_parallel: bool = False
    lora: bool = False
    dual_batch_overlap: bool = False
    sleep_mode: bool = False
    enforce_eager: bool = False  #: full decode graphs disabled; meaningless and ignored on a CPU
    device: str = "cpu"  #: "cpu" or the GPU family, "sm_90"
    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    max_context: int | None = None
    interleave: int = 1  #: consecutive tokens that one rank owns under context parallelism


class UnsupportedDeployment(ValueError):
    """The specialised path cannot serve this deployment. ``reasons`` holds every reason, ``name: explanation``."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(f"decode_backend latency_specialized cannot serve this deployment: {'; '.join(reasons)}")


def _one_of(values: tuple[object, ...]) -> str:
    return "expected one of " + ", ".join(str(v) for v in values)


def _parallel(d: Deployment) -> list[tuple[str, bool, str]]:
    return [
        ("tensor_parallel", d.tp not in TENSOR_PARALLEL, f"{d.tp}, {_one_of(TENSOR_PARALLEL)}"),
        ("pipeline_parallel", d.pp != 1, f"{d.pp} stages, expected 1"),
        ("context_parallel", d.dcp not in (1, d.tp), f"{d.dcp}, expected 1 or the tensor-parallel size {d.tp}"),
        ("interleave", d.interleave < 1, f"{d.interleave}, expected at least 1"),
        ("expert_parallel", d.expert_parallel, "on, expected off: experts are sharded by intermediate width"),
    ]


def _divisibility(d: Deployment) -> list[tuple[str, bool, str]]:
    c, tp = d.config, max(d.tp, 1)
    widths = {
        "kda_heads": c.kda_num_heads,
        "attention_heads": c.num_attention_heads,
        "hidden_size": c.hidden_size,
        "latent_size": c.routed_expert_hidden_size,
        "experts": c.num_experts,
        "expert_intermediate": c.moe_intermediate_size,
        "shared_intermediate": c.shared_intermediate_size,
        "dense_intermediate": c.intermediate_size,
        "vocabulary": c.vocab_size,
    }
    rules = [(name, width % tp != 0, f"{width} cannot be divided by {tp} ranks") for name, width in widths.items()]
    if c.moe_intermediate_size % tp == 0:
        part = c.moe_intermediate_size // tp
        straddles = part % c.mxfp4_group != 0 and c.mxfp4_group % part != 0
        text = f"{part} columns per rank straddle groups of {c.mxfp4_group}"
        rules.append(("expert_scale_groups", straddles, text))
    return rules


def _features(d: Deployment) -> list[tuple[str, bool, str]]:
    c = d.config
    longest = d.max_context if d.max_context is not None else c.max_position_embeddings
    bad_context = not 0 < longest <= c.max_position_embeddings
    return [
        ("lora", d.lora, "on, expected off"),
        ("dual_batch_overlap", d.dual_batch_overlap, "on, expected off"),
        ("sleep_mode", d.sleep_mode, "on, expected off: peers hold addresses of this rank's memory"),
        ("enforce_eager", d.enforce_eager and d.device != "cpu", "on, expected full decode graphs"),
        ("device", d.device not in DEVICE_FAMILIES, f"{d.device}, {_one_of(DEVICE_FAMILIES)}"),
        ("kv_dtype", d.kv_dtype not in KV_DTYPES, f"{d.kv_dtype}, {_one_of(KV_DTYPES)}"),
        ("state_dtype", d.state_dtype not in STATE_DTYPES, f"{d.state_dtype}, {_one_of(STATE_DTYPES)}"),
        ("conv_dtype", d.conv_dtype not in CONV_DTYPES, f"{d.conv_dtype}, {_one_of(CONV_DTYPES)}"),
        ("draft_length", d.draft_length not in DRAFT_LENGTHS, f"{d.draft_length}, {_one_of(DRAFT_LENGTHS)}"),
        ("speculator", d.speculator not in SPECULATORS, f"{d.speculator}, {_one_of(SPECULATORS)}"),
        ("adaptive_verification", d.adaptive_verification, "on, expected off: verify steps are uniform"),
        ("state_scheme", d.state_scheme != "native", f"{d.state_scheme}, expected native state slots"),
        ("max_context", bad_context, f"{longest}, expected 1 to {c.max_position_embeddings}"),
    ]


_RULES: tuple[Callable[[Deployment], list[tuple[str, bool, str]]], ...] = (_parallel, _divisibility, _features)


def refusals(deployment: Deployment) -> list[str]:
    """Every reason to refuse, as ``name: explanation``; empty when the deployment is served."""
    return [f"{name}: {text}" for rules in _RULES for name, broken, text in rules(deployment) if broken]


def require(deployment: Deployment) -> None:
    """Raise :class:`UnsupportedDeployment` with every reason, or return."""
    reasons = refusals(deployment)
    if reasons:
        raise UnsupportedDeployment(reasons)
