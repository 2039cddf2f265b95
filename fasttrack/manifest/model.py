"""The manifest's data model. Unknown keys are refused everywhere; every field says what it claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fasttrack.manifest.consistent import problems
from fasttrack.records import CellKey

TierName = Literal["smoke", "standard", "full"]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=80)]
PositiveInts = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
Counts = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Strict(BaseModel):
    """No unknown keys, and no value of another type than the field's: neither ``true`` nor ``"8"`` is a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EngineConfig(_Strict):
    """What executes the arms. ``options`` go to the target's engine unchanged.

    ``exact_options`` on top make an engine whose arithmetic hardly rounds, where there is such a thing: what is
    left of a difference to the oracle is then a wrong formula. Fidelity and routing are measured there as well.
    ``feature_options`` on top make the one on which features are compared token for token: the highest precision,
    and a drafter that is often right, so that drafts stand and fall.
    """

    kind: Literal["embedded", "vllm", "server"]
    options: dict[str, Any] = {}
    exact_options: dict[str, Any] = {}
    feature_options: dict[str, Any] = {}


class Hardware(_Strict):
    """The hardware the claim is about. ``accelerator: none`` is a CPU: its evidence is emulated."""

    accelerator: str = "none"  #: name or prefix as the driver reports it, e.g. "NVIDIA GB300"
    count: int = Field(default=0, ge=0)
    interconnect: str = ""
    ranks_played: int | None = Field(default=None, ge=1)  #: one GPU plays one rank of a group this large

    @model_validator(mode="after")
    def _count_fits(self) -> Hardware:
        if (self.accelerator == "none") != (self.count == 0):
            raise ValueError("count must be 0 for accelerator none, and at least 1 otherwise")
        return self


class Switch(_Strict):
    name: str
    on: str
    off: str


class Context(_Strict):
    """A context bucket in tokens, both ends included."""

    min: int = Field(ge=0)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Context:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class ScopeRow(_Strict):
    """A product of claimed values: every combination is a cell of the scope."""

    name: Slug
    step: Literal["decode", "verify"] = "decode"
    tp: PositiveInts
    requests: PositiveInts
    draft_length: Counts = [0]
    dcp: list[Annotated[int, Field(ge=1)] | Literal["tp"]] = Field(default=[1], min_length=1)
    context: list[str] = Field(default=["short"], min_length=1)

    @model_validator(mode="after")
    def _kind_fits_drafts(self) -> ScopeRow:
        if (self.step == "verify") != all(d > 0 for d in self.draft_length):
            raise ValueError("step verify needs draft_length >= 1 everywhere, step decode needs draft_length 0")
        return self

    def expand(self) -> Iterator[CellKey]:
        for tp in self.tp:
            for dcp in dict.fromkeys(tp if d == "tp" else d for d in self.dcp):
                for draft in self.draft_length:
                    for context in self.context:
                        for requests in self.requests:
                            yield CellKey(
                                step=self.step, tp=tp, requests=requests, draft_length=draft, dcp=dcp, context=context
                            )


class Published(_Strict):
    """A figure from a publication: quoted, never measured, used by no gate."""

    metric: str
    unit: str
    value: float
    baseline: float | None = None  #: the stock value of the same publication, where it gives one
    source: str


class NamedCell(_Strict):
    """One published row of the scope, as an experiment that can be repeated."""

    name: Slug
    tp: int = Field(ge=1)
    requests: int = Field(ge=1)
    draft_length: int = Field(default=0, ge=0)
    dcp: int = Field(default=1, ge=1)
    context: str = "short"
    acceptance: str = Field(default="none", pattern=r"^(none|measured|synthetic\([0-9]+(\.[0-9]+)?\))$")
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    prefill: Literal["excluded", "included"] = "excluded"
    published: list[Published] = []

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that every step emits per request, where that is given beforehand: 1 without drafts."""
        if not self.draft_length:
            return 1.0
        synthetic = self.acceptance.startswith("synthetic(")
        return float(self.acceptance[len("synthetic(") : -1]) if synthetic else None

    def tokens(self, steps: int | None) -> int:
        """Output tokens per request of a run with at most ``steps`` decode steps; prefill gives the first token."""
        if steps is None:
            return self.output_tokens
        return min(self.output_tokens, 1 + int(steps * (self.acceptance_length or 1.0)))

    @property
    def key(self) -> CellKey:
        return CellKey(
            step="verify" if self.draft_length else "decode",
            tp=self.tp,
            requests=self.requests,
            draft_length=self.draft_length,
            dcp=self.dcp,
            context=self.context,
        )


class Probe(_Strict):
    """A point outside the scope: its steps must run stock, or its deployment must be refused at start."""

    name: Slug
    step: Literal["decode", "verify", "prefill", "mixed"]
    tp: int = Field(ge=1)
    requests: int = Field(ge=1)
    draft_length: int = Field(default=0, ge=0)
    dcp: int = Field(default=1, ge=1)
    context: str = "short"
    drafts: Literal["uniform", "non-uniform"] = "uniform"
    expect: Literal["stock", "refused"] = "stock"
    reason: str = ""  #: the fallback reason that must be named; empty = any

    @property
    def key(self) -> CellKey:
        return CellKey(
            step=self.step,
            tp=self.tp,
            requests=self.requests,
            draft_length=self.draft_length,
            dcp=self.dcp,
            context=self.context,
        )


class GateSelection(_Strict):
    """Every required gate must pass; optional ones are reported."""

    required: list[str] = Field(min_length=1)
    optional: list[str] = []


class Margins(_Strict):
    """How much worse the optimised arm may be before a gate fails."""

    fidelity: float = Field(default=0.1, ge=0)  #: err(optimized) <= (1 + m) err(stock), relative
    fidelity_exact: float = Field(default=1.0, ge=0)  #: the same where the engine hardly rounds (engine.exact_options)
    routing: float = Field(default=0.25, ge=0)  #: expert sets unlike the oracle's, relative to stock's
    divergence: float = Field(default=0.5, ge=0)  #: rate at which free-running text leaves the reference's, relative
    rate_points: float = Field(default=5.0, ge=0)  #: rise of truncated, repetitive or unparsed answers, points of 100
    acceptance_points: float = Field(default=2.0, ge=0)  #: drop of the acceptance rate at any draft position
    task_points: dict[str, float] = {}  #: task -> largest acceptable drop in points of 100
    speedup: float = Field(default=1.0, ge=0)  #: smallest acceptable ratio of decode throughput
    kernel_goals: float | None = Field(default=None, ge=0, le=1)  #: share of kernel goals that must be met; none: any
    logprobs: float = Field(default=1e-9, ge=0)  #: nats between the arms' log-probabilities under feature_options
    sampling: float = Field(default=0.15, gt=0, le=1)  #: total variation between sampled distributions to be seen


class TaskConfig(_Strict):
    """One evaluation task. Its questions come from ``data`` (a local file: JSONL, CSV or Parquet), are ``generated``
    (a twin of the format, at any size), or are the published set at a pinned commit of the hub.

    What is ``assumed`` of the engine is used by ``fasttrack plan`` alone; no gate looks at it.
    """

    name: Slug
    task: Literal["aime25", "gpqa_diamond", "mrcr"]
    data: str | None = None
    generated: bool = False
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")  #: another commit than the pinned one
    needles: list[int] = []  #: MRCR: only items with so many equal requests; empty = all
    style: Literal["generate", "choice"] = "generate"  #: choice: GPQA by log-likelihood of the four letters
    estimand: Literal["population", "benchmark"] = "population"  #: questions are a sample, or are the benchmark
    items: int | None = Field(default=None, ge=1)  #: default: the tier's task_items
    repeats: int | None = Field(default=None, ge=1)  #: default: the tier's task_repeats
    max_tokens: int | None = Field(default=None, ge=1)  #: default: the tier's task_tokens
    temperature: float | None = Field(default=None, ge=0)  #: default: 0 for a single run, else 1
    chat_template_sha256: str | None = None  #: refuse an engine whose chat template renders otherwise
    assumed_mean: float = Field(default=0.85, gt=0, lt=1)  #: stock's score
    assumed_spread: float = Field(default=2.0, gt=0)  #: c of Beta(c mean, c (1 - mean)); small: easy or hopeless
    assumed_tokens: int | None = Field(default=None, ge=1)  #: per answer; default: the cap

    @model_validator(mode="after")
    def _one_source(self) -> TaskConfig:
        if self.generated and self.data:
            raise ValueError("data and generated exclude each other")
        if self.revision and (self.generated or self.data):
            raise ValueError("revision is for data of the hub: not with data or generated")
        if self.style == "choice" and self.task != "gpqa_diamond":
            raise ValueError("style choice is for gpqa_diamond")
        if self.estimand == "benchmark" and self.temperature == 0:
            raise ValueError("estimand benchmark needs a temperature above 0: its runs must differ")
        return self


class TaskRun(_Strict):
    """A task with everything about its runs decided."""

    items: int
    repeats: int
    max_tokens: int
    temperature: float


class Selection(_Strict):
    """Which cells of the scope a tier runs; empty lists select everything."""

    rows: list[str] = []
    tp: list[int] = []
    requests: list[int] = []
    draft_length: list[int] = []
    dcp: list[int] = []
    context: list[str] = []
    named: bool | list[str] = True  #: also the named cells: all, none, or these
    probes: bool = True

    def names(self, named: str) -> bool:
        """Whether the named cell is selected."""
        return self.named if isinstance(self.named, bool) else named in self.named

    def admits(self, row: str, key: CellKey) -> bool:
        wanted = (
            (self.rows, row),
            (self.tp, key.tp),
            (self.requests, key.requests),
            (self.draft_length, key.draft_length),
            (self.dcp, key.dcp),
            (self.context, key.context),
        )
        return all(not allowed or value in allowed for allowed, value in wanted)


class Tier(_Strict):
    """How much of the experiment runs. Counts are per cell, arm or task as named."""

    minutes: float = Field(gt=0)  #: the budget on the machine the manifest is written for
    cells: Selection = Selection()
    decode_steps: int = Field(default=4, ge=1)  #: pure decode steps generated per cell
    profiled_steps: int = Field(default=1, ge=1)  #: of these, under the harness's profiler
    fidelity_sequences: int = Field(default=16, ge=1)  #: teacher-forced, per step kind and context
    fidelity_tokens: int = Field(default=32, ge=1)
    task_items: int = Field(default=4, ge=1)
    task_repeats: int = Field(default=1, ge=1)
    task_tokens: int = Field(default=16, ge=1)  #: cap on generated tokens per item
    tokens_per_s: float | None = Field(default=None, gt=0)  #: aggregate, assumed: what a plan's hours rest on
    free_running_tokens: int = Field(default=16, ge=1)  #: per request
    free_running_requests: int = Field(default=128, ge=1)  #: at least so many per step kind and context
    numerics_seeds: int = Field(default=1, ge=1)
    performance_tokens: int = Field(default=8, ge=1)  #: tokens generated per request and cell
    named_steps: int | None = Field(default=None, ge=1)  #: decode steps of a named cell, at most; none: all of it
    features: Selection = Selection()  #: the deployments of the tier's cells on which features are checked


class ScopeCell(_Strict):
    """A cell with the row that claims it."""

    name: str
    key: CellKey
    named: NamedCell | None = None


class Manifest(_Strict):
    schema_version: Literal[1]
    name: Slug
    title: str = ""
    target: str
    engine: EngineConfig
    hardware: Hardware = Hardware()
    switch: Switch | None = None
    contexts: dict[str, Context] = {"short": Context(min=1, max=256)}
    scope: list[ScopeRow] = Field(min_length=1)
    named_cells: list[NamedCell] = []
    probes: list[Probe] = []
    features: list[str] = []
    tasks: list[TaskConfig] = []
    gates: GateSelection
    margins: Margins = Margins()
    trained_checkpoint: bool = True  #: false: task scores say nothing, and the report's first line says so
    tiers: dict[TierName, Tier] = Field(min_length=1)
    default_tier: TierName = "smoke"
    cannot_show: list[str] = []  #: what this manifest's hardware cannot show, in plain sentences

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        for problem in problems(self):
            # `loc` is for the reader of the file, who knows its lines; a validator's own location is the whole file.
            raise PydanticCustomError("inconsistent", "{text}", {"text": problem.text, "loc": problem.loc})
        return self

    def tier(self, name: str) -> Tier:
        return self.tiers[name]  # type: ignore[index]

    def task_run(self, task: TaskConfig, tier: str) -> TaskRun:
        """How ``task`` runs in ``tier``. Runs of a benchmark's questions must differ, so they are never greedy."""
        knobs = self.tier(tier)
        repeats = task.repeats or knobs.task_repeats
        differ = repeats > 1 or task.estimand == "benchmark"
        return TaskRun(
            items=task.items or knobs.task_items,
            repeats=repeats,
            max_tokens=task.max_tokens or knobs.task_tokens,
            temperature=task.temperature if task.temperature is not None else 1.0 if differ else 0.0,
        )

    def cells(self, tier: str) -> list[ScopeCell]:
        """The cells of the scope that ``tier`` runs, each once, in manifest order; named cells last."""
        selection = self.tier(tier).cells
        found: dict[str, ScopeCell] = {}
        for row in self.scope:
            for key in row.expand():
                if selection.admits(row.name, key):
                    found.setdefault(str(key), ScopeCell(name=row.name, key=key))
        cells = list(found.values())
        named = [c for c in self.named_cells if selection.names(c.name)]
        return cells + [ScopeCell(name=c.name, key=c.key, named=c) for c in named]

    def all_cells(self) -> list[CellKey]:
        """Every claimed cell, whatever the tier."""
        keys = [key for row in self.scope for key in row.expand()] + [c.key for c in self.named_cells]
        return list(dict.fromkeys(keys))

    def probes_for(self, tier: str) -> list[Probe]:
        return list(self.probes) if self.tier(tier).cells.probes else []
