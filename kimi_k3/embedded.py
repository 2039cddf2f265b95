"""Build the embedded engine from flat options: checkpoint, model, drafter, executor, grammar.

Knows nothing of the harness; importing it needs no torch, and nothing of ``kimi_k3.decode`` is imported unless the
switch is on.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kimi_k3 import names
from kimi_k3.reference.options import EngineOptions, OptionError, Unsupported

if TYPE_CHECKING:
    from kimi_k3.reference.drafter import Drafter
    from kimi_k3.reference.engine import EmbeddedEngine
    from kimi_k3.reference.loading import Checkpoint
    from kimi_k3.reference.model import Model
    from kimi_k3.reference.rejection import Rejection

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


@dataclass(frozen=True)
class Deployment:
    """What is to be built. ``acceptance``: "none", "measured" or "synthetic(AL)"."""

    switch: str
    tp: int = 1
    dcp: int = 1
    draft_length: int = 0
    max_requests: int = 64
    acceptance: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)  #: see :data:`ENGINE_OPTIONS`


@dataclass
class Built:
    engine: EmbeddedEngine
    checkpoint: Checkpoint
    devices: tuple[str, ...]
    config: dict[str, Any]  #: resolved options that could change speed or answers, beyond the engine's own


def resolve_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults filled in, names and types checked. :class:`OptionError` names the option."""
    defaults = {**ENGINE_OPTIONS, **{name: value for name, (_, value) in DEPLOYMENT_OPTIONS.items()}}
    resolved = dict(defaults)
    for name, value in given.items():
        where = f"engine.options.{name}"
        if name not in defaults:
            raise OptionError("unknown option", where=where, expected=f"one of {', '.join(sorted(defaults))}")
        kind = int if defaults[name] is None else type(defaults[name])
        resolved[name] = float(value) if kind is float and type(value) is int else value
        if type(resolved[name]) is not kind and not (value is None and defaults[name] is None):
            raise OptionError(
                f"{value!r} is not {kind.__name__}", where=where, expected=f"a value like {defaults[name]!r}"
            )
    if resolved["precision"] not in names.PRECISIONS:
        where = "engine.options.precision"
        raise OptionError(
            f"unknown precision {resolved['precision']!r}", where=where, expected=", ".join(names.PRECISIONS)
        )
    if resolved["provider"] not in ("auto", *names.PROVIDERS):
        where, known = "engine.options.provider", ", ".join(("auto", *names.PROVIDERS))
        raise OptionError(f"unknown provider {resolved['provider']!r}", where=where, expected=known)
    return resolved


def _check_device(device: str) -> None:
    """:class:`OptionError` unless PyTorch has this device here."""
    import torch

    where = "engine.options.device"
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (number.isascii() and number.isdigit())):
        raise OptionError(f"unknown device {device!r}", where=where, expected="cpu, cuda or cuda:N")
    found = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= found:
        raise OptionError(f"{device} is not here: PyTorch sees {found} GPUs", where=where, expected="one that is")


def build(deployment: Deployment) -> Built:
    """The engine of a deployment.

    Raises :class:`OptionError`, :class:`~kimi_k3.reference.checkpoint.CheckpointError`, and with the switch on
    :class:`Unsupported` with every reason.
    """
    from kimi_k3.reference.engine import EmbeddedEngine
    from kimi_k3.reference.grammar import Grammars
    from kimi_k3.reference.loading import open_checkpoint

    options = resolve_options(deployment.options)
    _check_device(options["device"])
    _set_threads(options)
    checkpoint = open_checkpoint(options["checkpoint"], options["checkpoint_seed"])
    config, codec = checkpoint.config, checkpoint.codec
    engine_options = _engine_options(
        deployment, options, _max_context(options, min(config.max_position_embeddings, MAX_CONTEXT))
    )
    if deployment.switch == names.SWITCH_ON:
        _refuse_unsupported(deployment, options, checkpoint, engine_options.max_context)
    else:
        _refuse_unimplemented(options)
    rejection = _rejection(deployment, options)
    model = _model(checkpoint, deployment.tp, options)
    drafter, about = _drafter(deployment, options, model)
    grammars = Grammars(codec, config.vocab_size, config.eos_token_id)
    engine = EmbeddedEngine(model, codec, engine_options, drafter=drafter, rejection=rejection, grammar=grammars)
    unsaid = {"threads", "max_context", *(() if deployment.draft_length else DRAFT_OPTIONS)}
    shared = {**{k: v for k, v in options.items() if k not in unsaid}, **about}
    return Built(engine, checkpoint, (_device_name(options["device"]),), shared)


def _engine_options(deployment: Deployment, options: Mapping[str, Any], max_context: int) -> EngineOptions:
    rows = deployment.max_requests * (1 + deployment.draft_length)
    return EngineOptions(
        decode_backend=deployment.switch,
        tp=deployment.tp,
        dcp=deployment.dcp,
        draft_length=deployment.draft_length,
        provider=options["provider"],
        max_requests=deployment.max_requests,
        max_context=max_context,
        max_tokens_per_step=options["max_tokens_per_step"] or max(1024, rows),
        page_size=options["page_size"],
        pages=options["pages"],
        schedule=options["schedule"],
        prefix_caching=options["prefix_caching"],
        prefix_interval=options["prefix_interval"],
    )


def _rejection(deployment: Deployment, options: Mapping[str, Any]) -> Rejection:
    from kimi_k3.reference.rejection import Rejection

    acceptance = deployment.acceptance
    if deployment.draft_length and acceptance.startswith("synthetic("):
        try:
            return Rejection.synthetic(float(acceptance[len("synthetic(") : -1]), deployment.draft_length)
        except ValueError as error:
            raise OptionError(str(error), where="acceptance") from None
    method = options["rejection"]
    if method not in ("standard", "block"):
        raise OptionError(
            f"unknown rejection method {method!r}", where="engine.options.rejection", expected="standard, block"
        )
    return Rejection(method)


def _drafter(deployment: Deployment, options: Mapping[str, Any], model: Model) -> tuple[Drafter | None, dict[str, Any]]:
    from kimi_k3.reference.loading import open_drafter

    if not deployment.draft_length:
        return None, {}
    try:
        return open_drafter(
            options["drafter"],
            model,
            deployment.draft_length,
            seed=options["drafter_seed"],
            hit_rate=options["drafter_hit_rate"],
            sampling=options["draft_sampling"],
        )
    except ValueError as error:
        raise OptionError(str(error), where="engine.options.drafter") from None


def _refuse_unsupported(
    deployment: Deployment, options: Mapping[str, Any], checkpoint: Checkpoint, max_context: int
) -> None:
    """The executor's own gate, before anything is built: every reason at once."""
    import torch

    from kimi_k3.decode.deployment import Deployment as Asked
    from kimi_k3.decode.deployment import refusals
    from kimi_k3.decode.executor import device_family
    from kimi_k3.reference.precision import PRECISIONS

    precision = PRECISIONS[options["precision"]]
    dtypes: dict[str, Any] = {f"{part}_dtype": str(getattr(precision, part)).removeprefix("torch.") for part in _STATE}
    asked = Asked(
        checkpoint.config,
        tp=deployment.tp,
        dcp=deployment.dcp,
        draft_length=deployment.draft_length,
        speculator="dspark" if deployment.draft_length else "none",
        device=device_family(torch.device(options["device"])),
        max_context=max_context,
        **dtypes,
        **{field: options[name] for name, (field, _) in DEPLOYMENT_OPTIONS.items()},
    )
    reasons = refusals(asked)
    if reasons:
        raise Unsupported(reasons)


def _refuse_unimplemented(options: Mapping[str, Any]) -> None:
    """The stock path of this engine has none of these features either; running without them would be a lie."""
    for name, (_, accepted) in DEPLOYMENT_OPTIONS.items():
        # The reference is always eager, and knows both state schemes.
        if options[name] != accepted and name not in ("enforce_eager", "state_scheme"):
            where = f"engine.options.{name}"
            raise OptionError(
                f"{options[name]!r} is not available in the embedded engine", where=where, expected=repr(accepted)
            )


def _model(checkpoint: Checkpoint, tp: int, options: Mapping[str, Any]) -> Model:
    from kimi_k3.reference.model import STATE_SCHEMES, Model
    from kimi_k3.reference.precision import PRECISIONS

    scheme = options["state_scheme"]
    if scheme not in STATE_SCHEMES:
        where = "engine.options.state_scheme"
        raise OptionError(f"unknown scheme {scheme!r}", where=where, expected=", ".join(STATE_SCHEMES))
    precision = PRECISIONS[options["precision"]]
    try:
        return Model(
            checkpoint.config,
            checkpoint.weights,
            precision,
            tp=tp,
            device=options["device"],
            state_scheme=scheme,
        )
    except ValueError as error:
        raise OptionError(str(error), where="tp", expected="a number of ranks that divides heads and widths") from None


def _max_context(options: Mapping[str, Any], default: int) -> int:
    asked = options["max_context"]
    if asked is None:
        return default
    if asked < 1:
        raise OptionError(f"{asked}", where="engine.options.max_context", expected="at least 1")
    return int(asked)


def _set_threads(options: Mapping[str, Any]) -> None:
    """One thread also makes sums independent of how many cores a machine has."""
    import torch

    from kimi_k3.reference.loading import TINY

    threads = options["threads"]
    if threads is not None and threads < 1:
        raise OptionError(f"{threads}", where="engine.options.threads", expected="at least 1")
    if threads is not None or options["checkpoint"] in TINY:
        torch.set_num_threads(threads or 1)


def _device_name(device: str) -> str:
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{device} ({platform.machine()})"
