"""The probe process of :mod:`fasttrack.checks.off_state`: a job on stdin, one line of JSON on stdout."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from fasttrack.checks.base import loaded_below
from fasttrack.engines.build import build_engine
from fasttrack.target import EngineSpec, Request, Sampling


class OnlyIn:
    """Finds modules of ``package`` in its own folders alone: the finder of an editable install, which would
    be asked next, knows where the originals of deleted modules lie."""

    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self.prefix):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


def main() -> None:
    job = json.load(sys.stdin)
    before = set(os.environ)
    module, _, attribute = job["target"].partition(":")
    package = module.partition(".")[0]
    if job["copy"]:
        sys.meta_path.insert(0, OnlyIn(package))
    target = getattr(importlib.import_module(module), attribute)
    if job["copy"] and not _lies_in(Path(job["copy"]), package):
        raise RuntimeError(f"{package} was not imported from {job['copy']}")
    if isinstance(target, type):
        target = target()
    spec = EngineSpec(**{**job["spec"], "workdir": Path(job["spec"]["workdir"])})
    engine = build_engine(target, spec)
    sampling = Sampling(ignore_eos=True, logprobs=1)
    requests = [Request(r["id"], tuple(r["prompt"]), r["max_tokens"], sampling) for r in job["requests"]]
    outputs: list[Any] = []
    for done in engine.generate(requests, run="off"):
        outputs += done.token_ids
        outputs += [value.hex() for value in done.logprobs or []]
    result = {
        "sha256": hashlib.sha256(json.dumps(outputs).encode()).hexdigest(),
        "outputs": len(outputs),
        "modules_loaded": loaded_below(tuple(job["modules"])),
        "environment_added": sorted(set(os.environ) - before),
        "importable": [m for m in job["modules"] if _same_package(m, module) and _importable(m)],
    }
    print(json.dumps(result))


def _lies_in(folder: Path, package: str) -> bool:
    return Path(str(sys.modules[package].__file__)).resolve().is_relative_to(folder.resolve())


def _same_package(one: str, other: str) -> bool:
    return one.partition(".")[0] == other.partition(".")[0]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
