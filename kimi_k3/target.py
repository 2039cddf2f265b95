"""What the harness may ask of this target. This and ``target_kernels`` alone know fasttrack.

Importing and describing need no torch. The engine is :class:`kimi_k3.reference.engine.EmbeddedEngine`; nothing
of ``kimi_k3.decode`` is imported unless the switch is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fasttrack.errors import UsageError
from fasttrack.target import (
    Completion,
    Delta,
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
from kimi_k3.target_kernels import Kernels

if TYPE_CHECKING:
    from kimi_k3.embedded import Built
    from kimi_k3.reference.chat import ChannelReader
    from kimi_k3.reference.requests import GenerationRequest
    from kimi_k3.reference.stream import Stream


class EmbeddedTargetEngine:
    """The embedded engine in the harness's words."""

    def __init__(self, built: Built) -> None:
        from kimi_k3.canary import Canary
        from kimi_k3.reference.routing import RoutingTap

        self.engine, self.checkpoint = built.engine, built.checkpoint
        self._devices, self._config = built.devices, built.config
        self._tap = RoutingTap(self.engine.model, self.engine.executor)
        self._canary = Canary(self.engine)
        self._routing: list[RoutingStep] = []
        self._recording = False
        self._streams: dict[str, Stream] = {}

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

    def submit(self, request: Request) -> None:
        from kimi_k3.reference.requests import RequestError
        from kimi_k3.reference.stream import Stream

        try:
            self._streams[request.id] = Stream(self.engine.submit(_request(request)))
        except RequestError as error:
            raise UsageError(str(error)) from None

    def abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.engine.abort([stream.state])

    @property
    def busy(self) -> bool:
        return self.engine.scheduler.has_work

    def step(self, run: str, index: int) -> list[Delta]:
        deltas = []
        for state in self.engine.step(run, index):
            delta = self._streams[state.request.id].take()
            if delta.finish_reason is not None:
                del self._streams[state.request.id]
            deltas.append(Delta(**vars(delta)))
        return deltas

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        from kimi_k3.reference.tokenizer import encode_chat

        return encode_chat(self.engine.codec, messages)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, structured: bool = False
    ) -> tuple[list[int], ChannelReader]:
        """``options``: ``thinking`` (or ``enable_thinking``), by default on unless ``structured``."""
        from kimi_k3.reference.chat import ChannelReader
        from kimi_k3.reference.tokenizer import encode_chat

        unknown = set(options) - {"thinking", "enable_thinking"}
        if unknown:
            where = f"chat_template_kwargs.{min(unknown)}"
            raise UsageError("unknown option", where=where, expected="thinking or enable_thinking")
        thinking = bool(options.get("thinking", options.get("enable_thinking", not structured)))
        if thinking and structured:
            where = "chat_template_kwargs.thinking"
            raise UsageError("on, but a grammar holds from the first token on", where=where, expected="false")
        try:
            return encode_chat(self.engine.codec, messages, thinking=thinking), ChannelReader(thinking)
        except ValueError as error:
            raise UsageError(str(error), where="messages") from None

    def record_routing(self, on: bool) -> None:
        self._recording = on and not self.engine.options.draft_length
        self._routing.clear()
        self._tap.switch(self._recording)

    def drain_routing(self) -> list[RoutingStep]:
        drained, self._routing = self._routing, []
        return drained

    def watch_state(self, on: bool) -> None:
        self._canary.switch(on)

    def drain_ledger(self) -> list[LedgerStep]:
        changed = self._canary.changed
        return [
            LedgerStep(**vars(entry), unowned_changed=changed.pop((entry.run, entry.index), None))
            for entry in self.engine.drain_ledger()
        ]

    def reset(self) -> None:
        self._streams.clear()
        self.engine.reset()

    def close(self) -> None:
        self.engine.close()


def _request(request: Request) -> GenerationRequest:
    """The harness's request as the engine's; the field names are the same."""
    from kimi_k3.reference.requests import GenerationRequest, SamplingParams

    sampling = {f.name: getattr(request.sampling, f.name) for f in fields(request.sampling)}
    values = {f.name: getattr(request, f.name) for f in fields(request)}
    return GenerationRequest(**{**values, "sampling": SamplingParams(**sampling)})


class KimiK3Target(Kernels):
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
            providers=names.PROVIDERS,
            kernels=("k3_",),
            fallback_reasons=names.FALLBACK_REASONS,
            limits=Limits(
                tensor_parallel=names.TENSOR_PARALLEL,
                max_rows=names.MAX_ROWS,
                draft_lengths=names.DRAFT_LENGTHS,
                context_parallel=names.CONTEXT_PARALLEL,
            ),
            engines=("embedded", "vllm", "server"),
            counts_state=("embedded",),
            features=names.FEATURES,
            faults=names.FAULTS,
        )

    def engine(self, spec: EngineSpec) -> Engine:
        """The embedded engine of one arm.

        Raises :class:`DeploymentRefused` with every reason when the switch is on, :class:`UsageError` for options
        that no arm can serve. The ``oracle`` arm is the stock path on one rank with everything in FP64.
        """
        from kimi_k3.embedded import Deployment, build
        from kimi_k3.reference.checkpoint import CheckpointError
        from kimi_k3.reference.options import OptionError, Unsupported

        wanted = Deployment(
            spec.switch_value,
            tp=spec.tp,
            dcp=spec.dcp,
            draft_length=spec.draft_length,
            max_requests=spec.max_requests,
            acceptance=spec.acceptance,
            options=spec.options,
        )
        if spec.arm == "oracle":
            wanted = Deployment(
                names.SWITCH_OFF, max_requests=spec.max_requests, options={**spec.options, "precision": "fp64"}
            )
        fault = _fault(spec)
        try:
            built = build(wanted)
        except Unsupported as refusal:
            raise DeploymentRefused(refusal.reasons) from None
        except OptionError as error:
            raise UsageError(str(error), where=error.where) from None
        except CheckpointError as error:
            raise UsageError(str(error), where="engine.options") from None
        if fault is not None:
            from kimi_k3.faults import plant

            plant(fault, built.engine)
        return EmbeddedTargetEngine(built)

    def numerics_cases(self, tier: str, options: Mapping[str, Any]) -> Iterable[NumericsCase]:
        from kimi_k3.decode.cases import cases
        from kimi_k3.embedded import resolve_options
        from kimi_k3.reference.options import OptionError

        try:
            resolve_options(options)
        except OptionError as error:
            raise UsageError(str(error), where=error.where) from None
        return (
            NumericsCase(**{f.name: getattr(case, f.name) for f in fields(NumericsCase)})
            for case in cases(tier, options)
        )

    def profile(self, engine: Engine) -> AbstractContextManager[None]:
        return nullcontext()


def _fault(spec: EngineSpec) -> str | None:
    """The fault of a sabotaged arm. :class:`UsageError` where it is unknown, or has nothing to sit in."""
    kind, colon, fault = spec.arm.partition(":")
    if kind != "sabotaged" or not colon:
        return None
    if fault not in names.FAULTS:
        raise UsageError(f"unknown fault {fault!r}", where="arm", expected=f"one of {', '.join(names.FAULTS)}")
    if spec.switch_value != names.SWITCH_ON:
        raise UsageError(f"{names.SWITCH} {spec.switch_value}", where=f"arm {spec.arm}", expected=names.SWITCH_ON)
    return fault


def _version() -> str:
    try:
        return version("fasttrack-kimi-k3")
    except PackageNotFoundError:  # a bare checkout on the path
        return "0"


TARGET = KimiK3Target()
