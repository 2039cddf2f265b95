"""What a kernel promises about memory and ordering; the synchronisation audit checks the compiled code against it.

Plain data, importable without torch or CuTe. Every kernel file has a module-level ``CONTRACT``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["weight", "activation", "state", "table", "mailbox", "output", "scratch", "scalar"]


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter, in launch-argument order.

    ``weight``: static after load. ``activation``: written by an earlier kernel of the step. ``state``: caches
    that outlive the step. ``table``: runner buffers (slots, lengths). ``mailbox``: written by peers, polled.
    ``scratch``: read and written by several kernels of the step. ``early`` allows reads before the dependency wait and
    needs a ``reason`` unless the role is weight. ``buffer``: name of the memory where kernels of one schedule share it;
    default: the parameter's name.
    """

    name: str
    role: Role
    early: bool = False
    reason: str = ""
    buffer: str = ""


@dataclass(frozen=True)
class AuditException:
    """A finding that is right and accepted: ``rule`` on ``parameter``, because ``reason``. Unused ones are findings."""

    rule: str
    parameter: str
    reason: str


@dataclass(frozen=True)
class Contract:
    kernel: str  #: prefix of the kernel's symbol name
    parameters: tuple[Parameter, ...]
    pdl: bool = True  #: launched with programmatic dependent launch
    wait: Literal["first", "late", "none"] = "first"
    trigger: Literal["entry", "after_wait", "end", "none"] = "after_wait"
    exceptions: tuple[AuditException, ...] = ()
