"""`fasttrack validate` on the untouched embedded manifest, with the optimised path patched underneath: exit 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MANIFEST = Path(__file__).parents[2] / "configs" / "kimi-k3-embedded.yaml"

#: A sitecustomize that patches a module once somebody else imports it: with the switch off nobody must.
HOOK = """
import importlib.abc
import importlib.util
import sys


class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "kimi_k3.decode.executor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Patch())
"""

REFUSE = """
def patch(module):
    from dataclasses import replace

    real = module.Executor.plan

    def plan(self, batch):
        found = real(self, batch)
        return replace(found, path="stock", reason="unprepared_rows") if found.specialized else found

    module.Executor.plan = plan
"""

#: The ledger is written as if the schedule had run, ops and all; the reference computed the step.
LIE = """
def patch(module):
    from collections import Counter
    from dataclasses import replace

    def run(self, plan, batch, aux_layers=()):
        from kimi_k3.decode.schedule import step_schedule

        results = self.model.forward(batch, self.caches, aux_layers)
        calls = Counter(f"kimi_k3::{c.op}" for c in step_schedule(self.model.config, plan.padded_rows))
        hashes = [f"{abs(hash(results[0].sum().item())):016x}"] * plan.tp
        entry = module.ledger.record(plan, batch, None)
        lie = {"path": "specialized", "reason": None, "ops": dict(calls), "rank_hashes": hashes}
        self.last_step = replace(entry, **lie)
        return results

    module.Executor.run = run
"""


def validate(folder: Path, patch: str) -> subprocess.CompletedProcess[str]:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(HOOK + patch)
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = "from fasttrack.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, "validate", str(MANIFEST), "--check", "isolation"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "gate"),
    [(REFUSE, "isolation.scope_coverage"), (LIE, "isolation.witnesses")],
    ids=["plan refuses every step", "ledger claims what the reference did"],
)
def test_an_idle_path_is_exit_1_with_the_gate_named(patch: str, gate: str, tmp_path: Path) -> None:
    done = validate(tmp_path, patch)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    failed = {line.split()[0] for line in done.stdout.splitlines() if line.split()[1:2] == ["fail:"]}
    assert gate in failed, done.stdout[-3000:]
    assert "verdict: fail" in done.stdout
