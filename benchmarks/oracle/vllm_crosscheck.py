"""The reference against an independent implementation: vLLM's own Kimi K3, from the same checkpoint files.

    python benchmarks/oracle/vllm_crosscheck.py --out result.json [--width narrow|full] [--keep DIR]

Needs one Hopper (or later) GPU, vLLM 0.33.0 and this repository on the path. A checkpoint with the real per-head
dimensions (KDA 128 x 128, MLA 512/64/128/128, convolution 4, MXFP4 group 32) is drawn from a seed and written by
``kimi_k3.reference``; vLLM loads it, prefills prompts and decodes greedily under FULL decode CUDA graphs, returning the
whole distribution at every position. The reference is then forced through the same tokens, in BF16 with the declared
rounding points and in FP64. Reported per position: KL to vLLM, top-1 agreement with the FP64 top-2 gap, and the
distance of vLLM's cached KDA state, convolution history and KV rows where they can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_KIMI_K3_GEMM_AR="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_k3.reference.batch import StepBatch
from kimi_k3.reference.cache import Caches
from kimi_k3.reference.checkpoint import checkpoint_digest, load_checkpoint, save_checkpoint
from kimi_k3.reference.config import KimiK3Config
from kimi_k3.reference.init import random_weights
from kimi_k3.reference.model import Model
from kimi_k3.reference.precision import PRECISIONS
from kimi_k3.reference.released_config import to_released

NARROW = KimiK3Config(
    hidden_size=1024,
    num_hidden_layers=8,
    kda_layers=(1, 2, 3, 5, 6, 7),
    full_attn_layers=(4, 8),
    kda_num_heads=12,
    kda_a_log_padding=4,
    num_attention_heads=12,
    attn_res_block_size=4,
    intermediate_size=2048,
    num_experts=32,
    num_experts_per_token=8,
    moe_intermediate_size=512,
    routed_expert_hidden_size=512,
    vocab_size=1024,
    max_position_embeddings=4096,
    bos_token_id=1021,
    eos_token_id=1022,
    pad_token_id=1023,
)
FULL = replace(
    NARROW,
    hidden_size=7168,
    intermediate_size=4224,
    routed_expert_hidden_size=3584,
    num_experts=64,
    num_experts_per_token=16,
)
WIDTHS = {"narrow": NARROW, "full": FULL}
PROMPTS = (5, 16, 63, 64, 65, 130)  #: tokens; odd lengths cross chunk and page borders
DECODE = 32


def write_text_only(source: Path, target: Path, config: KimiK3Config) -> None:
    """The same tensors for vLLM's text-only class: names without the multimodal prefix, MXFP4 config."""
    target.mkdir()
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            tensors = {name.removeprefix("language_model."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
    text = to_released(config)["text_config"]
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "head_dim": config.kda_head_dim,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (target / "config.json").write_text(json.dumps(text))


def prompts(config: KimiK3Config) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, config.vocab_size - 8, (n,), generator=generator).tolist() for n in PROMPTS]


def run_vllm(folder: Path, config: KimiK3Config, asked: Sequence[list[int]]) -> dict[str, Any]:
    """Greedy tokens and full log-distributions: each prompt alone, then all together; caches if readable."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        gpu_memory_utilization=0.3,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        max_logprobs=config.vocab_size,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    )
    sampling = SamplingParams(
        max_tokens=DECODE, ignore_eos=True, temperature=0, logprobs=config.vocab_size, detokenize=False
    )

    def generate(batch: Sequence[list[int]]) -> list[dict[str, Any]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in batch], sampling, use_tqdm=False)
        found = []
        for output in outputs:
            one = output.outputs[0]
            rows = torch.full((len(one.token_ids), config.vocab_size), float("-inf"), dtype=torch.float64)
            for position, entry in enumerate(one.logprobs):
                ids = torch.tensor(list(entry), dtype=torch.int64)
                rows[position, ids] = torch.tensor([v.logprob for v in entry.values()], dtype=torch.float64)
            found.append({"tokens": list(one.token_ids), "logprobs": rows})
        return found

    alone = [generate([p])[0] for p in asked]
    together = generate(asked)
    last = generate([asked[-1]])[0]  # the caches now hold this request's rows
    return {"alone": alone, "together": together, "last": last, "caches": read_caches(llm)}


def read_caches(llm: Any) -> dict[str, Any]:
    """Layer name -> list of cache tensors, from vLLM's static forward context; empty if it cannot be reached."""
    try:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        context = runner.vllm_config.compilation_config.static_forward_context
    except AttributeError as error:
        print("caches not readable:", error, flush=True)
        return {}
    found = {}
    for name, layer in context.items():
        cache = getattr(layer, "kv_cache", None)
        while isinstance(cache, (list, tuple)) and len(cache) == 1 and isinstance(cache[0], (list, tuple)):
            cache = cache[0]
        tensors = [cache] if torch.is_tensor(cache) else [t for t in cache or () if torch.is_tensor(t)]
        if tensors:
            found[name] = tensors
    return found


def force(model: Model, tokens: list[int]) -> tuple[torch.Tensor, Caches]:
    """Log-probabilities [len(tokens), vocab] of the reference forced through ``tokens`` in one prefill."""
    count, page = len(tokens), 16
    pages = -(-count // page)
    caches = Caches.allocate(
        model.config, model.precision, pages=pages, page_size=page, slots=2, draft_length=0, device=model.device
    )
    positions = torch.arange(count, device=model.device)
    batch = StepBatch(
        token_ids=torch.tensor(tokens, device=model.device),
        positions=positions,
        query_lens=[count],
        context_lens=[0],
        is_prefill=[True],
        slot_mapping=positions,
        block_tables=torch.arange(pages, device=model.device)[None],
        state_slots=torch.tensor([[1]], device=model.device),
        accepted=torch.tensor([1], device=model.device),
        draft_lens=[0],
    )
    logits = model.compute_logits(model.forward(batch, caches))
    return torch.log_softmax(logits.double(), -1).cpu(), caches


def compare(name: str, vllm: dict[str, Any], exact: torch.Tensor, rounded: torch.Tensor, start: int) -> dict[str, Any]:
    """One request: vLLM, the BF16 reference and the FP64 reference at every decoded position."""
    ours, oracle = rounded[start - 1 : start - 1 + DECODE], exact[start - 1 : start - 1 + DECODE]
    theirs = vllm["logprobs"]
    weight = oracle.exp()

    def kl(other: torch.Tensor) -> torch.Tensor:
        return (weight * (oracle - other)).sum(-1)

    top2 = oracle.topk(2, -1).values
    gap = top2[:, 0] - top2[:, 1]
    flips = []
    for position in range(len(theirs)):
        if int(theirs[position].argmax()) != int(ours[position].argmax()):
            flips.append({"position": position, "oracle_top2_gap": float(gap[position])})
    return {
        "request": name,
        "prompt_tokens": start,
        "tokens": vllm["tokens"],
        "vllm_top8": [{int(i): float(v) for v, i in zip(*row.topk(8), strict=True)} for row in theirs],
        "kl_vllm_to_fp64": [float(v) for v in kl(theirs)],
        "kl_bf16_reference_to_fp64": [float(v) for v in kl(ours)],
        "max_abs_logprob_difference_vllm_bf16": float((theirs - ours).abs().max()),
        "max_abs_logprob_difference_vllm_fp64": float((theirs - oracle).abs().max()),
        "max_abs_logprob_difference_bf16_fp64": float((ours - oracle).abs().max()),
        "top1_disagreements_vllm_bf16": flips,
        "top1_disagreements_vllm_fp64": int((theirs.argmax(-1) != oracle.argmax(-1)).sum()),
        "top1_disagreements_bf16_fp64": int((ours.argmax(-1) != oracle.argmax(-1)).sum()),
        "distinct_tokens": len(set(vllm["tokens"])),
    }


def compare_caches(caches: dict[str, Any], ours: Caches, config: KimiK3Config, tokens: int) -> list[dict[str, Any]]:
    """For every layer the cached slot (or the rows) of vLLM nearest to ours: relative L2 distance."""
    found = []
    for name, tensors in caches.items():
        digits = [part for part in name.split(".") if part.isdigit()]
        if not digits:
            continue
        layer = int(digits[0])
        for tensor in tensors:
            entry = {"layer": layer, "name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
            state = ours.recurrent.get(layer)
            if state is not None and tensor.dim() == 4 and tensor.shape[1:] == state.shape[1:]:
                found.append(entry | {"what": "recurrent state"} | _nearest(tensor, state[1]))
            elif layer in ours.conv and tensor.dim() == 3:
                taps = ours.conv[layer][1]
                if tensor.shape[1] == taps.shape[1]:
                    tensor = tensor.transpose(1, 2)
                if tensor.shape[2] == taps.shape[1] and tensor.shape[1] >= taps.shape[0]:
                    found.append(entry | {"what": "convolution history"} | _nearest(tensor[:, : taps.shape[0]], taps))
            elif layer in ours.kv and tensor.shape[-1] == config.kv_row:
                rows = ours.kv[layer].reshape(-1, config.kv_row)[:tokens].float()
                pool = tensor.reshape(-1, config.kv_row).float()
                live = pool[torch.isfinite(pool).all(-1) & (pool.abs().amax(-1) > 0)][:20000]
                nearest = torch.cdist(rows.to(live.device), live).amin(-1) / rows.norm(dim=-1).to(live.device)
                found.append(entry | {"what": "kv rows", "worst_relative_l2": float(nearest.max()), "rows": tokens})
            else:
                found.append(entry | {"what": "not compared"})
    return found


def _nearest(slots: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    live = slots[:512].float().flatten(1)
    target = wanted.float().flatten().to(live.device)
    distance = ((live - target).norm(dim=1) / target.norm()).nan_to_num(nan=torch.inf)  # unused slots hold anything
    return {"relative_l2": float(distance.min()), "slot": int(distance.argmin())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", choices=sorted(WIDTHS), default="narrow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=None)
    arguments = parser.parse_args()
    config = WIDTHS[arguments.width]
    folder = arguments.keep or Path(tempfile.mkdtemp())
    started = time.time()
    save_checkpoint(folder / "released", config, random_weights(config, arguments.seed))
    write_text_only(folder / "released", folder / "text", config)
    digest = checkpoint_digest(folder / "released")
    print(f"checkpoint {digest[:16]} written, {time.time() - started:.0f} s", flush=True)
    _, weights = load_checkpoint(folder / "released")
    asked = prompts(config)
    vllm = run_vllm(folder / "text", config, asked)
    print(f"vllm done, {time.time() - started:.0f} s", flush=True)
    models = {name: Model(config, weights, PRECISIONS[name], device="cuda") for name in ("bf16", "fp64")}
    rows = []
    for kind in ("alone", "together"):
        for index, prompt in enumerate(asked):
            result = vllm[kind][index]
            forced = prompt + result["tokens"][:-1]
            exact, rounded = (force(models[name], forced)[0] for name in ("fp64", "bf16"))
            rows.append(compare(f"{kind}/{index}", result, exact, rounded, len(prompt)))
    forced = asked[-1] + vllm["last"]["tokens"][:-1]
    caches = compare_caches(vllm["caches"], force(models["bf16"], forced)[1], config, len(forced))
    import vllm as package

    record = {
        "what": "kimi_k3.reference against vLLM's own Kimi K3, same checkpoint files, greedy decode under CUDA graphs",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0),
        "versions": {"vllm": package.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "config": config.to_json(),
        "seed": arguments.seed,
        "checkpoint": digest,
        "decode_steps": DECODE,
        "requests": rows,
        "caches": caches,
    }
    arguments.out.write_text(json.dumps(record, indent=1))
    for row in rows:
        kl = row["kl_vllm_to_fp64"]
        own = row["kl_bf16_reference_to_fp64"]
        print(
            f"{row['request']:12} prompt {row['prompt_tokens']:4} KL vllm {max(kl):.2e} ours {max(own):.2e}"
            f" |dlogp| {row['max_abs_logprob_difference_vllm_bf16']:.3f}"
            f" flips {row['top1_disagreements_vllm_bf16']} distinct {row['distinct_tokens']}"
        )
    for entry in caches:
        print({k: v for k, v in entry.items() if k != "name"})
    if arguments.keep is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
