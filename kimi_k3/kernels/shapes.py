"""Shapes of one rank's shard: what every kernel is compiled for. Plain data, importable without torch or CuTe.

Two models: the full Kimi K3, and a small one with the real per-head dimensions (KDA 128 x 128; MLA 512 / 64 / 128 /
128) so that the very kernels that serve the full model can be evaluated end to end on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

#: batch rows (requests x (1 + draft length)) that a prepared step may have; padding goes up to the next one
PREPARED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
MAX_ROWS = 64


def pad16(n: int) -> int:
    return -(-n // 16) * 16


@dataclass(frozen=True)
class ModelShape:
    """Widths of the unsharded model, in elements."""

    name: str
    hidden: int
    heads: int  #: KDA and MLA
    head_dim: int  #: KDA key = value width, and MLA value width
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    intermediate: int  #: dense layer
    latent: int  #: routed experts
    experts: int
    top_k: int
    moe_intermediate: int
    shared_experts: int
    vocab: int
    blocks: int = 8  #: saved attention-residual blocks, at most

    @property
    def shared_intermediate(self) -> int:
        return self.shared_experts * self.moe_intermediate


FULL = ModelShape(
    name="kimi-k3",
    hidden=7168,
    heads=96,
    head_dim=128,
    q_lora=1536,
    kv_lora=512,
    nope=128,
    rope=64,
    intermediate=33792,
    latent=3584,
    experts=896,
    top_k=16,
    moe_intermediate=3072,
    shared_experts=2,
    vocab=163840,
)

#: real per-head dimensions, everything else small; every sharded width divides 16
SMALL = ModelShape(
    name="small",
    hidden=256,
    heads=16,
    head_dim=128,
    q_lora=256,
    kv_lora=512,
    nope=128,
    rope=64,
    intermediate=2048,
    latent=128,
    experts=32,
    top_k=8,
    moe_intermediate=1024,
    shared_experts=2,
    vocab=2048,
)

MODELS = {m.name: m for m in (FULL, SMALL)}


@dataclass(frozen=True)
class ProjectionShape:
    """y[m, n] = x[m, k] @ w[n, k]^T on one rank.

    ``fp32_rows``: the first rows of w whose outputs stay FP32 (router logits). ``situ``: w is [gate; up], the output
    has n/2 columns. Shapes that differ in nothing but ``op`` are equal: they share compiled code.
    """

    op: str = field(compare=False)
    n: int
    k: int
    fp32_rows: int = 0
    situ: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k

    def bytes(self, m: int) -> int:
        """Bytes that m rows must move through device memory: weights, x and y once each."""
        out = self.n // 2 if self.situ else self.n
        return self.weight_bytes + 2 * m * self.k + 2 * m * (out + self.fp32_rows)


@dataclass(frozen=True)
class ShardShape:
    """One rank of ``tp`` ranks."""

    model: ModelShape
    tp: int

    def __post_init__(self) -> None:
        m = self.model
        for what in ("heads", "experts", "latent", "hidden", "intermediate", "moe_intermediate", "vocab"):
            if getattr(m, what) % self.tp:
                raise ValueError(f"{m.name}: {what} {getattr(m, what)} is not divisible by tp {self.tp}")

    @property
    def heads(self) -> int:
        return self.model.heads // self.tp

    @property
    def width(self) -> int:
        """Columns of the local heads."""
        return self.heads * self.model.head_dim

    @property
    def kda_rows(self) -> int:
        """Rows of the KDA input projection: q, k, v, output gate, F_A (replicated), beta; padded to 16."""
        return pad16(4 * self.width + self.model.head_dim + self.heads)

    @property
    def mla_rows(self) -> int:
        """Rows of the MLA input projection: q_a, kv_a, k_pe, output gate."""
        return self.model.q_lora + self.model.kv_lora + self.model.rope + self.width

    @property
    def router_rows(self) -> int:
        return pad16(self.model.experts // self.tp)

    @property
    def latent_rows(self) -> int:
        return self.model.latent // self.tp

    def projections(self) -> dict[str, ProjectionShape]:
        m, tp = self.model, self.tp
        shared = m.shared_intermediate // tp
        dense = m.intermediate // tp
        items = (
            ProjectionShape("kda_in_proj", self.kda_rows, m.hidden),
            ProjectionShape("mla_in_proj", self.mla_rows, m.hidden),
            ProjectionShape("mla_q_b", self.heads * (m.nope + m.rope), m.q_lora),
            ProjectionShape("o_proj", m.hidden, self.width),
            ProjectionShape("moe_front", self.router_rows + self.latent_rows, m.hidden, fp32_rows=self.router_rows),
            ProjectionShape("shared_gate_up", 2 * shared, m.hidden, situ=True),
            ProjectionShape("shared_down", m.hidden, shared),
            ProjectionShape("dense_gate_up", 2 * dense, m.hidden, situ=True),
            ProjectionShape("dense_down", m.hidden, dense),
            ProjectionShape("lm_head", m.vocab // tp, m.hidden),
        )
        return {p.op: p for p in items}


def shard(model: str | ModelShape, tp: int) -> ShardShape:
    """The shard shape of a model by name ("kimi-k3", "small")."""
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"unknown model {model!r}; known: {', '.join(MODELS)}")
        model = MODELS[model]
    return ShardShape(model, tp)


def small_variant(**changes: int) -> ModelShape:
    """The small model with some widths changed, for a checkpoint whose widths differ."""
    return replace(SMALL, **changes)  # type: ignore[arg-type]
