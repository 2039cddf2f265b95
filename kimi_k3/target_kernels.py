"""The kernels of this target in the harness's words: compiled code and launch orders for the synchronisation audit, and
timings of one rank's shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fasttrack.errors import UsageError
from fasttrack.target import (
    CompiledKernel,
    KernelBenchmark,
    KernelContract,
    KernelException,
    KernelMeasurement,
    KernelParameter,
    KernelTiming,
)

if TYPE_CHECKING:
    from kimi_k3.kernels.bench import Timing
    from kimi_k3.kernels.contract import Contract
    from kimi_k3.kernels.shard_bench import Benchmark

REPLAYS = 60  #: of every timed graph


class Kernels:
    """Mixin of the target: :class:`fasttrack.target.KernelTarget` and ``KernelBenchmarkTarget``."""

    def compile_kernels(self, arch: str, kinds: bool = False) -> Iterator[CompiledKernel]:
        """Every prepared variant; ``kinds``: one of every kind of code, for a quick look.

        Raises :class:`UsageError` naming the first kernel that does not compile.
        """
        try:
            from kimi_k3.kernels.catalog import CompileError, variants
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "kimi_k3":
                raise
            expected = "pip install 'fasttrack-kimi-k3[run]' on Linux"
            raise UsageError(f"compiling kernels needs {error.name}", where="kimi_k3", expected=expected) from None
        try:
            for v in variants(arch, kinds=kinds):
                yield CompiledKernel(v.name, v.arch, v.ptx, v.cubin, v.source, declared(v.contract))
        except CompileError as error:
            first, *rest = str(error).splitlines()
            more = f" (and {len(rest)} more)" if rest else ""
            raise UsageError(f"{first}{more}", where="kimi_k3", expected="kernels that compile") from None

    def schedules(self) -> Mapping[str, Sequence[str]]:
        from kimi_k3.kernels.catalog import schedules

        return schedules()

    def kernel_benchmarks(self, tier: str, options: Mapping[str, Any]) -> Iterator[KernelBenchmark]:
        """Projections, KDA core and attention residual at the full model's shards; no option changes them."""
        from kimi_k3.kernels.shard_bench import benchmarks

        for b in benchmarks(tier):
            yield KernelBenchmark(
                op=f"kimi_k3::{b.op}",
                name=b.name,
                shape=b.shape,
                rows=b.rows,
                tp=b.tp,
                bytes=b.bytes,
                run=lambda b=b: _measured(b),  # type: ignore[misc]
                goal_fraction=b.goal.fraction if b.goal else None,
                goal_s=b.goal.us * 1e-6 if b.goal and b.goal.us is not None else None,
            )


@cache
def _read_floor() -> float:
    """TB/s; measured once per run, before the first kernel."""
    from kimi_k3.kernels.bench import read_floor

    return read_floor()


def _measured(benchmark: Benchmark) -> KernelMeasurement:
    import torch

    floor = _read_floor()
    kernel, library = benchmark.time(floor, REPLAYS)
    torch.cuda.empty_cache()  # the next one's buffers have other sizes
    return KernelMeasurement(
        kernel=_timing(kernel),
        floor_s=benchmark.bytes / (floor * 1e12),
        device=torch.cuda.get_device_name(),
        reference=None if library is None else _timing(library),
    )


def _timing(t: Timing) -> KernelTiming:
    clock = f"CUDA events around replays of a graph of {t.launches} launches"
    return KernelTiming(t.name, t.us * 1e-6, t.p10 * 1e-6, t.p90 * 1e-6, t.replays, clock)


def declared(contract: Contract) -> KernelContract:
    """A kernel's own contract as the harness knows contracts."""
    return KernelContract(
        kernel=contract.kernel,
        parameters=tuple(KernelParameter(p.name, p.role, p.early, p.reason, p.buffer) for p in contract.parameters),
        pdl=contract.pdl,
        wait=contract.wait,
        trigger=contract.trigger,
        exceptions=tuple(KernelException(e.rule, e.parameter, e.reason) for e in contract.exceptions),
    )
