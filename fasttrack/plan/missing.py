"""What keeps a run here from a pass, asked before anything runs: hardware, packages, and what the engine cannot show.

Torch-free: packages are looked for, not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from fasttrack.manifest.model import Manifest
from fasttrack.plan.hardware import hardware_gap

#: Gates that look at no step of the engine; all others need its ledger, at least to know that the path under test ran.
WITHOUT_STEPS = (
    "numerics.error",
    "numerics.poison",
    "isolation.off_is_off",
    "isolation.a_a",
    "isolation.refusals",
    "performance.kernels",
)
#: Gates that need log-probabilities of the whole vocabulary, or an arm of higher precision.
WITH_FULL_LOGPROBS = ("evals.fidelity", "evals.routing", "features.sampling", "features.logprobs")


def missing(manifest: Manifest) -> list[str]:
    """One sentence per thing that this machine, its packages or the manifest's engine lack; empty: nothing known."""
    found = []
    if gap := hardware_gap(manifest):
        found.append(gap)
    if manifest.engine.kind == "embedded":
        return found
    required = manifest.gates.required
    if manifest.engine.kind == "vllm" and find_spec("vllm") is None:
        found.append("the vllm engine needs vLLM, which is not installed here")
    if full := [gate for gate in required if gate in WITH_FULL_LOGPROBS]:
        found.append(
            f"the {manifest.engine.kind} engine has no oracle and returns no log-probabilities of the whole vocabulary,"
            f" which {_gates(full)}"
        )
    stepwise = [gate for gate in required if gate not in (*WITHOUT_STEPS, *WITH_FULL_LOGPROBS)]
    if stepwise and manifest.engine.kind == "server":
        found.append(f"a server shows no steps, which {_gates(stepwise)}")
    elif stepwise and "worker_extension_cls" not in manifest.engine.options:
        found.append(
            "engine.options.worker_extension_cls is not given: without the target's extension vLLM shows no steps,"
            f" which {_gates(stepwise)}"
        )
    return found


def _gates(names: Sequence[str]) -> str:
    return f"required gate{'s need' if len(names) > 1 else ' needs'}: {', '.join(names)}"
