"""The kernels of this target in the harness's words: compiled code and launch orders for the synchronisation audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fasttrack.errors import UsageError
from fasttrack.target import CompiledKernel, KernelContract, KernelException, KernelParameter

if TYPE_CHECKING:
    from kimi_k3.kernels.contract import Contract


class Kernels:
    """Mixin of the target: :class:`fasttrack.target.KernelTarget`."""

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
