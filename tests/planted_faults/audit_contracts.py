"""Contracts of the kernels in ``audit_kernels``."""

from __future__ import annotations

from fasttrack.target import KernelContract, KernelParameter


def contract(kernel: str, parameters: str, **options: object) -> KernelContract:
    """``parameters``: ``x:activation w:weight``."""
    declared = tuple(KernelParameter(*item.split(":")) for item in parameters.split())
    return KernelContract(kernel, declared, **options)  # type: ignore[arg-type]


CONTRACTS = {
    "scale": contract("scale", "x:activation w:weight y:output n:scalar"),
    "ring": contract("ring", "w:weight x:activation y:output tiles:scalar"),
    "pull": contract("pull", "box:mailbox y:output"),
    "push": contract("push", "x:activation peers:mailbox rank:scalar"),
}
