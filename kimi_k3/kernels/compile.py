"""Cross-compilation of the CuTe kernels on a CPU-only machine, cached on disk, with a table of resources.

A kernel module takes part by defining ``compile_cases() -> dict[str, CompileCase]``, or ``compile_cases(arch)`` where
the kernel differs between architectures. Run as a program::

    python -m kimi_k3.kernels.compile [--kinds] [--arch sm_90a ...] [--jobs N] [--cache DIR] [--only PREFIX] [--json F]

prints kernel, architecture, registers, threads, shared memory, local frame and spill instructions, and exits with 1
when a kernel spills, does not compile, or takes longer than ``--limit``. Cases of the same code are compiled once.
``--kinds`` takes one case of every kind of code instead of every case.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kimi_k3.kernels import compile_pool
from kimi_k3.kernels import cubin as cubins
from kimi_k3.kernels.contract import Contract

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
LIMIT_S = 120.0  #: one compilation takes 0.3 to 2 s
MODULES = ("stream_projection", "embed", "prefetch", "stream_read", "kda_core", "attn_res")
_SHARED = (
    "cute_asm.py",
    "cute_cluster.py",
    "cute_util.py",
    "arch.py",
    "shapes.py",
    "compile.py",
    "contract.py",
    "cubin.py",
    "runtime.py",
)


@dataclass(frozen=True)
class CompileCase:
    """One compilation: ``fn(*args)`` as given to ``cute.compile``; ``smem``: dynamic bytes per block.

    ``contract``: what an audit of the compiled code is to hold it to. ``kind``: cases that differ in nothing but sizes
    share it, and one of them stands for all where every case would take too long; default: a kind of its own.
    ``code``: cases of a module with equal ones compile to the same code; None: nothing is known.
    """

    fn: Any
    args: tuple[Any, ...]
    threads: int
    smem: int
    contract: Contract
    kind: str = ""
    code: Hashable | None = None


@dataclass(frozen=True)
class Compiled:
    """What one (case, architecture) gave. ``error`` set: nothing else is."""

    module: str
    case: str
    arch: str
    registers: int = 0
    threads: int = 0
    smem: int = 0
    frame: int = 0
    spill_loads: int = 0
    spill_stores: int = 0
    ptx: str = ""  #: path
    cubin: str = ""  #: path
    error: str = ""

    @property
    def clean(self) -> bool:
        return not (self.error or self.frame or self.spill_loads or self.spill_stores)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimi_k3" / "cute"


def cache_key(module: str, case: str, arch: str) -> str:
    """Changes with the kernel's source and its folder, the shared helpers, the case, the architecture, the compiler."""
    here = Path(__file__).parent
    h = hashlib.sha256()
    for name in (f"{module}.py", *_SHARED):
        path = here / name
        if path.exists():
            h.update(name.encode() + b"\0" + path.read_bytes())
    helpers = sorted(here.glob(f"{module}_*.py"))
    for path in helpers:
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    h.update("|".join((str(here), case, arch, importlib.metadata.version("nvidia-cutlass-dsl"))).encode())
    return h.hexdigest()[:24]


@functools.cache
def load_cases(module: str, arch: str) -> dict[str, CompileCase]:
    make = importlib.import_module(f"kimi_k3.kernels.{module}").compile_cases
    found: dict[str, CompileCase] = make(arch) if inspect.signature(make).parameters else make()
    return found


def select(module: str, arch: str, kinds: bool = False) -> list[str]:
    """Names of a module's cases in order: all, or the first of every kind."""
    cases = load_cases(module, arch)
    if not kinds:
        return sorted(cases)
    first: dict[str, str] = {}
    for name, case in cases.items():
        first.setdefault(case.kind or name, name)
    return sorted(first.values())


def cached(module: str, case: str, arch: str, cache: Path) -> Compiled | None:
    """What an earlier compilation of the same sources left, if any."""
    meta = cache / cache_key(module, case, arch) / "result.json"
    return Compiled(**json.loads(meta.read_text(encoding="utf-8"))) if meta.exists() else None


def cross_compile(module: str, case: str, arch: str, cache: Path) -> Compiled:
    """Compile one case for ``arch`` without a GPU; a failure is a result with ``error``, not an exception."""
    found_before = cached(module, case, arch, cache)
    if found_before is not None:
        return found_before
    folder = cache / cache_key(module, case, arch)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        item = load_cases(module, arch)[case]
        ptx, binary = _compile(item, arch)
        if ".entry" not in ptx:
            raise ValueError("the PTX has no kernel in it")
        (folder / "kernel.ptx").write_text(ptx, encoding="utf-8")
        (folder / "kernel.cubin").write_bytes(binary)
        found = cubins.resources(binary)
        if len(found) != 1:
            raise ValueError(f"expected one kernel in the cubin, found {[r.kernel for r in found]}")
        r = found[0]
        result = Compiled(
            module,
            case,
            arch,
            registers=r.registers,
            threads=item.threads,
            smem=item.smem + r.static_smem,
            frame=r.frame,
            spill_loads=r.spill_loads,
            spill_stores=r.spill_stores,
            ptx=str(folder / "kernel.ptx"),
            cubin=str(folder / "kernel.cubin"),
        )
    except Exception as e:  # the toolchain raises many types; the table names what failed
        lines = [line for line in str(e).splitlines() if "error" in line.lower()] or str(e).splitlines() or [repr(e)]
        return Compiled(module, case, arch, error=f"{type(e).__name__}: {lines[0][:300]}")
    partial = folder / f"result.{os.getpid()}.json"  # another process may compile the same case
    partial.write_text(json.dumps(asdict(result)), encoding="utf-8")
    partial.replace(folder / "result.json")
    return result


def _compile(item: CompileCase, arch: str) -> tuple[str, bytes]:
    """PTX and cubin. The DSL passes both through files named after the kernel's class, so that processes with a common
    folder would read each other's code: every compilation gets its own."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as work:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --generate-line-info --dump-dir {work}"
        code = cute.compile(item.fn, *item.args, options=options)
        ptx, binary = code.__ptx__, code.__cubin__
    return (ptx if isinstance(ptx, str) else ptx.decode()), bytes(binary)


Job = tuple[str, str, str, str]  #: module, case, architecture, cache folder


def _work(job: Job) -> Compiled:
    module, case, arch, cache = job
    return cross_compile(module, case, arch, Path(cache))


def _lost(job: Job, reason: str) -> Compiled:
    return Compiled(*job[:3], error=reason)


def same_code(module: str, arch: str) -> dict[str, str]:
    """Case -> the first case of the module that has the same code."""
    first: dict[Hashable, str] = {}
    return {
        name: name if case.code is None else first.setdefault(case.code, name)
        for name, case in sorted(load_cases(module, arch).items())
    }


def compile_all(
    modules: Iterable[str] = MODULES,
    arches: Iterable[str] = ARCHES,
    cache: Path | None = None,
    jobs: int = 0,
    only: str = "",
    kinds: bool = False,
    limit_s: float = LIMIT_S,
) -> list[Compiled]:
    """The cases of every module for every architecture, in ``jobs`` processes (0: one per core); order is fixed.

    ``only``: prefix of module/case. ``kinds``: one case of every kind. ``limit_s``: what takes longer has failed; not
    enforced when one process does everything.
    """
    folder = cache or default_cache()
    modules = tuple(modules)
    work = [
        (m, c, a, str(folder))
        for m in modules
        for a in arches
        for c in select(m, a, kinds)
        if f"{m}/{c}".startswith(only)
    ]
    alike = {(m, a): same_code(m, a) for m, _, a, _ in work}
    stands_for = {(m, c, a, f): (m, alike[m, a][c], a, f) for m, c, a, f in work}
    done = {job: cached(*job[:3], folder) for job in dict.fromkeys(stands_for.values())}
    todo = [job for job, found in done.items() if found is None]
    jobs = min(jobs or os.cpu_count() or 1, -(-len(todo) // 4))
    if jobs <= 1:
        done |= {job: _work(job) for job in todo}
    else:
        done |= dict(compile_pool.run(todo, _work, jobs, limit_s, _lost))
    return [replace(found, case=job[1]) for job in work if (found := done[stands_for[job]]) is not None]


def table(results: Iterable[Compiled]) -> str:
    lines = [
        f"{'kernel':58s} {'arch':8s} {'regs':>4s} {'threads':>7s} {'smem':>7s} {'frame':>5s} {'LDL':>4s} {'STL':>4s}"
    ]
    for r in results:
        name = f"{r.module}/{r.case}"
        if r.error:
            lines.append(f"{name:58s} {r.arch:8s} {r.error}")
            continue
        numbers = f"{r.registers:4d} {r.threads:7d} {r.smem:7d} {r.frame:5d} {r.spill_loads:4d} {r.spill_stores:4d}"
        lines.append(f"{name:58s} {r.arch:8s} {numbers}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kimi_k3.kernels.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=ARCHES, help="default: all three")
    parser.add_argument("--module", action="append", choices=MODULES, help="default: every kernel file")
    parser.add_argument("--kinds", action="store_true", help="one case of every kind of code; default: every case")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one per core")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one compilation")
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--only", default="", help="prefix of module/case")
    parser.add_argument("--json", type=Path, default=None, help="also write the table as JSON")
    args = parser.parse_args(argv)
    results = compile_all(
        args.module or MODULES, args.arch or ARCHES, args.cache, args.jobs, args.only, args.kinds, args.limit
    )
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    bad = [r for r in results if not r.clean]
    compiled = len({r.cubin or id(r) for r in results})
    print(f"{len(results)} cases, {compiled} compilations, {len(bad)} with errors or spills")
    for r in bad:
        print(f"  {r.module}/{r.case} for {r.arch}: {r.error or 'spills'}")
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
