"""The optimised path: two ops of a decode step, as the profiler sees them, and their numerics cases."""

from __future__ import annotations

from typing import Any

import torch

from fasttrack.target import NumericsCase


@torch.library.custom_op("toy::update", mutates_args=("state",))
def update(state: torch.Tensor, slots: torch.Tensor, embedded: torch.Tensor) -> None:
    """state[slots] <- 0.875 state[slots] + embedded. state [S, H], slots [B] int64, embedded [B, H]."""
    state[slots] = state[slots] * 0.875 + embedded


@torch.library.custom_op("toy::head", mutates_args=())
def head(hidden: torch.Tensor, weight: torch.Tensor, tp: int) -> torch.Tensor:
    """Logits [B, V] of hidden [B, H]; each of ``tp`` ranks owns H / tp rows of weight [H, V], summed in rank order."""
    parts = [h @ w for h, w in zip(hidden.chunk(tp, 1), weight.chunk(tp, 0), strict=True)]
    return torch.stack(parts).sum(0)


def _inputs(family: str, seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=rng)
    if family == "outliers":
        x[:, ::16] *= 1e3
    elif family == "denormals":
        x *= 1e-40
    elif family == "negative_zero":
        x[:, ::2] = -0.0
    elif family == "coded":  # small integers: every sum is exact, any lost or doubled element shows
        x = (torch.arange(6 * 64).reshape(6, 64) % 7 - 3).float()
    weight = (torch.arange(64 * 32).reshape(64, 32) % 5 - 2).float() / 8
    return {"hidden": x, "weight": weight, "state": x.flip(0).repeat(2, 1), "slots": torch.tensor([1, 2, 3, 5, 7, 8])}


def _run(op: str) -> Any:
    def run(inputs: dict[str, Any], poison: float) -> dict[str, Any]:
        if op == "toy::head":
            return {"logits": head(inputs["hidden"], inputs["weight"], 2)}
        state = inputs["state"].clone()
        state[0] = poison  # slot 0 is padding: never read, never written
        update(state, inputs["slots"], inputs["hidden"])
        return {"state": state[inputs["slots"]], "padding": state[:1]}

    return run


def _oracle(inputs: dict[str, Any], op: str) -> dict[str, Any]:
    hidden = inputs["hidden"].double()
    if op == "toy::head":
        return {"logits": hidden @ inputs["weight"].double()}
    return {"state": inputs["state"].double()[inputs["slots"]] * 0.875 + hidden}


def _bound(inputs: dict[str, Any], oracle: dict[str, Any], op: str) -> dict[str, Any]:
    eps, tiny = 2.0**-24, 2.0**-140
    hidden = inputs["hidden"].double().abs()
    if op == "toy::head":
        return {"logits": 66 * eps * (hidden @ inputs["weight"].double().abs()) + tiny}
    return {"state": 4 * eps * (inputs["state"].double()[inputs["slots"]].abs() + hidden) + tiny}


def _untouched(inputs: dict[str, Any], outputs: dict[str, Any]) -> int:
    return int((~outputs["padding"].isnan() & (outputs["padding"].abs() < 1e30)).sum()) if "padding" in outputs else 0


def numerics_cases() -> list[NumericsCase]:
    return [
        NumericsCase(
            op=op,
            name=f"{op.split('::')[1]}-b6",
            provider="torch",
            families=("normal", "outliers", "denormals", "negative_zero", "coded"),
            inputs=_inputs,
            run=_run(op),
            oracle=lambda inputs, op=op: _oracle(inputs, op),  # type: ignore[misc]
            bound=lambda inputs, oracle, op=op: _bound(inputs, oracle, op),  # type: ignore[misc]
            bound_text=text,
            untouched=_untouched,
        )
        for op, text in (("toy::head", "(H + 2) eps sum|x||w|"), ("toy::update", "4 eps (|s| + |e|)"))
    ]
