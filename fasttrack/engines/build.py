"""Which engine serves a spec: the target's own (embedded), vLLM in this process, or a server at a URL."""

from __future__ import annotations

from fasttrack.errors import UsageError
from fasttrack.target import Engine, EngineSpec, Target


def build_engine(target: Target, spec: EngineSpec) -> Engine:
    """Build the engine of one arm. Raises ``DeploymentRefused``, ``UsageError`` or ``EvidenceError``."""
    if spec.kind == "embedded":
        return target.engine(spec)
    if spec.kind == "vllm":
        from fasttrack.engines.vllm import VllmEngine

        return VllmEngine(spec, target.describe())
    if spec.kind == "server":
        from fasttrack.engines.server import ServerEngine

        return ServerEngine(spec, target.describe())
    raise UsageError(f"unknown engine {spec.kind!r}", where="engine.kind", expected="embedded, vllm or server")
