"""The target protocol: everything the harness may ask of an optimisation under test.

A target is a package that registers an object under the entry-point group ``fasttrack.targets``.
Describing it must not import torch: ``plan`` and ``schema`` work on a machine that has none. The
harness never imports a target by name; it speaks only through the classes below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fasttrack.errors import UsageError, nearest
from fasttrack.records import CellKey, StepRecord
from fasttrack.target_kernels import (  # noqa: F401  (one place to import the whole protocol from)
    OTHER_LAUNCH,
    CompiledKernel,
    KernelBenchmark,
    KernelBenchmarkTarget,
    KernelContract,
    KernelException,
    KernelMeasurement,
    KernelParameter,
    KernelTarget,
    KernelTiming,
)

if TYPE_CHECKING:
    import torch

ENTRY_POINT_GROUP = "fasttrack.targets"

#: Name of the profiler range an engine opens around each of its steps: ``fasttrack.step/<run>/<index>``.
#: The harness attributes profiler events to steps by this range.
STEP_RANGE = "fasttrack.step"


@dataclass(frozen=True)
class Limits:
    """What the optimised path claims to cover. A manifest scope outside these limits is refused."""

    tensor_parallel: tuple[int, ...]
    max_rows: int  #: rows of one step: requests x (1 + draft length)
    draft_lengths: tuple[int, ...]  #: speculative draft lengths; 0 = plain decode
    context_parallel: tuple[str, ...] = ("1",)  #: "1" and/or "tp"
    max_context: int | None = None


@dataclass(frozen=True)
class TargetDescription:
    name: str
    version: str
    model: str
    switch: str  #: option that selects the path, e.g. "decode_backend"
    on: str  #: value that selects the optimised path
    off: str  #: default value: stock
    source_paths: tuple[str, ...]  #: files and folders a change may touch, relative to the repository root
    optimized_modules: tuple[str, ...]  #: import names that must not be loaded while the switch is off
    ops: tuple[str, ...]  #: op names as the profiler shows them, e.g. "kimi_k3::in_proj"
    kernels: tuple[str, ...]  #: GPU kernel names or prefixes
    fallback_reasons: tuple[str, ...]  #: every name a step's ``reason`` can have
    limits: Limits
    engines: tuple[str, ...] = ("embedded",)
    faults: tuple[str, ...] = ()  #: named faults of the optimised path, for sabotaged arms
    features: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()  #: who may serve an op, as the ledger names them; empty = not told
    counts_state: tuple[str, ...] = ()  #: engines that count what a step changes of state nobody owns

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TargetDescription:
        """The inverse of ``dataclasses.asdict`` after a round trip through JSON.

        Raises :class:`UsageError` when fields are missing or unknown.
        """
        try:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
            limits: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("limits").items()
            }
            return TargetDescription(limits=Limits(**limits), **values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"malformed target description ({error})", where="run.json: target") from None


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters with the meaning the OpenAI and vLLM interfaces give them."""

    temperature: float = 0.0
    top_k: int = 0  #: 0 = off
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  #: how many alternatives per token; None = none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    structured: Mapping[str, Any] | None = None  #: {"json_schema": ...} or {"regex": ...}


@dataclass(frozen=True)
class Request:
    """One request. ``arrival_step`` makes schedules reproducible: the engine admits it at that step."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    arrival_step: int = 0
    forced: tuple[int, ...] = ()  #: teacher forcing: emit these tokens instead of sampled ones
    max_drafts: int | None = None  #: draft tokens verified per step, at most; None = the engine's draft length


@dataclass
class Completion:
    """What came back. Times are seconds on the engine's clock, one per emitted token."""

    id: str
    token_ids: list[int]
    finish_reason: str  #: "stop", "length", "abort"
    text: str = ""
    logprobs: list[float] | None = None  #: chosen tokens, natural log
    top_logprobs: list[dict[int, float]] | None = None
    arrival_time: float = 0.0
    token_times: list[float] = field(default_factory=list)
    full_logprobs: torch.Tensor | None = None  #: [emitted, vocab] when ``keep_logits`` was asked
    cached_tokens: int = 0  #: prompt tokens that were not computed because a prefix was found in the cache


@dataclass(frozen=True)
class EngineSpec:
    """How to build the engine of one arm. ``options`` come from the manifest's ``engine.options``."""

    kind: str  #: "embedded", "vllm", "server"
    arm: str  #: "stock", "stock-repeat", "optimized", "oracle" (highest precision), "sabotaged:<fault>"
    switch_value: str
    tp: int = 1
    dcp: int = 1
    draft_length: int = 0
    max_requests: int = 64
    acceptance: str = "none"  #: "none", "measured", "synthetic(AL)"
    options: Mapping[str, Any] = field(default_factory=dict)
    workdir: Path = Path(".")
    seed: int = 0


@dataclass(frozen=True)
class EngineInfo:
    """The resolved engine. ``config`` holds every option that could change speed or answers."""

    kind: str
    devices: tuple[str, ...]
    checkpoint: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    config: Mapping[str, Any]
    evidence: str  #: "measured", "shard" or "emulated"


@runtime_checkable
class Engine(Protocol):
    """Executes one arm. Steps open a :data:`STEP_RANGE` profiler range around themselves."""

    def info(self) -> EngineInfo: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Run the requests to completion, in the order of ``requests``. ``on_step`` is called after each step."""
        ...

    def drain_ledger(self) -> list[LedgerStep]:
        """The steps executed since the last call, oldest first; empties the ledger."""
        ...

    def reset(self) -> None:
        """Forget every request, cache and prefix."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ChatEngine(Protocol):
    """What an engine with a chat template offers besides :class:`Engine`."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (role and content per turn), ready for the assistant's next turn.

        :class:`fasttrack.errors.EvidenceError` where this checkpoint or server has no chat template after all.
        """
        ...


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. ``text`` may lag behind ``token_ids``, but is never taken back: unfinished
    characters and possible beginnings of stop strings are held back. ``finish_reason`` is set in the last one."""

    id: str
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[float] | None = None  #: chosen tokens, natural log
    top_logprobs: Sequence[Mapping[int, float]] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0


@runtime_checkable
class ServingEngine(Engine, Protocol):
    """What an engine offers that can be served: requests come and go between steps. Not thread-safe."""

    def submit(self, request: Request) -> None:
        """Queue a request. :class:`UsageError` for one that cannot be served, or whose id is still active."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self, run: str, index: int) -> list[Delta]:
        """Run one step; what each request got, in batch order."""
        ...


class ChatParser(Protocol):
    """Splits an assistant's text into reasoning and answer while it grows."""

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """What ``text`` adds to the reasoning and to the answer; ``final`` with the last piece."""
        ...


@runtime_checkable
class ChatServingEngine(ServingEngine, Protocol):
    """A served engine with a chat template. ``options`` are the template's own (a client's ``chat_template_kwargs``);
    ``structured``: the answer is held to a grammar from its first token on."""

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, structured: bool = False
    ) -> tuple[list[int], ChatParser]:
        """Token ids of a conversation, and what reads the answer. :class:`UsageError` says what cannot be rendered."""
        ...


@dataclass(frozen=True)
class RoutingStep:
    """The experts that one layer chose in one step, per row in batch order, each row's ids ascending."""

    run: str
    index: int
    layer: int
    experts: Sequence[Sequence[int]]


@runtime_checkable
class RoutingEngine(Protocol):
    """What an engine of a mixture of experts may offer besides :class:`Engine`."""

    def record_routing(self, on: bool) -> None:
        """Start or stop keeping the chosen experts of every step; off by default, and nothing else may change."""
        ...

    def drain_routing(self) -> list[RoutingStep]:
        """What was chosen since the last call, oldest first; empties the record."""
        ...


@runtime_checkable
class StateWatchingEngine(Protocol):
    """What an engine that owns its caches may offer besides :class:`Engine`."""

    def watch_state(self, on: bool) -> None:
        """Start or stop counting, for every step, what it changed of the state that none of its requests owns
        (:attr:`LedgerStep.unowned_changed`); off by default, and nothing else may change."""
        ...


@dataclass
class LedgerStep:
    """One step as the engine's ledger tells it; becomes a :class:`StepRecord`. ``wall`` is in seconds."""

    run: str
    index: int
    kind: str
    requests: int
    rows: int
    padded_rows: int
    draft_length: int
    tp: int
    dcp: int
    context_max: int
    path: str
    reason: str | None
    ops: dict[str, int]
    providers: dict[str, str]
    slots: list[int]  #: state slots written, one per request or per row; 0 is the null slot of padding rows
    rank_hashes: list[str]
    wall: float = 0.0
    emitted: int = 0  #: tokens emitted by the step, all requests
    accepted: list[int] = field(default_factory=list)  #: drafts that stood, per request that had any, in batch order
    unowned_changed: int | None = None  #: cache rows and state slots changed that no request of the step owns


@dataclass(frozen=True)
class NumericsCase:
    """One op, one shape, to be run by the harness on each input family.

    ``inputs(family, seed)`` returns a fresh dict of tensors. ``run(inputs, poison)`` runs the provider
    with every output, scratch buffer, unused slot and padded row pre-filled with ``poison`` (NaN or its
    bit pattern) and returns outputs and mutated tensors by name. ``oracle(inputs)`` gives FP64 outputs
    of the same names. ``bound(inputs, oracle)`` gives an elementwise error bound per output, derived
    from the rounding points. ``untouched(inputs, outputs)`` counts elements that should not have changed.
    """

    op: str
    name: str
    provider: str
    families: tuple[str, ...]
    inputs: Callable[[str, int], dict[str, Any]]
    run: Callable[[dict[str, Any], float], dict[str, Any]]
    oracle: Callable[[dict[str, Any]], dict[str, Any]]
    bound: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    bound_text: str
    untouched: Callable[[dict[str, Any], dict[str, Any]], int]


@runtime_checkable
class Target(Protocol):
    """What a target package registers."""

    def describe(self) -> TargetDescription: ...

    def engine(self, spec: EngineSpec) -> Engine:
        """Build the engine of one arm. Raises :class:`DeploymentRefused` with every reason at once."""
        ...

    def numerics_cases(self, tier: str, options: Mapping[str, Any]) -> Iterable[NumericsCase]: ...

    def profile(self, engine: Engine) -> AbstractContextManager[None]:
        """A target may need to prepare an engine for profiling; most return ``contextlib.nullcontext()``."""
        ...


class DeploymentRefused(Exception):
    """The optimised path cannot serve this deployment; ``reasons`` lists every reason, not the first."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__("; ".join(self.reasons))


def find_target(name: str, *, where: str = "") -> Target:
    """The registered target called ``name``; :class:`UsageError` names the registered ones otherwise.

    ``where`` is the place of the name, e.g. file and line of a manifest.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise UsageError(f"unknown target {name!r}", where=where, expected=nearest(name, sorted(found)))
    target = found[name].load()
    if not isinstance(target, Target):
        raise UsageError(f"target {name!r} does not implement the target protocol", where=found[name].value)
    return target


def step_record(
    step: LedgerStep, *, unit: str, attempt: int, arm: str, cell: CellKey | None, evidence: Any
) -> StepRecord:
    """The ledger's step as a record; wall time is a performance matter and stays out of it."""
    values = {k: v for k, v in vars(step).items() if k != "wall"}
    return StepRecord(unit=unit, attempt=attempt, arm=arm, cell=cell, evidence=evidence, **values)
