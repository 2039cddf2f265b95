"""The record schema: one class per kind of measurement.

Every record says which work unit and attempt produced it, in which arm and cell, and what its
numbers may be used for (``evidence``). Records are written once and never edited; gates read them
and nothing else. Adding a field needs a default; changing a meaning needs a new ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fasttrack.errors import UsageError

Arm = str  # "stock" | "stock-repeat" | "optimized" | "oracle" | "sabotaged:<fault>"

StepKind = Literal["decode", "verify", "prefill", "mixed"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", allow_inf_nan=True)


class Evidence(_Model):
    """What a number may be used for.

    ``emulated``: CPU or virtual ranks; proves schedule and state, says nothing about speed.
    ``shard``: one GPU plays one rank (``rank`` of ``ranks``); kernel times count, communication does not.
    ``published``: quoted from ``source``, never measured here. ``measured``: the claimed hardware itself.
    """

    kind: Literal["measured", "shard", "emulated", "published"]
    device: str = ""
    rank: int | None = None
    ranks: int | None = None
    source: str = ""


class CellKey(_Model):
    """One point of the scope. ``context`` names a bucket of the manifest; rows = requests x (1 + draft_length)."""

    step: StepKind
    tp: int = Field(ge=1)
    requests: int = Field(ge=0)
    draft_length: int = Field(default=0, ge=0)
    dcp: int = Field(default=1, ge=1)
    context: str = "short"

    @property
    def rows(self) -> int:
        return self.requests * (1 + self.draft_length)

    def __str__(self) -> str:
        return f"{self.step}/tp{self.tp}/r{self.requests}/dl{self.draft_length}/dcp{self.dcp}/{self.context}"


class _Base(_Model):
    schema_version: int = 1
    unit: str  #: work unit that produced the record
    attempt: int = 1
    arm: Arm = ""
    cell: CellKey | None = None
    evidence: Evidence


class EngineRecord(_Base):
    """The resolved configuration of one arm's engine: what the two arms must share, and what may differ."""

    type: Literal["engine"] = "engine"
    engine: str
    switch: dict[str, str]
    devices: list[str]
    checkpoint: str  #: digest of the weights
    config: dict[str, Any]  #: everything resolved; arms are compared key by key
    modules_loaded: list[str] = []  #: loaded modules below the target's optimised packages
    vocab_size: int | None = None  #: with the end tokens, what random prompts are drawn from
    eos_token_ids: list[int] | None = None


class StepRecord(_Base):
    """First witness: the engine's own ledger, one record per engine step."""

    type: Literal["step"] = "step"
    run: str  #: which generation call
    index: int
    kind: StepKind
    requests: int
    rows: int
    padded_rows: int
    draft_length: int
    tp: int
    dcp: int
    context_max: int  #: longest context among the requests, in tokens
    path: Literal["specialized", "stock"]
    reason: str | None  #: name of the fallback reason on the stock path, None on the specialised one
    ops: dict[str, int]  #: op name -> calls
    providers: dict[str, str] = {}  #: op name -> provider ("torch", "cute", ...)
    slots: list[int] = []  #: state slots written
    emitted: int = 0  #: tokens emitted by the step, all requests
    accepted: list[int] = []  #: drafts that stood, per request that had any, in batch order
    rank_hashes: list[str] = []  #: one digest per rank over plan and outputs; all equal or the ranks diverged
    unowned_changed: int | None = None  #: cache rows and state slots changed that no request owns; None: not watched


class TraceRecord(_Base):
    """Second witness: what the profiler saw inside one step, observed by the harness and not by the engine."""

    type: Literal["trace"] = "trace"
    run: str
    index: int
    ops: dict[str, int]  #: op or kernel name -> calls, target ops only
    other_ops: int  #: everything else the profiler saw in the step
    source: str  #: "torch.profiler/cpu", "torch.profiler/cuda"


class GenerationRecord(_Base):
    """One completed request of a free-running generation."""

    type: Literal["generation"] = "generation"
    run: str
    request: str
    prompt_sha256: str
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    text: str | None = None
    logprobs: list[float] | None = None  #: of the chosen tokens, natural log
    top_logprobs: list[dict[int, float]] | None = None  #: alternatives of each token, most likely first
    sampling: dict[str, Any] = {}  #: parameters that differ from greedy decoding without stops
    arrival_time: float | None = None  #: seconds on the engine's clock
    token_times: list[float] | None = None  #: the same clock, one per token
    cached_tokens: int = 0  #: prompt tokens found in the prefix cache
    details: dict[str, Any] = {}


class SampledRecord(_Base):
    """Sampled tokens of one request, each as a quantile of the distribution that stock samples from.

    The tokens of that distribution are ordered by falling probability; a token's quantile is drawn uniformly
    from its interval of the cumulative probability. Where the arm samples what stock samples, quantiles are
    independent and uniform on [0, 1] whatever the distributions are (probability integral transform).
    """

    type: Literal["sampled"] = "sampled"
    run: str
    request: str
    setting: str  #: name of the sampling parameters, the same in every arm
    sampling: dict[str, Any]
    quantiles: list[float]  #: one per token inside the support, in order
    outside: int  #: tokens that stock's distribution gives no probability


class NumericsRecord(_Base):
    """One op, one input family, compared with the FP64 oracle.

    ``worst`` is the largest elementwise error divided by its derived bound: <= 1 passes.
    """

    type: Literal["numerics"] = "numerics"
    op: str
    provider: str
    case: str
    family: str  #: normal, outliers, denormals, negative_zero, coded, ...
    output: str
    dtype: str
    elements: int
    worst: float
    failing: int
    max_abs_error: float
    bound: str  #: the derivation, in words
    nan_outputs: int  #: poison that survived in elements the op must write
    changed_untouched: int  #: elements the op must not write and did
    rerun_identical: bool  #: bit-identical with another poison in outputs and scratch


class FidelityRecord(_Base):
    """Teacher-forced comparison of one arm with the oracle, over one sequence's scored positions.

    Sums and counts, so that records add up. ``abs_error`` is |logprob - oracle| of the forced token.
    """

    type: Literal["fidelity"] = "fidelity"
    sequence: str
    positions: int
    kl_sum: float  #: sum over positions of KL(oracle || arm), nats
    kl_max: float
    abs_error_sum: float
    abs_error_max: float
    log_error_sum: float | None = None  #: sum over positions of ln sqrt(KL), which weighs every position alike
    largest_error: float | None = None  #: largest |logprob - oracle| of any token, nats
    largest_flip: float = 0.0  #: widest gap between the oracle's best two tokens that the arm turned over, nats
    exact: bool = False  #: measured with the engine's exact options
    context: int | None = None  #: tokens of the sequence at its end, prompt included
    late: bool = False  #: arrived after other requests had ended, so that slots and pages changed hands
    batch: str = ""  #: which batch, named by its first sequence: its seed derives from this name
    prompt_sha256: str = ""
    prompt_tokens: int = 0
    top1_flips: int
    near_ties: int  #: flips whose oracle top-2 gap is below the rounding bound
    nonfinite: int


class EvalItemRecord(_Base):
    """One question, one repeat, one arm. ``item`` is a hash where the task is gated."""

    type: Literal["eval_item"] = "eval_item"
    task: str
    item: str
    repeat: int
    score: float
    metric: str
    prompt_sha256: str
    response_sha256: str
    response: str | None = None
    finish_reason: str
    parsed: bool
    output_tokens: int
    second_score: float | None = None  #: by a scorer written independently of the first
    details: dict[str, Any] = {}


class EvalTaskRecord(_Base):
    """How one arm ran one task: what must be the same in both arms, and the hashes of what was asked."""

    type: Literal["eval_task"] = "eval_task"
    task: str
    source: str  #: "generated", "file:NAME" or "hub:REPOSITORY@COMMIT"
    rows_sha256: str  #: the rows as asked, option order included
    task_file_sha256: str  #: prompt template and scorer
    chat_template_sha256: str | None  #: a fixed conversation as the engine renders it; None = no template
    items: int
    repeats: int
    max_tokens: int
    temperature: float


class RoutingRecord(_Base):
    """Experts chosen for one teacher-forced sequence in its pure decode steps, compared with the oracle's.

    A *choice* is one step in one layer.
    """

    type: Literal["routing"] = "routing"
    sequence: str
    choices: int
    sets_differ: int  #: choices whose set of experts is not the oracle's
    experts_differ: int  #: experts that the oracle chose and the arm did not, all choices
    experts: int  #: chosen per choice
    layers: dict[int, int] = {}  #: layer -> sets that differ, where any do
    exact: bool = False


class FreeRunRecord(_Base):
    """One free-running request at temperature 0, compared with the same request of a reference run."""

    type: Literal["free_run"] = "free_run"
    batch: str
    request: str
    reference: str  #: "oracle", or "stock recomposed": stock in other company
    tokens: int
    agreed: int  #: leading tokens equal to the reference's
    diverged: bool  #: False where it agreed to its end
    repetitive: bool
    truncated: bool  #: ended by the length cap
    nonfinite: int  #: log-probabilities of emitted tokens that are no finite number
    prompt_sha256: str = ""
    prompt_tokens: int = 0


class AcceptanceRecord(_Base):
    """Drafts at one position, counted over verify steps: how often one was offered there, and stood."""

    type: Literal["acceptance"] = "acceptance"
    mode: str  #: "measured" or "synthetic(AL)": never added up
    position: int  #: 1 is the first draft of a step
    offered: int
    stood: int


class NotMeasuredRecord(_Base):
    """A unit that this engine cannot do, and why."""

    type: Literal["not_measured"] = "not_measured"
    what: str
    reason: str


class PerformanceRecord(_Base):
    """One metric of one request or of one run.

    ``metric``: decode_throughput, prefill_time, ttft, output_throughput, request_latency, step_time, kernel_time.
    """

    type: Literal["performance"] = "performance"
    metric: str
    unit_of_measure: str  #: "tokens/s", "s", ...
    value: float
    per: Literal["aggregate", "user", "request", "step", "launch"]
    tokens: int  #: tokens counted in the numerator (0 where none)
    prefill_included: bool
    step_kinds: dict[str, int]  #: how many steps of each kind lie in the window
    acceptance: str  #: "none", "measured", "synthetic(AL)"
    clock: str
    samples: int = 1
    request: str | None = None
    details: dict[str, Any] = {}


class OffStateRecord(_Base):
    """Off means off: stock's outputs in a fresh process, with the optimised packages present or physically absent, and
    in the process of the run after the optimised path has run there."""

    type: Literal["off_state"] = "off_state"
    checkout: Literal["complete", "optimised-packages-deleted", "this-process"]
    outputs_sha256: str
    outputs: int  #: tokens and log-probabilities hashed
    modules_loaded: list[str]  #: of the optimised packages, by name or by the file they came from
    files_opened: list[str] = []  #: of the optimised packages, by whatever means
    environment_added: list[str] = []  #: names of variables that the process added or changed
    environment_given: list[str] = []  #: names of the variables it started with, besides those about Python's paths
    environment_withheld: list[str] = []  #: names of the target's and the harness's own that it was not given


class RefusalRecord(_Base):
    """The engine refused a deployment at start, with every reason at once."""

    type: Literal["refusal"] = "refusal"
    deployment: dict[str, Any]
    refused: bool
    reasons: list[str]


class PublishedRecord(_Base):
    """A figure from a publication. Never a measurement; shown beside ours, used by no gate."""

    type: Literal["published"] = "published"
    name: str
    metric: str
    value: float
    unit_of_measure: str
    setup: str


class FeatureRecord(_Base):
    """One feature that may not be optimised away: what was asked, what both witnesses say, whether it held."""

    type: Literal["feature"] = "feature"
    feature: str
    variant: str  #: "plain" or "dspark(DL)"
    held: bool
    specialized_steps: int
    stock_steps: int
    witnessed_steps: int  #: specialised steps the profiler also saw
    numbers: dict[str, float] = {}
    explanation: str = ""


RECORD_TYPES: tuple[type[_Base], ...] = (
    EngineRecord,
    StepRecord,
    TraceRecord,
    GenerationRecord,
    NumericsRecord,
    SampledRecord,
    FidelityRecord,
    RoutingRecord,
    FreeRunRecord,
    AcceptanceRecord,
    EvalTaskRecord,
    EvalItemRecord,
    NotMeasuredRecord,
    PerformanceRecord,
    OffStateRecord,
    RefusalRecord,
    PublishedRecord,
    FeatureRecord,
)

Record = Union[RECORD_TYPES]  # type: ignore[valid-type]  # noqa: UP007  (built from the tuple above)

_ADAPTER: TypeAdapter[Any] = TypeAdapter(Annotated[Record, Field(discriminator="type")])


def parse_record(line: str, *, where: str) -> Any:
    """Parse one JSONL line. ``where`` (file:line) goes into the error."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "record"
        raise UsageError(f"{field}: {first['msg']}", where=where, expected="a record of schema_version 1") from None
