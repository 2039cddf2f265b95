"""What the run ran on: hardware, driver, operating system, packages, commit and the uncommitted difference."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fasttrack import __version__

#: Variables whose names begin so can change results, and are recorded.
WATCHED = ("OMP_", "MKL_", "OPENBLAS_", "CUDA_", "TORCH_", "VLLM_", "NCCL_", "CUTE_", "FASTTRACK_", "PYTHONHASH")
#: Of these, what has such a word in its name is a secret (VLLM_API_KEY): bundles are public, so its value stays out.
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


@dataclass(frozen=True)
class Accelerator:
    name: str
    uuid: str
    driver: str
    memory_mib: int


def accelerators() -> list[Accelerator]:
    """The NVIDIA GPUs the driver reports, without loading CUDA; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,uuid,driver_version,memory.total"
    try:
        out = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in out.stdout.splitlines() if out.returncode == 0 else []:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[3].isdigit():
            found.append(Accelerator(parts[0], parts[1], parts[2], int(parts[3])))
    return found


def _git(root: Path, *arguments: str) -> str | None:
    try:
        out = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout if out.returncode == 0 else None


@dataclass(frozen=True)
class SourceState:
    """The checkout the code was run from. ``diff`` is what the working tree adds to ``commit``."""

    commit: str | None
    branch: str | None
    diff: str
    untracked: tuple[str, ...]

    @property
    def dirty(self) -> bool:
        return bool(self.diff or self.untracked)

    @property
    def diff_sha256(self) -> str:
        return hashlib.sha256(self.diff.encode()).hexdigest()


def source_state(root: Path) -> SourceState:
    """Commit and difference of the checkout at ``root``; untracked Python files count as difference."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None or top is None or Path(top.strip()).resolve() != root.resolve():
        # Installed below somebody else's repository: its commit says nothing about this code.
        return SourceState(None, None, "", ())
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    diff = _git(root, "diff", "HEAD", "--no-ext-diff", "--binary") or ""
    listed = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    untracked = []
    for name in sorted(listed.splitlines()):
        if name.endswith((".py", ".yaml", ".toml")):
            digest = hashlib.sha256((root / name).read_bytes()).hexdigest() if (root / name).is_file() else ""
            untracked.append(f"{name} sha256:{digest}")
    return SourceState(commit.strip(), (branch or "").strip() or None, diff, tuple(untracked))


def checkout_root() -> Path:
    """The folder that holds the ``fasttrack`` package in use."""
    return Path(__file__).resolve().parents[1]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def collect_environment(source: SourceState) -> dict[str, Any]:
    """A JSON-ready description. Environment variables are listed where they can change results; no secrets."""
    packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    return {
        "fasttrack": __version__,
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "accelerators": [vars(a) for a in accelerators()],
        },
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "source": {
            "commit": source.commit,
            "branch": source.branch,
            "dirty": source.dirty,
            "diff_sha256": source.diff_sha256,
            "untracked": list(source.untracked),
        },
        "variables": {k: _harmless(k, v) for k, v in sorted(os.environ.items()) if k.startswith(WATCHED)},
    }


def _harmless(name: str, value: str) -> str:
    return "(set)" if any(word in name.upper() for word in SECRET) else value
