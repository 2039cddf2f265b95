"""The probe process of :mod:`fasttrack.checks.off_state`: a job on stdin, one line of JSON on stdout."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrack.checks.base import loaded_below
from fasttrack.engines.build import build_engine
from fasttrack.target import Engine, EngineSpec, Request, Sampling


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


class Places:
    """Where the optimised modules lie, under whatever name their files may be read or loaded."""

    def __init__(self, places: Mapping[str, Sequence[str]]) -> None:
        self.roots = {os.path.realpath(path): module for module, paths in places.items() for path in paths}
        self.opened: set[str] = set()

    def owner(self, path: str) -> str | None:
        """The optimised module that the file belongs to, as ``module (path below it)``."""
        for form in {os.path.abspath(path), os.path.realpath(path)}:
            for root, module in self.roots.items():
                if form == root or form.startswith(root + os.sep):
                    return f"{module} ({os.path.relpath(form, os.path.dirname(root))})"
        return None

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook that remembers every file of these modules that is opened, by whatever means."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            owner = self.owner(os.fsdecode(arguments[0]))
            if owner is not None:
                self.opened.add(owner)

    def loaded(self) -> list[str]:
        """Loaded modules whose file is one of these, with where it lies."""
        files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
        found = ((name, self.owner(file)) for name, file in files if isinstance(file, str))
        return [f"{name}: {owner}" for name, owner in found if owner is not None]


def locate(modules: Sequence[str]) -> dict[str, list[str]]:
    """Folder or file of each module that can be imported here; nothing is imported but its parent packages."""
    places: dict[str, list[str]] = {}
    for module in modules:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            places[module] = list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))
    return places


def outputs_of(engine: Engine, requests: Sequence[Request]) -> tuple[str, int]:
    """SHA-256 over tokens and log-probabilities to the last bit, and how many there were."""
    outputs: list[Any] = []
    for done in engine.generate(requests, run="off"):
        outputs += done.token_ids
        outputs += [value.hex() for value in done.logprobs or []]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest(), len(outputs)


def asked(requests: Sequence[Mapping[str, Any]]) -> list[Request]:
    sampling = Sampling(ignore_eos=True, logprobs=1)
    return [Request(r["id"], tuple(r["prompt"]), r["max_tokens"], sampling) for r in requests]


def main() -> None:
    job = json.load(sys.stdin)
    before = dict(os.environ)
    places = Places(job["places"])
    sys.addaudithook(places.audit)
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
    digest, count = outputs_of(build_engine(target, spec), asked(job["requests"]))
    named = loaded_below(tuple(job["modules"]))
    result = {
        "sha256": digest,
        "outputs": count,
        "modules_loaded": named + [m for m in places.loaded() if m.partition(":")[0] not in named],
        "files_opened": sorted(places.opened),
        "environment_added": sorted(k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)),
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
