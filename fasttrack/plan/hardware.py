"""Whether this machine is the one the manifest is about, asked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrack.environment import Accelerator, accelerators
from fasttrack.manifest.model import Manifest


def hardware_gap(manifest: Manifest, found: Sequence[Accelerator] | None = None) -> str:
    """What is missing for a measurement, in one sentence; empty when nothing is.

    GPUs match by the name's prefix as the driver reports it.
    """
    wanted = manifest.hardware
    if wanted.accelerator == "none":
        return ""
    present = list(accelerators() if found is None else found)
    matching = [a for a in present if a.name.startswith(wanted.accelerator)]
    if len(matching) >= wanted.count:
        return ""
    names = ", ".join(sorted({a.name for a in present})) or "no NVIDIA GPU"
    here = f"{len(matching)} of them ({names})" if present else names
    what = f"{wanted.count} x {wanted.accelerator}" + (f" ({wanted.interconnect})" if wanted.interconnect else "")
    return f"the scope is about {what}; this machine has {here}"
