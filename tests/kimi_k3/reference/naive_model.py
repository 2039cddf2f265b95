"""A second, deliberately plain implementation of the text model: FP64 numpy, one token after the other, straight
from checkpoint tensors by their released names. No caches, no batching, no chunking, no absorbed attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def load_tensors(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                tensor = shard.get_tensor(name)
                tensors[name] = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    return tensors


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def rms(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    return x / np.sqrt((x * x).mean() + eps) * weight


def situ(gate: Any, up: Any) -> Any:
    return 4.0 * np.tanh(gate / 4.0) * sigmoid(gate) * 25.0 * np.tanh(up / 25.0)


def mxfp4(packed: Any, scale: Any) -> Any:
    rows, half = packed.shape
    out = np.empty((rows, 2 * half))
    for r in range(rows):
        for j in range(half):
            for position, nibble in ((2 * j, packed[r, j] % 16), (2 * j + 1, packed[r, j] // 16)):
                sign = -1.0 if nibble >= 8 else 1.0
                out[r, position] = sign * MAGNITUDES[nibble % 8] * 2.0 ** (int(scale[r, position // 32]) - 127)
    return out


class NaiveModel:
    def __init__(self, folder: Path, text_config: dict[str, Any]) -> None:
        self.c = text_config
        self.t = load_tensors(folder)
        self.experts: dict[str, Any] = {}

    def w(self, layer: int, name: str) -> Any:
        return self.t[f"language_model.model.layers.{layer}.{name}"]

    def expert(self, layer: int, expert: int, part: str) -> Any:
        key = f"{layer}.{expert}.{part}"
        if key not in self.experts:
            name = f"block_sparse_moe.experts.{expert}.{part}.weight_"
            self.experts[key] = mxfp4(self.w(layer, name + "packed"), self.w(layer, name + "scale"))
        return self.experts[key]

    def kda(self, i: int, xs: list[Any]) -> list[Any]:
        heads, dim = self.c["linear_attn_config"]["num_heads"], self.c["linear_attn_config"]["head_dim"]
        raw: dict[str, list[Any]] = {"q": [], "k": [], "v": []}
        state = np.zeros((heads, dim, dim))  # [k, v], the textbook orientation
        out = []
        for x in xs:
            conv = {}
            for part, history in raw.items():
                history.append(self.w(i, f"self_attn.{part}_proj.weight") @ x)
                taps = self.w(i, f"self_attn.{part}_conv1d.weight")[:, 0]
                total = np.zeros(heads * dim)
                for back in range(4):
                    if len(history) > back:
                        total += taps[:, 3 - back] * history[-1 - back]
                conv[part] = (total * sigmoid(total)).reshape(heads, dim)
            f = self.w(i, "self_attn.f_b_proj.weight") @ (self.w(i, "self_attn.f_a_proj.weight") @ x)
            beta = sigmoid(self.w(i, "self_attn.b_proj.weight") @ x)
            z = (self.w(i, "self_attn.g_proj.weight") @ x).reshape(heads, dim)
            y = np.empty((heads, dim))
            for h in range(heads):
                q, k, v = conv["q"][h], conv["k"][h], conv["v"][h]
                q = q / math.sqrt((q * q).sum() + 1e-6) / math.sqrt(dim)
                k = k / math.sqrt((k * k).sum() + 1e-6)
                bias = self.w(i, "self_attn.dt_bias")[h * dim : (h + 1) * dim]
                g = -5.0 * sigmoid(math.exp(self.w(i, "self_attn.A_log")[h]) * (f[h * dim : (h + 1) * dim] + bias))
                decayed = np.diag(np.exp(g)) @ state[h]
                state[h] = decayed + np.outer(k, beta[h] * (v - decayed.T @ k))
                o = state[h].T @ q
                y[h] = rms(o, self.w(i, "self_attn.o_norm.weight")) * sigmoid(z[h])
            out.append(self.w(i, "self_attn.o_proj.weight") @ y.reshape(-1))
        return out

    def mla(self, i: int, xs: list[Any]) -> list[Any]:
        heads, lora = self.c["num_attention_heads"], self.c["kv_lora_rank"]
        nope, rope, dv = self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"], self.c["v_head_dim"]
        keys, values, out = [], [], []
        for x in xs:
            row = self.w(i, "self_attn.kv_a_proj_with_mqa.weight") @ x
            latent = rms(row[:lora], self.w(i, "self_attn.kv_a_layernorm.weight"))
            expanded = (self.w(i, "self_attn.kv_b_proj.weight") @ latent).reshape(heads, nope + dv)
            keys.append([np.concatenate([expanded[h, :nope], row[lora:]]) for h in range(heads)])
            values.append([expanded[h, nope:] for h in range(heads)])
            qc = rms(self.w(i, "self_attn.q_a_proj.weight") @ x, self.w(i, "self_attn.q_a_layernorm.weight"))
            q = (self.w(i, "self_attn.q_b_proj.weight") @ qc).reshape(heads, nope + rope)
            heads_out = []
            for h in range(heads):
                scores = np.array([q[h] @ key[h] for key in keys]) / math.sqrt(nope + rope)
                p = np.exp(scores - scores.max())
                p /= p.sum()
                heads_out.append(sum(p[j] * values[j][h] for j in range(len(values))))
            gate = sigmoid(self.w(i, "self_attn.g_proj.weight") @ x)
            out.append(self.w(i, "self_attn.o_proj.weight") @ (np.concatenate(heads_out) * gate))
        return out

    def mlp(self, i: int, name: str, x: Any) -> Any:
        hidden = situ(self.w(i, f"{name}.gate_proj.weight") @ x, self.w(i, f"{name}.up_proj.weight") @ x)
        return self.w(i, f"{name}.down_proj.weight") @ hidden

    def ffn(self, i: int, x: Any) -> Any:
        if i < self.c["first_k_dense_replace"]:
            return self.mlp(i, "mlp", x)
        moe = "block_sparse_moe."
        score = sigmoid(self.w(i, moe + "gate.weight") @ x)
        biased = score + self.w(i, moe + "gate.e_score_correction_bias")
        chosen = sorted(range(len(score)), key=lambda e: (-biased[e], e))[: self.c["num_experts_per_token"]]
        latent = self.w(i, moe + "routed_expert_down_proj.weight") @ x
        total = np.zeros_like(latent)
        for e in chosen:
            hidden = situ(self.expert(i, e, "w1") @ latent, self.expert(i, e, "w3") @ latent)
            total += score[e] / sum(score[c] for c in chosen) * (self.expert(i, e, "w2") @ hidden)
        normed = rms(total, self.w(i, moe + "routed_expert_norm.weight"))
        return self.w(i, moe + "routed_expert_up_proj.weight") @ normed + self.mlp(i, moe + "shared_experts", x)

    def mixture(self, sources: list[Any], norm: Any, proj: Any) -> Any:
        scores = np.array([proj @ rms(v, norm) for v in sources])
        p = np.exp(scores - scores.max())
        return sum(weight * v for weight, v in zip(p / p.sum(), sources, strict=True))

    def logits(self, tokens: list[int]) -> Any:
        """[len(tokens), vocab]. The residual is defined by sums of sub-layer outputs per block, with no running
        prefix: source 0 is the embedding, source b the outputs of block b, the last one as far as it got."""
        size = self.c["attn_res_block_size"]
        embedding = self.t["language_model.model.embed_tokens.weight"][tokens]
        outputs: list[list[Any]] = []  # per block, sub-layer outputs [T, H] in order
        sources: Any = lambda t: [embedding[t]] + [sum(o[t] for o in block) for block in outputs if block]  # noqa: E731

        def read(i: int, site: str, norm: str) -> list[Any]:
            proj = self.w(i, f"{site}_proj.weight")[0]
            mixed = [self.mixture(sources(t), self.w(i, f"{site}_norm.weight"), proj) for t in range(len(tokens))]
            return [rms(m, self.w(i, f"{norm}.weight")) for m in mixed]

        kda = self.c["linear_attn_config"]["kda_layers"]
        for i in range(self.c["num_hidden_layers"]):
            xs = read(i, "self_attention_res", "input_layernorm")
            if i % size == 0:
                outputs.append([])
            outputs[-1].append((self.kda if i + 1 in kda else self.mla)(i, xs))
            xs = read(i, "mlp_res", "post_attention_layernorm")
            outputs[-1].append([self.ffn(i, x) for x in xs])
        norm = self.t["language_model.model.output_attn_res_norm.weight"]
        proj = self.t["language_model.model.output_attn_res_proj.weight"][0]
        hidden = [self.mixture(sources(t), norm, proj) for t in range(len(tokens))]
        final = [rms(h, self.t["language_model.model.norm.weight"]) for h in hidden]
        return np.stack([self.t["language_model.lm_head.weight"] @ h for h in final])
