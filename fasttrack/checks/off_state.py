"""Off means off: the same stock generation in two fresh processes, one of which has no optimised packages at all."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fasttrack
from fasttrack.checks.base import Context, Unit
from fasttrack.checks.schedule import together
from fasttrack.records import Evidence, OffStateRecord
from fasttrack.target import Target

TIMEOUT_S = 600


def run(unit: Unit, ctx: Context) -> None:
    """Run the probe process with the packages complete and with the optimised ones deleted; one record each."""
    cell = unit.cell
    assert cell is not None
    _, info = ctx.engine("stock", tp=cell.tp)
    requests = together(
        4, 1 + 2 * ctx.scope.knobs.decode_steps, ctx.scope.bucket(cell.context), info, ctx.seed(unit.name)
    )
    spec = ctx.engines.spec("stock", tp=cell.tp, dcp=1, draft_length=0, acceptance="none")
    reference = target_reference(ctx.target)
    job = {
        "target": reference,
        "spec": {**asdict(spec), "workdir": str(spec.workdir.resolve())},
        "requests": [{"id": r.id, "prompt": r.prompt, "max_tokens": r.max_tokens} for r in requests],
        "modules": list(ctx.description.optimized_modules),
    }
    with tempfile.TemporaryDirectory(prefix="fasttrack-off-") as folder:
        copy_without(reference.partition(".")[0].partition(":")[0], ctx.description.optimized_modules, Path(folder))
        for checkout, first in (("complete", None), ("optimised-packages-deleted", folder)):
            ctx.progress(0 if first is None else 1, 2, checkout)
            found = _fresh_process(job, first)
            if first is not None and found["importable"]:
                raise RuntimeError(f"deleted packages can still be imported: {found['importable']}")
            ctx.record(
                OffStateRecord,
                arm="stock",
                evidence=Evidence(kind=info.evidence, device=", ".join(info.devices)),  # type: ignore[arg-type]
                checkout=checkout,
                outputs_sha256=found["sha256"],
                outputs=found["outputs"],
                modules_loaded=found["modules_loaded"],
                environment_added=found["environment_added"],
            )


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


def _fresh_process(job: dict[str, Any], first: str | None) -> dict[str, Any]:
    paths = [*([first] if first else []), *(str(Path(p).resolve()) for p in sys.path if p)]
    paths.append(str(Path(fasttrack.__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-m", "fasttrack.checks.off_probe"],
        input=json.dumps({**job, "copy": first}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=first or job["spec"]["workdir"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"the probe process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
