"""The fake target keeps its promises; everything the harness's own tests rest on."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from fake_target import TARGET, write_entry_point

from fasttrack.target import DeploymentRefused, Engine, EngineSpec, Request, Sampling, Target


def generate(arm: str, switch: str, tp: int = 2, requests: int = 3):
    engine = TARGET.engine(EngineSpec("embedded", arm, switch, tp=tp))
    assert isinstance(engine, Engine)
    wanted = [Request(str(i), tuple(range(1 + i, 9 + i)), 12, Sampling(ignore_eos=True)) for i in range(requests)]
    return engine.generate(wanted, run="r"), engine.drain_ledger()


def test_optimized_equals_oracle_and_stock_never_uses_the_fast_path():
    assert isinstance(TARGET, Target)
    fast, ledger = generate("optimized", "fast")
    oracle, _ = generate("oracle", "auto")
    stock, stock_ledger = generate("stock", "auto")
    assert [c.token_ids for c in fast] == [c.token_ids for c in oracle] == [c.token_ids for c in stock]
    assert len({token for c in fast for token in c.token_ids}) > 15
    assert [s.path for s in ledger] == ["stock"] + ["specialized"] * 11
    assert {s.reason for s in stock_ledger} == {"switched_off"}


def test_faults_show():
    dropped, _ = generate("sabotaged:drop_partial", "fast")
    assert [c.token_ids for c in dropped] != [c.token_ids for c in generate("stock", "auto")[0]]
    assert {s.path for s in generate("sabotaged:refuse_all", "fast")[1]} == {"stock"}


def test_refusal_lists_every_reason():
    with pytest.raises(DeploymentRefused) as refused:
        TARGET.engine(EngineSpec("embedded", "optimized", "fast", tp=3, dcp=2, draft_length=1))
    assert len(refused.value.reasons) == 3


def test_describing_loads_no_torch_and_the_entry_point_finds_it(tmp_path: Path):
    path = f"{write_entry_point(tmp_path)}:{Path(__file__).parent}"
    code = "import sys; from fasttrack.target import find_target as find; find('toy').describe(); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
    assert not [e for e in entry_points(group="fasttrack.targets") if e.name == "toy"]
