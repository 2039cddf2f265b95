"""The target as the harness sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrack.errors import UsageError
from fasttrack.target import (
    STEP_RANGE,
    DeploymentRefused,
    Engine,
    EngineSpec,
    Request,
    Sampling,
    Target,
    find_target,
    step_record,
)
from kimi_k3 import names
from kimi_k3.target import TARGET

ON, OFF = names.SWITCH_ON, names.SWITCH_OFF


def spec(
    arm: str = "stock", switch: str = OFF, *, tp: int = 1, draft_length: int = 0, dcp: int = 1, **options
) -> EngineSpec:
    return EngineSpec(
        "embedded", arm, switch, tp=tp, dcp=dcp, draft_length=draft_length, max_requests=4, options=options
    )


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_protocol_is_implemented_and_registered() -> None:
    assert isinstance(TARGET, Target)
    assert find_target("kimi_k3") is TARGET
    engine = TARGET.engine(spec())
    assert isinstance(engine, Engine)


def test_describing_needs_no_torch() -> None:
    code = """
import sys, kimi_k3.target
kimi_k3.target.TARGET.describe()
print([m for m in ("torch", "tokenizers", "kimi_k3.decode") if m in sys.modules])
"""
    assert python(code) == "[]"


def test_the_description_agrees_with_what_runs() -> None:
    description = TARGET.describe()
    assert STEP_RANGE == names.STEP_RANGE
    assert (description.switch, description.on, description.off) == ("decode_backend", ON, OFF)
    engine = TARGET.engine(spec("optimized", ON, tp=2))
    engine.generate([Request("a", (1, 2, 3), 3), Request("b", (4,), 3, arrival_step=1)], run="x")
    steps = engine.drain_ledger()
    ran = {op for step in steps for op in step.ops}
    assert ran
    assert ran <= set(description.ops)
    assert {step.reason for step in steps} - {None} <= set(description.fallback_reasons)


def test_every_precision_named_exists() -> None:
    from kimi_k3.reference.precision import PRECISIONS

    assert tuple(PRECISIONS) == names.PRECISIONS


def test_off_means_off() -> None:
    """Neither building nor running the stock arm loads anything of the optimised packages."""
    code = f"""
import json, sys
from fasttrack.target import EngineSpec, Request, Sampling
from kimi_k3.target import TARGET
engine = TARGET.engine(EngineSpec("embedded", "stock", "auto", tp=2, max_requests=2))
done = engine.generate([Request("a", (1, 2, 3), 4, Sampling(temperature=1.0, logprobs=1, ignore_eos=True))], run="x")
assert len(done[0].token_ids) == 4
watched = {names.OPTIMIZED_MODULES!r}
print(json.dumps([m for m in sys.modules if any(m == w or m.startswith(w + ".") for w in watched)]))
"""
    assert json.loads(python(code)) == []


def test_both_arms_in_fp64_give_the_same_tokens_and_differ_in_the_switch_alone() -> None:
    requests = [Request(str(i), tuple(range(i, i + 6)), 12, Sampling(ignore_eos=True)) for i in range(4)]
    stock, fast = (
        TARGET.engine(spec(precision="fp64", tp=8)),
        TARGET.engine(spec("optimized", ON, precision="fp64", tp=8)),
    )
    assert [c.token_ids for c in stock.generate(requests, run="x")] == [
        c.token_ids for c in fast.generate(requests, run="x")
    ]
    assert {s.path for s in stock.drain_ledger()} == {"stock"}
    assert [s.path for s in fast.drain_ledger()] == ["stock"] + ["specialized"] * 11
    one, other = dict(stock.info().config), dict(fast.info().config)
    assert (one.pop(names.SWITCH), other.pop(names.SWITCH)) == (OFF, ON)
    assert one == other
    assert stock.info().checkpoint == fast.info().checkpoint
    assert stock.info().evidence == fast.info().evidence == "emulated"


def test_the_oracle_is_stock_in_fp64_on_one_rank() -> None:
    engine = TARGET.engine(spec("oracle", ON, tp=8, precision="bf16-kvfp8"))
    config = engine.info().config
    assert (config["precision"], config[names.SWITCH], config["tp"]) == ("fp64", OFF, 1)
    (done,) = engine.generate([Request("a", (1, 2), 2, forced=(3, 4))], run="x", keep_logits=True)
    assert str(done.full_logprobs.dtype) == "torch.float64"


def test_ledger_steps_become_records() -> None:
    engine = TARGET.engine(spec())
    done = engine.generate([Request("a", (1, 2, 3), 4, Sampling(ignore_eos=True))], run="x")
    steps = engine.drain_ledger()
    records = [
        step_record(s, unit="u", attempt=1, arm="stock", cell=None, evidence={"kind": "emulated"}) for s in steps
    ]
    assert sum(r.emitted for r in records) == len(done[0].token_ids) == 4
    assert [r.kind for r in records] == ["prefill", "decode", "decode", "decode"]


def test_a_refused_deployment_lists_every_reason() -> None:
    with pytest.raises(DeploymentRefused) as refused:
        TARGET.engine(
            spec(
                "optimized",
                ON,
                tp=3,
                dcp=2,
                draft_length=8,
                pipeline_parallel_size=2,
                enable_lora=True,
                enable_sleep_mode=True,
            )
        )
    text = "\n".join(refused.value.reasons)
    for word in ("tensor_parallel", "context_parallel", "draft_length", "pipeline_parallel", "lora", "sleep_mode"):
        assert word in text
    for arguments in ({"tp": 3}, {"draft_length": 2}, {"draft_length": 8}, {"enable_expert_parallel": True}):
        with pytest.raises(DeploymentRefused):
            TARGET.engine(spec("optimized", ON, **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "tiny-c"}, "'tiny-c': no such folder; expected a folder or tiny-a, tiny-b"),
        ({"page_sice": 4}, "engine.options.page_sice: unknown option; expected one of .*page_size"),
        ({"page_size": "4"}, "engine.options.page_size: '4' is not int"),
        ({"page_size": True}, "engine.options.page_size: True is not int"),
        ({"page_size": 0}, "page_size 0, expected at least 1"),
        ({"precision": "int4"}, "unknown precision 'int4'; expected bf16, bf16-kvfp8, fp32, fp64"),
        ({"max_context": 5000}, "max_context 5000, expected at most 4096"),
        ({"pages": 0}, "pages"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: 2 is not available"),
        ({"tp": 3}, "cannot be sharded over 3 ranks"),
        ({"switch": "fast"}, "decode_backend 'fast', expected 'auto' or 'latency_specialized'"),
        ({"arm": "sabotaged:nothing"}, "unknown fault 'nothing'"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        TARGET.engine(spec(**arguments))
    assert "\n" not in str(caught.value)


def test_a_bad_request_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="request 'a': empty prompt"):
        TARGET.engine(spec()).generate([Request("a", (), 1)], run="x")


def test_a_saved_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    from kimi_k3.reference.checkpoint import checkpoint_digest, save_checkpoint
    from kimi_k3.reference.loading import open_checkpoint

    memory = open_checkpoint("tiny-b", 3)
    save_checkpoint(tmp_path / "saved", memory.config, memory.weights)
    assert checkpoint_digest(tmp_path / "saved") == memory.digest
    request = [Request("a", (1, 2, 3), 6, Sampling(ignore_eos=True))]
    tokens = [
        TARGET.engine(spec(**options)).generate(request, run="x")[0].token_ids
        for options in (
            {"checkpoint": "tiny-b", "checkpoint_seed": 3},
            {"checkpoint": str(tmp_path / "saved")},
            {"checkpoint": "tiny-b", "checkpoint_seed": 4},
        )
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_truncated_checkpoint_names_the_file(tmp_path: Path) -> None:
    from kimi_k3.reference.checkpoint import save_checkpoint
    from kimi_k3.reference.loading import open_checkpoint

    memory = open_checkpoint("tiny-b", 3)
    save_checkpoint(tmp_path / "saved", memory.config, memory.weights)
    shard = next((tmp_path / "saved").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UsageError, match=shard.name):
        TARGET.engine(spec(checkpoint=str(tmp_path / "saved")))
