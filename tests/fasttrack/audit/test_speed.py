"""150 kernels, PTX and SASS, in under a minute on two cores."""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path

import pytest

from fasttrack.audit import cubin
from fasttrack.audit.run import audit_folder


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.mark.slow
@pytest.mark.skipif(cubin.find_nvdisasm() is None, reason="no nvdisasm")
def test_one_hundred_and_fifty_kernels(tmp_path: Path, cute: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One kernel a file, as a target delivers them, so that the disassembler starts 150 times."""
    sources = sorted(cute.glob("*.cubin"))
    for k in range(150):
        source = sources[k % len(sources)]
        for suffix in (".ptx", ".cubin"):
            shutil.copy(source.with_suffix(suffix), tmp_path / f"{k:03d}-{source.stem}{suffix}")
    before, began = cpu_seconds(), time.monotonic()
    report, problems = audit_folder(tmp_path, jobs=2)
    wall, cpu = time.monotonic() - began, cpu_seconds() - before
    with capsys.disabled():
        print(f"\n150 kernels: {cpu:.1f} CPU seconds, {wall:.1f} s on this machine as it is loaded now")
    assert not problems
    assert len({a.variant for a in report.audited}) == 150
    assert {a.stage for a in report.audited} == {"ptx", "sass"}
    assert cpu / 2 < 60  # two cores; the wall clock of a shared machine says less
