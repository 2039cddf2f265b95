"""Compiled subjects for the audit's tests, from whatever compilers this machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARCHES = ("sm_90a", "sm_100a", "sm_103a")

sys.path.insert(0, str(HERE))


def _run(command: list[str], **env: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kernels.cu compiled for every architecture: ``kernels.<arch>.ptx`` and ``.cubin``."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    out = tmp_path_factory.mktemp("cuda")
    for arch in ARCHES:
        stem = out / f"kernels.{arch}"
        common = ["nvcc", "-std=c++17", "-lineinfo", f"-arch={arch}", str(HERE / "kernels.cu")]
        _run([*common, "-ptx", "-o", f"{stem}.ptx"])
        _run([*common, "-cubin", "-o", f"{stem}.cubin"])
    return out


@pytest.fixture(scope="session")
def cute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("no CuTe DSL")
    out = tmp_path_factory.mktemp("cute")
    _run([sys.executable, str(HERE / "cute_subjects.py"), str(out), *ARCHES])
    return out


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ptxas = shutil.which("ptxas")
    if importlib.util.find_spec("triton") is None or ptxas is None:
        pytest.skip("no Triton or no ptxas")
    out = tmp_path_factory.mktemp("triton")
    env = {"TRITON_PTXAS_PATH": ptxas, "TRITON_PTXAS_BLACKWELL_PATH": ptxas, "TRITON_CACHE_DIR": str(out / "cache")}
    _run([sys.executable, str(HERE / "triton_subjects.py"), str(out)], **env)
    shutil.rmtree(out / "cache", ignore_errors=True)
    return out
