"""Names that the reference, the executor and the target share. No torch, nothing of ``kimi_k3.decode``.

The off arm must not load the optimised packages, yet has to describe them; so their names live here.
"""

from __future__ import annotations

SWITCH = "decode_backend"
SWITCH_ON = "latency_specialized"
SWITCH_OFF = "auto"

#: Import names that stay unloaded while the switch is off.
OPTIMIZED_MODULES = ("kimi_k3.decode", "kimi_k3.kernels", "cutlass")

#: Profiler range around the model part of each step: ``fasttrack.step/<run>/<index>``.
STEP_RANGE = "fasttrack.step"

#: Op names of the specialised schedule, as the profiler shows them (``torch.library`` namespace ``kimi_k3``).
OPS = (
    "kimi_k3::embed",
    "kimi_k3::attn_res",
    "kimi_k3::in_proj",
    "kimi_k3::kda_core",
    "kimi_k3::mla_query",
    "kimi_k3::mla_core",
    "kimi_k3::mla_value",
    "kimi_k3::oproj_publish",
    "kimi_k3::oproj_reduce_attnres",
    "kimi_k3::dense_gate_up",
    "kimi_k3::dense_down_push",
    "kimi_k3::dense_reduce",
    "kimi_k3::moe_front",
    "kimi_k3::route",
    "kimi_k3::shared_gate_up",
    "kimi_k3::shared_down_push",
    "kimi_k3::fc1",
    "kimi_k3::fc2_publish",
    "kimi_k3::moe_tail",
    "kimi_k3::prefetch",
)

#: What serves an op: plain PyTorch, or the CuTe kernels (on a GPU).
PROVIDERS = ("torch", "cute")

#: Who may serve an op: the torch reference of every op, and the CuTe kernels.
PROVIDERS = ("torch", "cute")

#: Reason of every step while the switch is off: there is no executor to ask.
REASON_SWITCH_OFF = "switch_off"

#: Every name the ``reason`` of a stock step can have.
FALLBACK_REASONS = (
    REASON_SWITCH_OFF,
    "empty",  #: a step without requests
    "prefill",  #: every request's rows are prompt tokens
    "mixed",  #: prompt rows and decode rows in one step
    "non_uniform_drafts",  #: requests of one step verify different numbers of drafts
    "draft_length_unsupported",  #: more drafts than the state slots hold, or a length the path never serves
    "too_many_rows",  #: requests x (1 + draft length) above the largest row count the path ever serves
    "unprepared_rows",  #: within that limit, but this executor prepared no step that large
    "context_too_long",  #: a request would grow beyond the executor's longest context
)

MAX_ROWS = 64
TENSOR_PARALLEL = (1, 2, 8, 16)
DRAFT_LENGTHS = (0, 3, 4, 5, 6, 7)
CONTEXT_PARALLEL = ("1", "tp")

PRECISIONS = ("bf16", "bf16-kvfp8", "fp32", "fp64")  #: of ``kimi_k3.reference.precision``

#: What the embedded engine serves on both paths, in the harness's words.
FEATURES = (
    "sampling",
    "structured_output",
    "logprobs",
    "stop",
    "penalties",
    "prefix_reuse",
    "streaming",
    "full_context",
    "stock_resumed",
)

#: Faults that can be planted into an optimised arm (``kimi_k3.faults``).
FAULTS = (
    "slot-after-rejection",
    "conv-window",
    "decay-scaled",
    "stale-prefix",
    "stale-mailbox",
    "lse-base",
    "empty-shard",
    "last-shard-dropped",
    "rank-dropped",
    "norm-before-reduction",
    "expert-swapped",
    "penalty-ignored",
    "refuse-every-step",
    "false-ledger",
)
