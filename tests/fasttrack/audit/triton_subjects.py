"""Triton kernels as subjects of the audit: ``python triton_subjects.py FOLDER`` writes PTX and cubins (needs ptxas)."""

import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def rms(x, w, y, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    g = tl.load(w + at, mask=at < n)
    tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.extra.cuda.gdc_launch_dependents()
    r = tl.rsqrt(tl.sum(v * v) / n + eps)
    tl.store(y + row * n + at, (v * r * g.to(tl.float32)).to(tl.bfloat16), mask=at < n)


@triton.jit
def matmul(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BM, BN), tl.float32)
    pa = a + rows[:, None] * K + ks[None, :]
    pb = b + ks[:, None] * N + cols[None, :]
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(pa), tl.load(pb), acc)
        pa += BK
        pb += BK * N
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(c + rows[:, None] * N + cols[None, :], acc.to(tl.bfloat16))


@triton.jit
def gather(x, table, y, d, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    row = tl.load(table + tl.program_id(0))
    v = tl.load(x + row * d + at, mask=at < d)
    tl.store(y + tl.program_id(0) * d + at, v, mask=at < d)
    tl.extra.cuda.gdc_launch_dependents()


CASES = {
    "rms": (rms, {"x": "*bf16", "w": "*bf16", "y": "*bf16", "n": "i32", "eps": "fp32"}, {"BLOCK": 1024}),
    "matmul": (
        matmul,
        {"a": "*bf16", "b": "*bf16", "c": "*bf16", "N": "i32", "K": "i32"},
        {"BM": 64, "BN": 64, "BK": 32},
    ),
    "gather": (gather, {"x": "*fp32", "table": "*i32", "y": "*fp32", "d": "i32"}, {"BLOCK": 256}),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kernel, signature, constants) in CASES.items():
        for arch in (90, 100):
            types = {**signature, **dict.fromkeys(constants, "constexpr")}
            fixed = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
            source = ASTSource(fn=kernel, signature=types, constexprs=fixed)
            built = triton.compile(source, target=GPUTarget("cuda", arch, 32))
            (folder / f"triton_{name}.sm_{arch}a.ptx").write_text(built.asm["ptx"])
            (folder / f"triton_{name}.sm_{arch}a.cubin").write_bytes(built.asm["cubin"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
