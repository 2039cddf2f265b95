"""What the harness may ask of this target. The only file here that knows fasttrack.

Importing and describing need no torch. The engine is :class:`kimi_k3.reference.engine.EmbeddedEngine`; nothing
of ``kimi_k3.decode`` is imported unless the switch is on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fasttrack.errors import UsageError
from fasttrack.target import (
    Completion,
    DeploymentRefused,
    Engine,
    EngineInfo,
    EngineSpec,
    LedgerStep,
    Limits,
    NumericsCase,
    Request,
    RoutingStep,
    TargetDescription,
)
from kimi_k3 import names

if TYPE_CHECKING:
    from kimi_k3.reference.drafter import Drafter
    from kimi_k3.reference.engine import EmbeddedEngine
    from kimi_k3.reference.loading import Checkpoint
    from kimi_k3.reference.model import Model
    from kimi_k3.reference.options import EngineOptions
    from kimi_k3.reference.rejection import Rejection
    from kimi_k3.reference.requests import GenerationRequest

#: Longest context unless ``max_context`` says otherwise, and the checkpoint allows it.
MAX_CONTEXT = 4096

_STATE = ("kv", "state", "conv")  #: the caches whose dtypes the executor's gate looks at

#: Options of the embedded engine, their defaults, and with them their types. None: decided by the engine.
ENGINE_OPTIONS: dict[str, Any] = {
    "checkpoint": "tiny-a",
    "checkpoint_seed": 0,
    "precision": "bf16",
    "device": "cpu",
    "threads": None,  #: of torch, for the whole process; 1 for the tiny presets, whose matrices gain nothing
    "provider": "auto",
    "schedule": "mixed",
    "page_size": 16,
    "pages": None,
    "max_tokens_per_step": None,
    "max_context": None,
    "prefix_caching": False,
    "prefix_interval": 64,
    "drafter": "random",  #: DSpark with random weights; "rehearsal": a test drafter; or a checkpoint folder
    "drafter_seed": 0,
    "drafter_hit_rate": 0.8,  #: of the rehearsal: how often a draft is the target's own next token
    "draft_sampling": "greedy",
    "rejection": "standard",  #: or "block"; a synthetic acceptance overrides it
}

DRAFT_OPTIONS = ("drafter", "drafter_seed", "drafter_hit_rate", "draft_sampling", "rejection")

#: vLLM's names of features that the specialised path refuses -> the executor's name and the value it accepts.
DEPLOYMENT_OPTIONS: dict[str, tuple[str, Any]] = {
    "pipeline_parallel_size": ("pp", 1),
    "enable_expert_parallel": ("expert_parallel", False),
    "enable_lora": ("lora", False),
    "enable_sleep_mode": ("sleep_mode", False),
    "enable_dbo": ("dual_batch_overlap", False),
    "enable_adaptive_verification": ("adaptive_verification", False),
    "enforce_eager": ("enforce_eager", False),
    "state_scheme": ("state_scheme", "native"),
}


class EmbeddedTargetEngine:
    """The embedded engine in the harness's words."""

    def __init__(
        self, engine: EmbeddedEngine, checkpoint: Checkpoint, devices: Sequence[str], config: Mapping[str, Any]
    ):
        from kimi_k3.reference.routing import RoutingTap

        self.engine, self.checkpoint = engine, checkpoint
        self._devices, self._config = tuple(devices), config
        self._tap = RoutingTap(engine.model, engine.executor)
        self._routing: list[RoutingStep] = []
        self._recording = False

    def info(self) -> EngineInfo:
        config = self.checkpoint.config
        return EngineInfo(
            kind="embedded",
            devices=self._devices,
            checkpoint=self.checkpoint.digest,
            vocab_size=config.vocab_size,
            max_context=self.engine.options.max_context,
            eos_token_ids=(config.eos_token_id,),
            config={**self._config, **self.engine.config()},
            evidence="emulated",
        )

    def encode(self, text: str) -> list[int]:
        return self.engine.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.engine.decode(token_ids)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        from kimi_k3.reference.requests import RequestError

        def after_step(index: int) -> None:
            if self._recording:
                chosen = self._tap.take(self.engine.last_entry.rows)
                self._routing += [RoutingStep(run, index, layer, experts) for layer, experts in chosen.items()]
            if on_step is not None:
                on_step(index)

        try:
            done = self.engine.generate(
                [_request(r) for r in requests], run=run, keep_logits=keep_logits, on_step=after_step
            )
        except RequestError as error:
            raise UsageError(str(error)) from None
        return [Completion(**vars(c)) for c in done]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        from kimi_k3.reference.tokenizer import encode_chat

        return encode_chat(self.engine.codec, messages)

    def record_routing(self, on: bool) -> None:
        self._recording = on and not self.engine.options.draft_length
        self._routing.clear()
        self._tap.switch(self._recording)

    def drain_routing(self) -> list[RoutingStep]:
        drained, self._routing = self._routing, []
        return drained

    def drain_ledger(self) -> list[LedgerStep]:
        return [LedgerStep(**vars(entry)) for entry in self.engine.drain_ledger()]

    def reset(self) -> None:
        self.engine.reset()

    def close(self) -> None:
        self.engine.close()


def _request(request: Request) -> GenerationRequest:
    """The harness's request as the engine's; the field names are the same."""
    from kimi_k3.reference.requests import GenerationRequest, SamplingParams

    sampling = {f.name: getattr(request.sampling, f.name) for f in fields(request.sampling)}
    values = {f.name: getattr(request, f.name) for f in fields(request)}
    return GenerationRequest(**{**values, "sampling": SamplingParams(**sampling)})


def resolve_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults filled in, names and types checked. :class:`UsageError` names the option."""
    defaults = {**ENGINE_OPTIONS, **{name: value for name, (_, value) in DEPLOYMENT_OPTIONS.items()}}
    resolved = dict(defaults)
    for name, value in given.items():
        where = f"engine.options.{name}"
        if name not in defaults:
            raise UsageError("unknown option", where=where, expected=f"one of {', '.join(sorted(defaults))}")
        kind = int if defaults[name] is None else type(defaults[name])
        resolved[name] = float(value) if kind is float and type(value) is int else value
        if type(resolved[name]) is not kind and not (value is None and defaults[name] is None):
            raise UsageError(
                f"{value!r} is not {kind.__name__}", where=where, expected=f"a value like {defaults[name]!r}"
            )
    return resolved


class KimiK3Target:
    """Kimi K3's specialised decode path under test."""

    def describe(self) -> TargetDescription:
        return TargetDescription(
            name="kimi_k3",
            version=_version(),
            model="Kimi K3 (text)",
            switch=names.SWITCH,
            on=names.SWITCH_ON,
            off=names.SWITCH_OFF,
            source_paths=("kimi_k3/",),
            optimized_modules=names.OPTIMIZED_MODULES,
            ops=names.OPS,
            kernels=("k3_",),
            fallback_reasons=names.FALLBACK_REASONS,
            limits=Limits(
                tensor_parallel=names.TENSOR_PARALLEL,
                max_rows=names.MAX_ROWS,
                draft_lengths=names.DRAFT_LENGTHS,
                context_parallel=names.CONTEXT_PARALLEL,
            ),
            engines=("embedded", "vllm", "server"),
            features=names.FEATURES,
        )

    def engine(self, spec: EngineSpec) -> Engine:
        """The embedded engine of one arm.

        Raises :class:`DeploymentRefused` with every reason when the switch is on, :class:`UsageError` for options
        that no arm can serve. The ``oracle`` arm is the stock path on one rank with everything in FP64.
        """
        options = resolve_options(spec.options)
        switch, precision, tp = spec.switch_value, options["precision"], spec.tp
        if spec.arm == "oracle":
            switch, precision, tp = names.SWITCH_OFF, "fp64", 1
            spec = replace(spec, draft_length=0, acceptance="none")
        elif spec.arm.startswith("sabotaged:"):
            raise UsageError(
                f"unknown fault {spec.arm.partition(':')[2]!r}", where="arm", expected="a registered fault"
            )
        if precision not in names.PRECISIONS:
            where = "engine.options.precision"
            raise UsageError(f"unknown precision {precision!r}", where=where, expected=", ".join(names.PRECISIONS))

        from kimi_k3.reference.checkpoint import CheckpointError
        from kimi_k3.reference.engine import EmbeddedEngine
        from kimi_k3.reference.grammar import Grammars
        from kimi_k3.reference.loading import open_checkpoint
        from kimi_k3.reference.options import OptionError

        _set_threads(options)
        try:
            checkpoint = open_checkpoint(options["checkpoint"], options["checkpoint_seed"])
            max_context = options["max_context"] or min(checkpoint.config.max_position_embeddings, MAX_CONTEXT)
            engine_options = _engine_options(spec, options, switch, tp, max_context)
            if switch == names.SWITCH_ON:
                _refuse_unsupported(spec, options, checkpoint, precision, max_context)
            else:
                _refuse_unimplemented(options)
            rejection = _rejection(spec, options)
            model = _model(checkpoint, precision, tp, options["device"])
            drafter, about = _drafter(spec, options, model)
            config, codec = checkpoint.config, checkpoint.codec
            grammars = Grammars(codec, config.vocab_size, config.eos_token_id)
            engine = EmbeddedEngine(
                model, codec, engine_options, drafter=drafter, rejection=rejection, grammar=grammars
            )
        except (OptionError, CheckpointError) as error:
            raise UsageError(str(error), where="engine.options") from None
        unsaid = {"threads", "max_context", *(() if spec.draft_length else DRAFT_OPTIONS)}
        shared = {**{k: v for k, v in options.items() if k not in unsaid}, **about}
        return EmbeddedTargetEngine(engine, checkpoint, (_device_name(options["device"]),), shared)

    def numerics_cases(self, tier: str, options: Mapping[str, Any]) -> Iterable[NumericsCase]:
        from kimi_k3.decode.cases import cases

        return (
            NumericsCase(**{f.name: getattr(case, f.name) for f in fields(NumericsCase)})
            for case in cases(tier, options)
        )

    def profile(self, engine: Engine) -> AbstractContextManager[None]:
        return nullcontext()


def _engine_options(
    spec: EngineSpec, options: Mapping[str, Any], switch: str, tp: int, max_context: int
) -> EngineOptions:
    from kimi_k3.reference.options import EngineOptions

    return EngineOptions(
        decode_backend=switch,
        tp=tp,
        dcp=spec.dcp,
        draft_length=spec.draft_length,
        provider=options["provider"],
        max_requests=spec.max_requests,
        max_context=max_context,
        max_tokens_per_step=options["max_tokens_per_step"] or max(1024, spec.max_requests * (1 + spec.draft_length)),
        page_size=options["page_size"],
        pages=options["pages"],
        schedule=options["schedule"],
        prefix_caching=options["prefix_caching"],
        prefix_interval=options["prefix_interval"],
    )


def _rejection(spec: EngineSpec, options: Mapping[str, Any]) -> Rejection:
    from kimi_k3.reference.rejection import Rejection

    try:
        if spec.draft_length and spec.acceptance.startswith("synthetic("):
            return Rejection.synthetic(float(spec.acceptance[len("synthetic(") : -1]), spec.draft_length)
    except ValueError as error:
        raise UsageError(str(error), where="acceptance") from None
    method = options["rejection"]
    if method not in ("standard", "block"):
        raise UsageError(
            f"unknown rejection method {method!r}", where="engine.options.rejection", expected="standard, block"
        )
    return Rejection(method)


def _drafter(spec: EngineSpec, options: Mapping[str, Any], model: Model) -> tuple[Drafter | None, dict[str, Any]]:
    from kimi_k3.reference.loading import open_drafter

    if not spec.draft_length:
        return None, {}
    try:
        return open_drafter(
            options["drafter"],
            model,
            spec.draft_length,
            seed=options["drafter_seed"],
            hit_rate=options["drafter_hit_rate"],
            sampling=options["draft_sampling"],
        )
    except ValueError as error:
        raise UsageError(str(error), where="engine.options.drafter") from None


def _refuse_unsupported(
    spec: EngineSpec, options: Mapping[str, Any], checkpoint: Checkpoint, precision: str, max_context: int
) -> None:
    """The executor's own gate, before anything is built: every reason at once."""
    import torch

    from kimi_k3.decode.deployment import Deployment, refusals
    from kimi_k3.decode.executor import device_family
    from kimi_k3.reference.precision import PRECISIONS

    dtypes: dict[str, Any] = {
        f"{part}_dtype": str(getattr(PRECISIONS[precision], part)).removeprefix("torch.") for part in _STATE
    }
    deployment = Deployment(
        checkpoint.config,
        tp=spec.tp,
        dcp=spec.dcp,
        draft_length=spec.draft_length,
        speculator="dspark" if spec.draft_length else "none",
        device=device_family(torch.device(options["device"])),
        max_context=max_context,
        **dtypes,
        **{field: options[name] for name, (field, _) in DEPLOYMENT_OPTIONS.items()},
    )
    reasons = refusals(deployment)
    if reasons:
        raise DeploymentRefused(reasons)


def _refuse_unimplemented(options: Mapping[str, Any]) -> None:
    """The stock path of this engine has none of these features either; running without them would be a lie."""
    for name, (_, accepted) in DEPLOYMENT_OPTIONS.items():
        if options[name] != accepted and name != "enforce_eager":  # the reference is always eager
            where = f"engine.options.{name}"
            raise UsageError(
                f"{options[name]!r} is not available in the embedded engine", where=where, expected=repr(accepted)
            )


def _model(checkpoint: Checkpoint, precision: str, tp: int, device: str) -> Model:
    from kimi_k3.reference.model import Model
    from kimi_k3.reference.precision import PRECISIONS

    try:
        return Model(checkpoint.config, checkpoint.weights, PRECISIONS[precision], tp=tp, device=device)
    except ValueError as error:
        raise UsageError(str(error), where="tp", expected="a number of ranks that divides heads and widths") from None


def _set_threads(options: Mapping[str, Any]) -> None:
    """One thread also makes sums independent of how many cores a machine has."""
    import torch

    from kimi_k3.reference.loading import TINY

    threads = options["threads"]
    if threads is not None and threads < 1:
        raise UsageError(f"{threads}", where="engine.options.threads", expected="at least 1")
    if threads is not None or options["checkpoint"] in TINY:
        torch.set_num_threads(threads or 1)


def _device_name(device: str) -> str:
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{device} ({platform.machine()})"


def _version() -> str:
    try:
        return version("fasttrack-kimi-k3")
    except PackageNotFoundError:  # a bare checkout on the path
        return "0"


TARGET = KimiK3Target()
