"""The part of the target protocol that speaks of GPU kernels: contracts for the audit, benchmarks. No torch.

Everything here can be imported from :mod:`fasttrack.target` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class KernelParameter:
    """One kernel parameter in launch-argument order. ``role``: weight, activation, state, table, mailbox,
    output, scratch or scalar. ``early``: may be read before the dependency wait, for ``reason``. ``buffer``: name of
    the memory where kernels of one schedule share it; default: the parameter's name. ``fields``: members of a struct
    passed by value that differ from it, each at its byte ``offset``."""

    name: str
    role: str
    early: bool = False
    reason: str = ""
    buffer: str = ""
    offset: int = 0
    fields: tuple[KernelParameter, ...] = ()


@dataclass(frozen=True)
class KernelException:
    """An accepted finding: audit ``rule`` on ``parameter``, for ``reason``. Unused ones are findings."""

    rule: str
    parameter: str
    reason: str


@dataclass(frozen=True)
class KernelContract:
    kernel: str  #: prefix of the symbol name
    parameters: tuple[KernelParameter, ...]
    pdl: bool = True
    wait: str = "first"  #: first, late, none
    trigger: str = "after_wait"  #: entry, after_wait, end, none
    exceptions: tuple[KernelException, ...] = ()


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel variant compiled for one architecture, without a GPU."""

    name: str  #: file stem and variant, e.g. "stream_projection/in_proj-tp8-m8"
    arch: str  #: "sm_90a", "sm_100a", "sm_103a"
    ptx: str
    cubin: bytes
    source: str  #: path of the kernel file
    contract: KernelContract | None


#: In a schedule: a launch that is not audited, made in full stream order (without programmatic dependent launch).
OTHER_LAUNCH = "*"


@runtime_checkable
class KernelTarget(Protocol):
    """What a target with GPU kernels offers to the synchronisation audit besides :class:`Target`."""

    def compile_kernels(self, arch: str) -> Iterable[CompiledKernel]:
        """Every prepared variant of every kernel, compiled for ``arch`` on a machine that may have no GPU."""
        ...

    def schedules(self) -> Mapping[str, Sequence[str]]:
        """Launch order of one layer per schedule name: contract kernel prefixes on the main stream, and
        :data:`OTHER_LAUNCH` for what lies between them."""
        ...


@dataclass(frozen=True)
class KernelTiming:
    """Seconds per launch: the median, 10th and 90th percentile of ``samples`` readings of ``clock``."""

    what: str  #: what was launched, e.g. "stream_projection 6288x7168 m8" or "torch.mm"
    seconds: float
    p10: float
    p90: float
    samples: int
    clock: str  #: e.g. "CUDA events around replays of a graph of 64 launches"


@dataclass(frozen=True)
class KernelMeasurement:
    """``floor_s``: seconds that reading the benchmark's bytes takes at the read bandwidth measured in the same run.
    ``reference``: a library's kernel of the same product, timed in the same run."""

    kernel: KernelTiming
    floor_s: float
    device: str
    reference: KernelTiming | None = None


@dataclass(frozen=True)
class KernelBenchmark:
    """One kernel at one size of one rank's shard. ``bytes``: what a launch must move through device memory.

    Goals: at least ``goal_fraction`` of the read floor, at most ``goal_s`` seconds. Listing needs no GPU, ``run`` does.
    """

    op: str
    name: str  #: unique
    shape: str
    rows: int
    tp: int  #: 0: the same on every rank of any group
    bytes: int
    run: Callable[[], KernelMeasurement]
    goal_fraction: float | None = None
    goal_s: float | None = None


@runtime_checkable
class KernelBenchmarkTarget(Protocol):
    """What a target with GPU kernels offers to the performance check besides :class:`Target`."""

    def kernel_benchmarks(self, tier: str, options: Mapping[str, Any]) -> Iterable[KernelBenchmark]: ...
