"""The vLLM engine against a stand-in for vLLM: arguments, stepping, ledger, and what is said where it is missing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from fake_target import TARGET

from fasttrack.engines.vllm import VllmEngine, llm_arguments, merge_ranks, sampling_arguments
from fasttrack.errors import EvidenceError, UsageError
from fasttrack.target import Engine, EngineSpec, Request, Sampling

D = TARGET.describe()
OPTIONS = {"model": "/checkpoint", "kv_cache_dtype": "fp8"}


def spec(arm="optimized", options=None, **fields):
    value = "fast" if arm == "optimized" else "auto"
    return EngineSpec("vllm", arm, value, options=OPTIONS if options is None else options, **fields)


def test_the_cell_and_the_switch_become_arguments():
    assert llm_arguments(spec(tp=8, dcp=8, max_requests=64, seed=3), D) == {
        "model": "/checkpoint",
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 8,
        "decode_context_parallel_size": 8,
        "max_num_seqs": 64,
        "seed": 3,
        "additional_config": {"toy_backend": "fast"},
    }


def test_arms_differ_in_the_switch_alone():
    options = {**OPTIONS, "additional_config": {"other": 1}}
    one, other = (llm_arguments(spec(arm, options, tp=8), D) for arm in ("stock", "optimized"))
    assert one.pop("additional_config") == {"other": 1, "toy_backend": "auto"}
    assert other.pop("additional_config") == {"other": 1, "toy_backend": "fast"}
    assert one == other


def test_drafts_complete_the_speculative_config_and_its_absence_drops_it():
    options = {**OPTIONS, "speculative_config": {"method": "dspark", "model": "/drafter"}}
    found = llm_arguments(spec(options=options, draft_length=7, acceptance="synthetic(6)"), D)["speculative_config"]
    assert found["num_speculative_tokens"] == 7
    assert found["synthetic_acceptance_length"] == 6.0
    assert "speculative_config" not in llm_arguments(spec(options=options), D)
    with pytest.raises(UsageError, match="speculative_config"):
        llm_arguments(spec(draft_length=7), D)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_num_seqs", "seed", "decode_context_parallel_size"])
def test_options_that_the_cell_decides_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} follows from the cell"):
        llm_arguments(spec(options={**OPTIONS, name: 1}), D)


def test_one_rank_of_a_group_runs_alone_on_its_gpu():
    found = llm_arguments(spec(options={**OPTIONS, "rank": 3, "ranks_played": 8}, tp=8), D)
    assert found["tensor_parallel_size"] == 1
    assert "rank" not in found


def test_sampling_arguments():
    found = sampling_arguments(Request("r", (1,), 9, Sampling(temperature=0.5, stop=("x",), ignore_eos=True)))
    assert (found["temperature"], found["stop"], found["max_tokens"], found["logprobs"]) == (0.5, ["x"], 9, 1)
    forced = sampling_arguments(Request("r", (1,), 9, forced=(2, 3)))
    assert (forced["max_tokens"], forced["prompt_logprobs"]) == (1, 1)


def test_missing_vllm_gpu_or_oracle_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EvidenceError, match="needs vLLM"):
        VllmEngine(spec(), D)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EvidenceError, match="needs an NVIDIA GPU"):
        VllmEngine(spec(), D)
    with pytest.raises(EvidenceError, match="oracle"):
        VllmEngine(spec("oracle"), D)


class StandIn:
    """As much of ``vllm.LLM`` as the engine uses: each step adds one token to every request."""

    def __init__(self, **arguments):
        self.arguments, self.running, self.rows = arguments, {}, []
        hf = SimpleNamespace(eos_token_id=[1, 2])
        config = SimpleNamespace(hf_config=hf, max_model_len=99, get_vocab_size=lambda: 50)
        self.llm_engine = SimpleNamespace(
            model_config=config,
            add_request=self.add,
            step=self.step,
            has_unfinished_requests=lambda: bool(self.running),
        )

    def add(self, name, prompt, sampling):
        self.running[name] = (prompt["prompt_token_ids"], sampling, [])

    def step(self):
        self.rows.append({"run": "r", "requests": len(self.running)})
        outputs = []
        for name, (prompt, sampling, made) in list(self.running.items()):
            made.append(10 + len(made))
            finished = len(made) == sampling.max_tokens
            logprobs = [{t: SimpleNamespace(logprob=-float(t)), 49: SimpleNamespace(logprob=-0.1)} for t in made]
            first = SimpleNamespace(token_ids=made, logprobs=logprobs, text="x" * len(made), finish_reason="length")
            scores = [None, *({t: SimpleNamespace(logprob=-float(t))} for t in prompt[1:])]
            told = {"request_id": name, "outputs": [first], "finished": finished, "prompt_logprobs": scores}
            outputs.append(SimpleNamespace(**told, num_cached_tokens=len(prompt) - 1 or None))
            if finished:
                del self.running[name]
        return outputs

    def collective_rpc(self, method):
        assert method == "fasttrack_drain_ledger"
        return [[], []]

    def reset_prefix_cache(self):
        self.cleared = True


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.__version__ = StandIn, "0.0"
    module.SamplingParams = lambda **arguments: SimpleNamespace(**arguments)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: f"GPU {i}")
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)


def test_requests_are_admitted_at_their_step_and_come_back_in_order(stand_in):
    engine = VllmEngine(spec(tp=2), D)
    assert isinstance(engine, Engine)
    steps = []
    requests = [Request("late", (1, 2), 2, arrival_step=4), Request("early", (3,), 3)]
    done = engine.generate(requests, run="r", on_step=steps.append)
    assert [c.id for c in done] == ["late", "early"]
    assert [c.token_ids for c in done] == [[10, 11], [10, 11, 12]]
    assert [c.cached_tokens for c in done] == [1, 0]
    assert done[0].logprobs == [-10.0, -11.0]
    assert done[0].top_logprobs[0] == {10: -10.0, 49: -0.1}
    assert (done[1].finish_reason, done[1].text, len(done[1].token_times)) == ("length", "xxx", 3)
    assert steps == list(range(6))
    assert [r["requests"] for r in engine.llm.rows] == [1, 1, 1, 1, 1]


def test_forced_tokens_are_scored_as_prompt(stand_in):
    done = VllmEngine(spec(), D).generate([Request("f", (1, 2), 2, forced=(7, 8))], run="r")[0]
    assert (done.token_ids, done.logprobs) == ([7, 8], [-7.0, -8.0])


def test_info_names_devices_switch_and_evidence(stand_in):
    info = VllmEngine(spec(tp=2), D).info()
    assert (info.devices, info.evidence, info.max_context) == (("GPU 0", "GPU 1"), "measured", 99)
    assert (info.config["toy_backend"], info.eos_token_ids) == ("fast", (1, 2))
    shard = VllmEngine(spec(options={**OPTIONS, "rank": 3, "ranks_played": 8}, tp=8), D).info()
    assert (shard.evidence, shard.config["rank"]) == ("shard", 3)
    with pytest.raises(EvidenceError, match="needs 8 GPUs, and this machine has 2"):
        VllmEngine(spec(tp=8), D)


def test_no_extension_no_ledger(stand_in):
    assert VllmEngine(spec(), D).drain_ledger() == []


def test_ledgers_of_ranks_become_one():
    step = {
        "run": "r",
        "index": 0,
        "kind": "decode",
        "requests": 1,
        "rows": 1,
        "padded_rows": 0,
        "draft_length": 0,
        "tp": 2,
        "dcp": 1,
        "context_max": 5,
        "path": "specialized",
        "reason": None,
        "ops": {},
        "providers": {},
        "slots": [],
    }
    ranks = [[{**step, "rank_hash": "a"}, {**step, "index": 1, "rank_hash": "b"}], [{**step, "rank_hash": "a"}]]
    merged = merge_ranks(ranks)
    assert [s.rank_hashes for s in merged] == [["a", "a"], ["b"]], "a rank that skipped a step must show"
