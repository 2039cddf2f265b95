"""Mutants of right kernels must be flagged, right kernels must not.

For every load of anything but weights that is ordered behind the wait, a mutant with that load (and its address)
hoisted above it must give ``early-load`` with the right parameter: at least 95 %. Every wait deleted must give an
error: at least 90 %, and the others must be harmless. The right parameter is known from an oracle that executes the
address with numbers (``audit_oracle``), not from the tracer.

Measured 2026-11-29, nvcc 13.0.88, CuTe DSL 4.8.0, Triton 3.9.0; kernels / hoists flagged / deleted waits flagged:

* kernels.cu for sm_90a, sm_100a, sm_103a: 126 / 457 of 457 / 132 of 132
* cute_subjects.py: 12 / 15 of 15 / 12 of 12; triton_subjects.py: 6 / 118 of 118 / 6 of 6
* kernels of others, not shipped here: flashinfer (commit fb28d72: norm, activation, rotary, router GEMM, Lamport and
  two-shot all-reduce, MoE finalize) and two Triton kernels: 16 / 431 of 431 / 15 of 17. The two unflagged waits stand
  right behind another wait. Unmutated, one kernel stores before its wait (a Lamport kernel, by design);
* CuTe DSL streaming GEMMs and feature probes: 201 / 771 of 771 / 201 of 222, and 23 kernels of kimi_k3 (projections,
  KDA core, AttnRes, embedding): 180 of 180 / 23 of 38. Unflagged are waits of warps that only copy weights, where the
  consumers wait themselves. Unmutated, seven probes store before their wait, as written.

FASTTRACK_AUDIT_CORPUS=<folder of PTX> repeats this with other kernels.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from audit_mutation import Mutant, mutants, unmutated_errors

from fasttrack.audit.contracts import ContractTable, load_table

HERE = Path(__file__).parent


def judge(files: list[Path], table: ContractTable | None, capsys: pytest.CaptureFixture[str], least: int) -> None:
    total: Counter[str] = Counter()
    flagged: Counter[str] = Counter()
    missed: list[Mutant] = []
    kernels, undeclared = 0, []
    for file in files:
        for base, found in mutants(file.read_text(), str(file), table):
            kernels += 1
            undeclared += [(file.name, f.kernel, f.rule, f.parameter) for f in unmutated_errors(base)]
            for m in found:
                total[m.kind] += 1
                flagged[m.kind] += m.flagged
                if not m.flagged:
                    missed.append(m)
    with capsys.disabled():
        rates = ", ".join(f"{k}: {flagged[k]} of {total[k]} flagged" for k in sorted(total))
        print(f"\n{kernels} kernels; {rates}; {len(undeclared)} undeclared findings")
    assert undeclared == []
    assert kernels >= least
    assert total["hoist"] >= least
    assert flagged["hoist"] >= 0.95 * total["hoist"], [(m.kernel, m.text, m.parameter) for m in missed]
    assert flagged["no-wait"] >= 0.90 * total["no-wait"]
    assert all(m.harmless for m in missed if m.kind == "no-wait")


def test_cuda(cuda: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(sorted(cuda.glob("*.ptx")), load_table(HERE / "contracts.yaml"), capsys, 120)


def test_cute(cute: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(sorted(cute.glob("*.ptx")), None, capsys, 12)


def test_triton(triton: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(sorted(triton.glob("*.ptx")), None, capsys, 6)


@pytest.mark.skipif("FASTTRACK_AUDIT_CORPUS" not in os.environ, reason="FASTTRACK_AUDIT_CORPUS names no folder")
def test_other_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    judge(sorted(Path(os.environ["FASTTRACK_AUDIT_CORPUS"]).rglob("*.ptx")), None, capsys, 1)
