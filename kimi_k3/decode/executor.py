"""The executor behind ``decode_backend: latency_specialized``.

Built once, after the weights are loaded and the caches allocated. Per step: ``plan`` decides from facts every rank
shares, ``run`` executes the fused schedule (or hands the step to the stock path) on the stock caches in the stock
layout, so a request may change path at any step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from kimi_k3.decode import ledger, registry
from kimi_k3.decode.deployment import Deployment, require
from kimi_k3.decode.mesh import Mailboxes
from kimi_k3.decode.ops import OpContext
from kimi_k3.decode.plan import BASE_ROWS, PlanLimits, StepFacts, StepPlan, plan_step
from kimi_k3.decode.shards import shard_model
from kimi_k3.decode.workspace import PreparedStep
from kimi_k3.names import MAX_ROWS
from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.precision import Precision
from kimi_k3.reference.weights import ModelWeights


class StockModel(Protocol):
    """What the executor needs of the stock path; ``kimi_k3.reference.model.Model`` is one."""

    config: KimiK3Config
    precision: Precision
    weights: ModelWeights
    device: torch.device

    def forward(self, batch: StepBatch, caches: Caches, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]: ...


def device_family(device: torch.device) -> str:
    """ "cpu", or the compute capability as "sm_90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Executor:
    """Runs decode and verify steps of ``model`` on ``caches`` over ``tp`` lock-step ranks.

    Raises :class:`~kimi_k3.decode.deployment.UnsupportedDeployment` with every reason at once. ``prepared`` are the
    row counts to prepare; ``overrides`` replaces providers of single ops; ``deployment`` adds facts that the other
    arguments do not tell (``pp``, ``lora``, ...). ``interleave``: consecutive tokens that one rank owns under context
    parallelism. ``debug``: a missing publication raises at its reader, and a mailbox left dirty after the step.
    """

    def __init__(
        self,
        model: StockModel,
        caches: Caches,
        *,
        tp: int,
        dcp: int = 1,
        draft_length: int = 0,
        provider: str = "auto",
        max_context: int | None = None,
        interleave: int = 1,
        prepared: Sequence[int] = BASE_ROWS,
        overrides: Mapping[str, registry.Provider] | None = None,
        deployment: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> None:
        config, precision = model.config, model.precision
        device = device_family(model.device)
        facts: dict[str, Any] = {
            "tp": tp,
            "dcp": dcp,
            "draft_length": draft_length,
            "speculator": "dspark" if draft_length else "none",
            "device": device,
            "kv_dtype": _name(precision.kv),
            "state_dtype": _name(precision.state),
            "conv_dtype": _name(precision.conv),
            "max_context": max_context,
            "interleave": interleave,
            **(deployment or {}),
        }
        require(Deployment(config, **facts))
        self.model, self.caches = model, caches
        self.limits = PlanLimits(
            tp=tp,
            dcp=dcp,
            draft_length=draft_length,
            max_context=max_context or config.max_position_embeddings,
            prepared=tuple(sorted(set(prepared))),
        )
        self.last_step: ledger.StepLedger | None = None
        self._steps: dict[tuple[int, int, tuple[int, ...]], PreparedStep] = {}
        with torch.inference_mode(False):  # buffers outlive whatever mode the caller is in
            self.context = OpContext(config, precision, tp, dcp, interleave, debug=debug)
            self.context.providers = registry.select(self.context, device, provider)
            self.context.providers.update(overrides or {})
            self.shards = shard_model(model.weights, config, tp, model.device)
            self.boxes = Mailboxes.allocate(config, precision, tp, MAX_ROWS, model.device, dcp)

    def plan(self, batch: StepBatch) -> StepPlan:
        """Specialised, or stock with a named reason. Reads host-side facts only."""
        return plan_step(StepFacts.of(batch), self.limits)

    @overload
    def run(self, plan: StepPlan, batch: StepBatch) -> Tensor: ...

    @overload
    def run(self, plan: StepPlan, batch: StepBatch, aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def run(
        self, plan: StepPlan, batch: StepBatch, aux_layers: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Execute one step: final-normed hidden states [T, H] of the true rows, in the compute dtype.

        With ``aux_layers`` (0-based, "after layer") also the drafter's taps [T, len(aux_layers), H]. A plan that
        fell back runs on the stock path. ``last_step`` tells what happened.
        """
        if not plan.specialized:
            hidden, taps = self.model.forward(batch, self.caches, aux_layers or ())
            self.last_step = ledger.record(plan, batch, None)
        else:
            step = self.prepare(plan, tuple(aux_layers or ()))
            self.context.calls.clear()
            with torch.no_grad():
                diverged = self._guarded(step, batch)
                hidden, taps = step.result(plan.rows), step.tapped(plan.rows)
            replicas = [copies[:, : plan.rows] for copies in (step.out, *step.kv_rows.values(), *diverged)]
            self.last_step = ledger.record(plan, batch, self.context, replicas, step.points)
        return hidden if aux_layers is None else (hidden, taps)

    def _guarded(self, step: PreparedStep, batch: StepBatch) -> list[Tensor]:
        """Run a step; whatever ends it midway, the next one finds idle mailboxes."""
        try:
            diverged = step.run(batch)
        except BaseException:
            self.boxes.reset()
            raise
        if self.context.debug and (dirty := self.boxes.check_armed()):
            self.boxes.reset()
            raise RuntimeError(f"mailboxes not re-armed after the step: {', '.join(dirty)}")
        return diverged

    def prepare(self, plan: StepPlan, aux_layers: tuple[int, ...] = ()) -> PreparedStep:
        """The prepared step of a plan; built on first use."""
        key = (plan.padded_rows, plan.query_len, aux_layers)
        step = self._steps.get(key)
        if step is None:
            with torch.inference_mode(False):
                step = self._steps[key] = PreparedStep(
                    self.context, self.shards, self.caches, self.boxes, self.limits, *key
                )
        return step
