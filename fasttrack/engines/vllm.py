"""vLLM in this process. The engine is stepped by hand, so that schedules, step ranges and token times are ours.

Options (``engine.options`` of the manifest) go to ``vllm.LLM`` unchanged, except:

- ``speculative_config``: completed with the cell's ``num_speculative_tokens``, dropped where it is 0;
- ``additional_config``: completed with the target's switch;
- ``checkpoint``: digest of the weights, for the record; ``rank`` and ``ranks_played`` for one rank of a larger group.

The ledger comes from the target's worker extension (``worker_extension_cls``), asked over vLLM's RPC:
``fasttrack_drain_ledger()`` on each worker returns a list of :class:`LedgerStep` fields with ``rank_hash`` in
place of ``rank_hashes``. Without an extension there is no ledger, and the gates that need one do not run.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fasttrack.errors import EvidenceError, UsageError
from fasttrack.target import STEP_RANGE, Completion, EngineInfo, EngineSpec, LedgerStep, Request, TargetDescription

#: What the cell decides, so that an option cannot contradict it.
OWNED = ("tensor_parallel_size", "decode_context_parallel_size", "max_num_seqs", "seed")
_NOT_FOR_VLLM = ("checkpoint", "rank", "ranks_played")


def llm_arguments(spec: EngineSpec, description: TargetDescription) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one arm. :class:`UsageError` for options the cell decides."""
    options = {k: v for k, v in spec.options.items() if k not in _NOT_FOR_VLLM}
    for name in OWNED:
        if name in options:
            raise UsageError(f"{name} follows from the cell", where="engine.options", expected="no such option")
    if not options.get("model"):
        raise UsageError("model is missing", where="engine.options", expected="a checkpoint folder")
    if spec.arm == "oracle":
        raise EvidenceError("vLLM has no higher-precision oracle arm; fidelity needs the embedded engine")
    speculative = options.pop("speculative_config", None)
    if spec.draft_length:
        if not speculative:
            raise UsageError(
                "missing for a cell with drafts", where="engine.options.speculative_config", expected="method and model"
            )
        speculative = {**speculative, "num_speculative_tokens": spec.draft_length}
        if spec.acceptance.startswith("synthetic("):
            length = float(spec.acceptance.removeprefix("synthetic(").rstrip(")"))
            speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        options["speculative_config"] = speculative
    return {
        **options,
        "tensor_parallel_size": 1 if "ranks_played" in spec.options else spec.tp,
        **({"decode_context_parallel_size": spec.dcp} if spec.dcp > 1 else {}),
        "max_num_seqs": spec.max_requests,
        "seed": spec.seed,
        "additional_config": {**options.get("additional_config", {}), description.switch: spec.switch_value},
    }


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Keyword arguments of ``vllm.SamplingParams``; structured output is added by the engine."""
    s = request.sampling
    return {
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "seed": s.seed,
        "stop": list(s.stop) or None,
        "stop_token_ids": list(s.stop_token_ids) or None,
        "logprobs": max(1, s.logprobs or 1),
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "ignore_eos": s.ignore_eos,
        "max_tokens": 1 if request.forced else request.max_tokens,
        "prompt_logprobs": 1 if request.forced else None,
    }


class VllmEngine:
    def __init__(self, spec: EngineSpec, description: TargetDescription) -> None:
        self.spec = spec
        self.arguments = llm_arguments(spec, description)
        try:
            self.vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise EvidenceError(f"the vllm engine needs vLLM, which cannot be imported here: {error}") from None
        self.devices = _devices(self.arguments["tensor_parallel_size"])
        self.llm = self.vllm.LLM(**self.arguments)

    def info(self) -> EngineInfo:
        model = self.llm.llm_engine.model_config
        eos = getattr(model.hf_config, "eos_token_id", None)
        shard = {k: self.spec.options[k] for k in ("rank", "ranks_played") if k in self.spec.options}
        return EngineInfo(
            kind="vllm",
            devices=self.devices,
            checkpoint=str(self.spec.options.get("checkpoint", self.arguments["model"])),
            vocab_size=int(model.get_vocab_size()),
            max_context=int(model.max_model_len),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),),
            config={**_flat(self.arguments), "vllm": self.vllm.__version__, **shard},
            evidence="shard" if shard else "measured",
        )

    def encode(self, text: str) -> list[int]:
        return list(self.llm.get_tokenizer().encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Through the checkpoint's chat template; :class:`EvidenceError` where it has none."""
        try:
            ids = self.llm.get_tokenizer().apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except ValueError as error:
            raise EvidenceError(f"the tokenizer renders no chat: {str(error).splitlines()[0]}") from None
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.llm.get_tokenizer().decode(list(token_ids)))

    def generate(
        self,
        requests: Sequence[Request],
        *,
        run: str,
        keep_logits: bool = False,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Step vLLM until every request is done. Forced tokens are scored as prompt tokens, in prefill."""
        if keep_logits:
            raise EvidenceError("vLLM returns no full log-probabilities; fidelity needs the embedded engine")
        import torch

        engine, waiting, index = self.llm.llm_engine, list(requests), 0
        done = {r.id: Completion(r.id, [], "", logprobs=[], top_logprobs=[]) for r in requests}
        by_id = {r.id: r for r in requests}
        while waiting or engine.has_unfinished_requests():
            for request in [r for r in waiting if r.arrival_step <= index]:
                waiting.remove(request)
                done[request.id].arrival_time = time.perf_counter()
                prompt = {"prompt_token_ids": [*request.prompt, *request.forced]}
                engine.add_request(request.id, prompt, self._sampling(request))
            if engine.has_unfinished_requests():
                cuda = torch.cuda.is_available()
                with torch.profiler.record_function(f"{STEP_RANGE}/{run}/{index}") if cuda else nullcontext():
                    outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    _take(done[output.request_id], output, by_id[output.request_id], now)
            index += 1
            if on_step:
                on_step(index - 1)
        return [done[r.id] for r in requests]

    def _sampling(self, request: Request) -> Any:
        arguments = sampling_arguments(request)
        if structured := request.sampling.structured:
            kinds = importlib.import_module("vllm.sampling_params")
            names = {"json_schema": "json", "regex": "regex"}
            arguments["structured_outputs"] = kinds.StructuredOutputsParams(
                **{names[k]: v for k, v in structured.items()}
            )
        return self.vllm.SamplingParams(**arguments)

    def drain_ledger(self) -> list[LedgerStep]:
        if "worker_extension_cls" not in self.arguments:
            return []
        return merge_ranks(self.llm.collective_rpc("fasttrack_drain_ledger"))

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        import torch

        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def merge_ranks(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[LedgerStep]:
    """One ledger from one per rank: rank 0 tells the step, every rank its digest. A rank that skipped steps shows."""
    steps = []
    for position, first in enumerate(ranks[0] if ranks else []):
        own = [rank[position]["rank_hash"] for rank in ranks if position < len(rank)]
        fields = {k: v for k, v in first.items() if k != "rank_hash"}
        steps.append(LedgerStep(**fields, rank_hashes=own))
    return steps


def _take(done: Completion, output: Any, request: Request, now: float) -> None:
    """Move what one vLLM output adds into ``done``; vLLM repeats what it returned before."""
    first = output.outputs[0]
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    done.cached_tokens = int(getattr(output, "num_cached_tokens", None) or 0)
    if request.forced:
        if not output.finished:
            return
        scored = list(output.prompt_logprobs)[len(request.prompt) :]
        done.token_ids = list(request.forced)
        done.logprobs = [float(at[t].logprob) for at, t in zip(scored, request.forced, strict=True)]
        done.top_logprobs = [{int(t): float(p.logprob) for t, p in at.items()} for at in scored]
        done.token_times, done.finish_reason = [now] * len(request.forced), "length"
        return
    seen = len(done.token_ids)
    new = list(first.token_ids)[seen:]
    done.token_ids += new
    done.token_times += [now] * len(new)
    for token, alternatives in zip(new, list(first.logprobs or [])[seen:], strict=True):
        done.logprobs.append(float(alternatives[token].logprob))
        done.top_logprobs.append({int(t): float(p.logprob) for t, p in alternatives.items()})
    done.text = first.text
    if output.finished:
        done.finish_reason = str(first.finish_reason)


def _devices(count: int) -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        raise EvidenceError("the vllm engine needs an NVIDIA GPU, and torch sees none here")
    present = torch.cuda.device_count()
    if present < count:
        raise EvidenceError(f"the cell needs {count} GPUs, and this machine has {present}")
    return tuple(torch.cuda.get_device_name(i) for i in range(count))


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """One level of nesting less, so that arms can be compared key by key and the switch has its own key."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        if key == "additional_config":
            flat |= value
        else:
            flat[key] = value
    return flat
