"""Who serves which op. Providers register themselves by op name; an executor binds the best one per op, at start."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from kimi_k3.decode.ops import SCHEMAS, OpContext

#: Modules that register the providers of a name when imported. CuTe kernels live outside this package and need CUDA.
PROVIDER_MODULES = {
    "torch": (
        "kimi_k3.decode.providers.torch_residual",
        "kimi_k3.decode.providers.torch_kda",
        "kimi_k3.decode.providers.torch_mla",
        "kimi_k3.decode.providers.torch_moe",
    ),
    "cute": ("kimi_k3.kernels.providers",),
}


def _anywhere(context: OpContext, device: str) -> bool:
    return True


@dataclass(frozen=True)
class Provider:
    """One implementation of one op. ``run`` gets the context object and the op's arguments, and returns nothing.

    ``supports(context, device)`` says whether it can serve this model, precision and device family ("cpu",
    "sm_90", ...); it is asked once, at start. The highest ``priority`` among the supporting ones wins.
    """

    op: str
    name: str
    run: Callable[..., None]
    supports: Callable[[OpContext, str], bool] = _anywhere
    priority: int = 0


_PROVIDERS: dict[str, dict[str, Provider]] = {op: {} for op in SCHEMAS}


def register(provider: Provider) -> Provider:
    """Add a provider; a second one of the same name for the same op is an error."""
    if provider.op not in _PROVIDERS:
        raise ValueError(f"unknown op {provider.op!r}; expected one of {', '.join(SCHEMAS)}")
    if provider.name in _PROVIDERS[provider.op]:
        raise ValueError(f"op {provider.op!r} already has a provider {provider.name!r}")
    _PROVIDERS[provider.op][provider.name] = provider
    return provider


def torch_provider(op: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: register a function as the torch provider of ``op``."""

    def wrap(run: Callable[..., None]) -> Callable[..., None]:
        register(Provider(op, "torch", run))
        return run

    return wrap


def load(name: str) -> bool:
    """Import the modules that register the providers called ``name``; False when they are not part of this build."""
    for module in PROVIDER_MODULES[name]:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # the module exists, one of its own imports is missing
            return False
    return True


def select(context: OpContext, device: str, wanted: str = "auto") -> dict[str, Provider]:
    """The provider of every op. ``wanted``: "auto" (the best that supports the context), or a provider name.

    An op without a provider of the wanted name is served by torch; the ledger tells which one ran.
    """
    if wanted != "auto" and wanted not in PROVIDER_MODULES:
        raise ValueError(f"unknown provider {wanted!r}; expected auto, {', '.join(PROVIDER_MODULES)}")
    load("torch")
    if wanted not in ("auto", "torch") or (wanted == "auto" and device != "cpu"):
        load("cute" if wanted == "auto" else wanted)
    chosen = {}
    for op, known in _PROVIDERS.items():
        fitting = [p for p in known.values() if p.supports(context, device) and wanted in ("auto", p.name)]
        chosen[op] = max(fitting, key=lambda p: p.priority) if fitting else known["torch"]
    return chosen
