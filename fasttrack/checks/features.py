"""Features: temperature and filters, structure, log-probabilities, stops, penalties, prefixes, streaming, context.

Each scenario runs its feature in both arms and leaves raw records behind; the rules that judge them are those of
:mod:`fasttrack.gates.features`. A feature or variant that an engine does not serve leaves a refusal, not a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import Context, Unit
from fasttrack.checks.feature_run import GREEDY, FeatureRun
from fasttrack.checks.feature_sampling import sampling
from fasttrack.checks.feature_stops import stop
from fasttrack.errors import EvidenceError, UsageError
from fasttrack.gates.features import RULES, feature_units
from fasttrack.target import DeploymentRefused

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

TOKENS = 24  #: per request, where the feature does not ask for more
ALONE = 1000  #: steps between two requests that must not meet
ENDING = 5  #: tokens of a prompt's own end behind a prefix that others have as well
ALTERNATIVES = 5  #: log-probabilities beside the chosen token

#: Settings whose effect shows within two times :data:`TOKENS` tokens of a model that hardly repeats itself.
PENALTIES: dict[str, dict[str, float]] = {
    "presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 0.6},
    "all": {"presence_penalty": -1.0, "frequency_penalty": 1.5, "repetition_penalty": 0.5},
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "is": {"enum": ["yes", "no", "unknown"]},
        "ok": {"type": "boolean"},
        "id": {"type": "string", "pattern": "^[A-F]{2}[0-9]$"},
        "at": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["is", "ok", "id", "at"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [0-9]{3}-[A-F]{2}(\.[a-z]{1,4})?"


class FeaturesCheck:
    name = "features"

    def units(self, manifest: Manifest, tier: str) -> list[Unit]:
        """Raises :class:`UsageError` for a gate of a feature that has no rule."""
        return [
            Unit(
                u.name,
                self.name,
                u.cell,
                ("stock", "optimized"),
                COST_S.get(u.feature, 2.0) * (1.5 if u.cell.draft_length else 1.0),
                {"feature": u.feature},
            )
            for u in feature_units(manifest, tier)
        ]

    def run(self, unit: Unit, ctx: Context) -> None:
        own = next(u for u in feature_units(ctx.scope.manifest, ctx.scope.tier) if u.name == unit.name)
        run = FeatureRun(own, ctx)
        if own.feature not in ctx.description.features:
            run.refuse([f"target {ctx.description.name} does not list feature {own.feature}"], at_start=True)
            return
        try:
            SCENARIOS[own.feature](run)
            run.finish()
        except DeploymentRefused as refusal:
            run.refuse(refusal.reasons, at_start=True)
        except EvidenceError as missing:
            run.refuse([str(missing)], at_start=True)
        except UsageError as refused:  # the engine does not take such a request
            run.refuse([str(refused)], at_start=False)


def structured_output(run: FeatureRun) -> None:
    """Greedy outputs, for equality with stock, and sampled ones, for variety; a control that no grammar holds."""
    kinds: list[dict[str, Any]] = [{"json_schema": SCHEMA}, {"regex": REGEX}]
    plain = run.requests(4 * TOKENS, count=max(4, run.cell.requests))
    asked = [
        replace(
            r,
            sampling=replace(
                GREEDY,
                ignore_eos=False,
                structured=kinds[i % 2],
                temperature=float(i % 4 > 1),
                seed=run.seed(r.id) if i % 4 > 1 else 0,
            ),
        )
        for i, r in enumerate(plain)
    ]
    run.both(asked, "asked")
    run.generate("stock", [replace(r, max_tokens=TOKENS) for r in plain], "control")


def logprobs(run: FeatureRun) -> None:
    """Greedy tokens; then forced ones, which lie outside the most likely; full distributions for their sum."""
    import torch

    asked = [replace(r, sampling=replace(r.sampling, logprobs=ALTERNATIVES)) for r in run.requests(TOKENS)]
    run.both(asked, "asked")
    texts = run.requests(TOKENS, prompt_tokens=TOKENS, purpose="forced")
    forced = [replace(r, forced=t.prompt) for r, t in zip(asked, texts, strict=True)]
    _, done = run.both(forced, "forced", keep_logits=True)
    tables = [c.full_logprobs for c in done if c.full_logprobs is not None]
    if len(tables) == len(done):
        sums = torch.cat(tables).double().exp().sum(1)
        run.numbers["sum_error"] = float((sums - 1).abs().max())


def penalties(run: FeatureRun) -> None:
    """Each setting on requests of its own, in one batch; a control without penalties shows that they matter."""
    plain = run.requests(2 * TOKENS)
    names = list(PENALTIES)
    asked = [replace(r, sampling=replace(r.sampling, **PENALTIES[names[i % 4]])) for i, r in enumerate(plain)]  # type: ignore[arg-type]
    run.both(asked, "asked", details={r.id: {"setting": names[i % 4]} for i, r in enumerate(plain)})
    run.generate("stock", plain, "control")


def prefix_reuse(run: FeatureRun) -> None:
    """Misses from an empty cache; then other requests with the same prefixes; then the first ones again, as hits.

    One after the other: in other company the rounding of a row's sums may differ, and bits are compared.
    """
    shared = run.requests(TOKENS // 3, count=4, prompt_tokens=6 * TOKENS)
    ends = run.requests(TOKENS // 3, count=4, prompt_tokens=ENDING, purpose="ends")
    asked = [replace(r, arrival_step=ALONE * i) for i, r in enumerate(shared)]
    # Half of the warming requests are the same prompts, half end otherwise.
    warming = [
        replace(r, id=f"w{i}", prompt=r.prompt if i % 2 else r.prompt[: 4 * TOKENS] + ends[i].prompt, max_tokens=2)
        for i, r in enumerate(asked)
    ]
    run.both(asked, "cold")
    run.generate("optimized", warming, "warming")
    run.generate("optimized", asked, "hit", fresh=False)


def streaming(run: FeatureRun) -> None:
    """Requests of different lengths that arrive one after the other."""
    plain = run.requests(TOKENS)
    run.both([replace(r, arrival_step=i // 2, max_tokens=TOKENS - i) for i, r in enumerate(plain)], "asked")


def full_context(run: FeatureRun) -> None:
    """A request that ends at the engine's last position; where there are drafts, then the same without them."""
    tokens = 2 * (2 + run.draft_length)
    (asked,) = run.requests(tokens, count=1, prompt_tokens=run.info().max_context - tokens)
    undrafted = replace(asked, id="undrafted", max_drafts=0, arrival_step=ALONE)
    run.both([asked, undrafted] if run.draft_length else [asked], "asked")


def stock_resumed(run: FeatureRun) -> None:
    """Requests arrive every other step: each arrival is a mixed step on the stock path between specialised ones."""
    plain = run.requests(TOKENS, count=max(5, run.cell.requests))
    run.both([replace(r, arrival_step=2 * i) for i, r in enumerate(plain)], "asked")


SCENARIOS: dict[str, Callable[[FeatureRun], None]] = {
    "sampling": sampling,
    "structured_output": structured_output,
    "logprobs": logprobs,
    "stop": stop,
    "penalties": penalties,
    "prefix_reuse": prefix_reuse,
    "streaming": streaming,
    "full_context": full_context,
    "stock_resumed": stock_resumed,
}
assert SCENARIOS.keys() == RULES.keys()

#: Planning figures on one core of the tiny configuration, seconds, plain.
COST_S = {"sampling": 15.0, "full_context": 35.0, "structured_output": 4.0}
