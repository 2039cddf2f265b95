"""Off means off: one stock generation in three places that must agree to the last bit.

Two are fresh processes, one of which has no optimised packages at all. The third is this process, after it has built
and run the optimised path: it is where the stock arms of the run are measured, so nothing there may have changed them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fasttrack
from fasttrack.checks.base import Context, Unit, evidence
from fasttrack.checks.off_probe import asked, locate, outputs_of
from fasttrack.checks.schedule import together
from fasttrack.engines.build import build_engine
from fasttrack.records import CellKey, OffStateRecord
from fasttrack.target import DeploymentRefused, EngineInfo, EngineSpec, Target

TIMEOUT_S = 600

#: What a fresh process inherits: where things lie, and what decides about arithmetic, devices and downloads.
INHERITED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TEMP",
        "TMP",
        "SYSTEMROOT",
        "VIRTUAL_ENV",
    ),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "PYTHONHASHSEED", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
INHERITED_PREFIXES = (
    *("LC_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "ATEN_", "DNNL_", "ONEDNN_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "NCCL_", "VLLM_", "HF_"),
)


def run(unit: Unit, ctx: Context) -> None:
    """The probe process with the packages complete and with the optimised ones deleted, then this process."""
    cell = unit.cell
    assert cell is not None
    _, info = ctx.engine("stock", tp=cell.tp)
    requests = together(
        4, 1 + 2 * ctx.scope.knobs.decode_steps, ctx.scope.bucket(cell.context), info, ctx.seed(unit.name)
    )
    spec = ctx.engines.spec("stock", tp=cell.tp, dcp=1, draft_length=0, acceptance="none")
    reference = target_reference(ctx.target)
    modules = ctx.description.optimized_modules
    listed = [{"id": r.id, "prompt": r.prompt, "max_tokens": r.max_tokens} for r in requests]
    job = {
        "target": reference,
        "spec": {**asdict(spec), "workdir": str(spec.workdir.resolve())},
        "requests": listed,
        "modules": list(modules),
        "places": locate(modules),
    }
    given, withheld = environment(os.environ, ctx.description.name)
    facts = {"environment_given": sorted(given), "environment_withheld": withheld}
    with tempfile.TemporaryDirectory(prefix="fasttrack-off-") as folder:
        copy_without(reference.partition(".")[0].partition(":")[0], modules, Path(folder))
        for checkout, first in (("complete", None), ("optimised-packages-deleted", folder)):
            ctx.progress(0 if first is None else 1, 3, checkout)
            found = _fresh_process(job, first, given)
            if first is not None and found["importable"]:
                raise RuntimeError(f"deleted packages can still be imported: {found['importable']}")
            names = ("outputs", "modules_loaded", "files_opened", "environment_added")
            own = {name: found[name] for name in names}
            _record(ctx, info, checkout=checkout, outputs_sha256=found["sha256"], **own, **facts)
    ctx.progress(2, 3, "this process")
    _here(ctx, cell, info, spec, listed)


def _here(ctx: Context, cell: CellKey, info: EngineInfo, spec: EngineSpec, requests: list[dict[str, Any]]) -> None:
    """The same generation in this process, by an engine built after the optimised path was built and has run."""
    try:
        engine, own = ctx.engine_for("optimized", cell)
    except DeploymentRefused as refusal:  # the gate says that nothing was compared
        ctx.write_refusal({"tp": cell.tp, "dcp": cell.dcp, "draft_length": cell.draft_length}, refusal.reasons)
        return
    bucket, tokens = ctx.scope.bucket(cell.context), 1 + 2 * (1 + cell.draft_length)
    engine.generate(together(cell.requests, tokens, bucket, own, ctx.seed("off_state")), run=f"{ctx.unit.name}/before")
    ctx.write_steps(engine.drain_ledger(), arm="optimized", cell=None, info=own)
    if spec.kind == "embedded":
        stock = build_engine(ctx.target, spec)
    else:  # too heavy to build once more
        stock = ctx.engines.get("stock", tp=cell.tp, dcp=1, draft_length=0, acceptance="none")
    digest, count = outputs_of(stock, asked(requests))
    if spec.kind == "embedded":
        stock.close()
    _record(ctx, info, checkout="this-process", outputs_sha256=digest, outputs=count, modules_loaded=[])


def _record(ctx: Context, info: EngineInfo, **fields: Any) -> None:
    ctx.record(OffStateRecord, arm="stock", evidence=evidence(info), **fields)


def environment(variables: Mapping[str, str], target: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a fresh process is given; the names of the target's and the harness's own that it is not."""
    given = {k: v for k, v in variables.items() if k in INHERITED or k.startswith(INHERITED_PREFIXES)}
    own = (f"{target.upper().replace('-', '_')}_", "FASTTRACK_")
    return given, sorted(k for k in variables if k.startswith(own) and k not in given)


def target_reference(target: Target) -> str:
    """``module:attribute`` under which a fresh process finds ``target``."""
    module = type(target).__module__
    for name, value in vars(sys.modules[module]).items():
        if value is target:
            return f"{module}:{name}"
    return f"{module}:{type(target).__qualname__}"


def copy_without(package: str, modules: tuple[str, ...], folder: Path) -> None:
    """Copy the importable ``package`` into ``folder`` and delete what belongs to ``modules`` there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not an importable package")
    source = Path(next(iter(spec.submodule_search_locations)))
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in modules:
        if module.startswith(package + "."):
            path = folder.joinpath(*module.split("."))
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".py").unlink(missing_ok=True)


def _fresh_process(job: dict[str, Any], first: str | None, given: Mapping[str, str]) -> dict[str, Any]:
    """What the probe says. It starts where this process did, so that relative paths of options mean the same; ``-P``
    keeps that folder from being searched for modules before ``first``."""
    paths = [*([first] if first else []), *(str(Path(p).resolve()) for p in sys.path)]
    paths.append(str(Path(fasttrack.__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fasttrack.checks.off_probe"],
        input=json.dumps({**job, "copy": first}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**given, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"the probe process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
