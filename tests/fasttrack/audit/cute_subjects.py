"""CuTe DSL kernels as subjects of the audit: ``python cute_subjects.py FOLDER [sm_90a ...]`` writes PTX and cubins."""

import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp())

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


class Scale:
    """y = w * x with the weight read early; plain CuTe loads."""

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream):
        self.scale_kernel(x, w, y).launch(grid=(8, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def scale_kernel(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        b, _, _ = cute.arch.block_idx()
        i = b * 128 + t
        g = w[i]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        y[i] = g * x[i]


class RowSum:
    """A loop over a row length known at run time, and a reduction through shared memory."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: Int32, stream):
        self.rowsum_kernel(x, y, n).launch(grid=(8, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def rowsum_kernel(self, x: cute.Tensor, y: cute.Tensor, n: Int32):
        t, _, _ = cute.arch.thread_idx()
        b, _, _ = cute.arch.block_idx()
        part = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(128), 16)
        cute.arch.griddepcontrol_wait()
        acc = Float32(0)
        for i in range(t, n, 128):
            acc += x[b, i]
        part[t] = acc
        cute.arch.sync_threads()
        if t == 0:
            total = Float32(0)
            for k in cutlass.range_constexpr(128):
                total += part[k]
            y[b] = total
        cute.arch.griddepcontrol_launch_dependents()


class Gather:
    """Rows chosen by a table."""

    @cute.jit
    def __call__(self, x: cute.Tensor, rows: cute.Tensor, y: cute.Tensor, stream):
        self.gather_kernel(x, rows, y).launch(grid=(8, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def gather_kernel(self, x: cute.Tensor, rows: cute.Tensor, y: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        b, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        y[b, t] = x[rows[b], t]


class TmaTile:
    """One TMA box of a weight requested before the wait, an activation read after it."""

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout = cute.tile_to_shape(atom, (16, 64), (0, 1))
        copy, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), w, layout, (16, 64))
        self.tmatile_kernel(copy, tensor, layout, x, y).launch(
            grid=(8, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def tmatile_kernel(
        self, copy: cute.CopyAtom, w: cute.Tensor, layout: cute.ComposedLayout, x: cute.Tensor, y: cute.Tensor
    ):
        t, _, _ = cute.arch.thread_idx()
        b, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        tile = smem.allocate_tensor(BFloat16, layout.outer, 1024, swizzle=layout.inner)
        bar = smem.allocate_array(cutlass.Uint64, 1)
        if t == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        box = cute.local_tile(w, (16, 64), (b, 0))
        sp, gp = cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(box, 0, 2)
        )
        if cute.arch.make_warp_uniform(t // 32) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2048)
            cute.copy(copy, gp, sp, tma_bar_ptr=bar)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        v = x[t % 64]
        cute.arch.mbarrier_wait(bar, 0)
        if t < 64:
            acc = Float32(0)
            for r in cutlass.range_constexpr(16):
                acc += Float32(tile[r, t]) * v
            y[b, t] = acc


def fake(dtype, shape):
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return make_fake_tensor(dtype, shape, stride, assumed_align=16)


def cases():
    f, i = Float32, Int32
    return {
        "scale": (Scale(), [fake(f, (1024,)) for _ in range(3)]),
        "rowsum": (RowSum(), [fake(f, (8, 4096)), fake(f, (8,)), Int32(4096)]),
        "gather": (Gather(), [fake(f, (64, 128)), fake(i, (8,)), fake(f, (8, 128))]),
        "tmatile": (TmaTile(), [fake(f, (64,)), fake(BFloat16, (128, 64)), fake(f, (8, 64))]),
    }


def main(folder: Path, arches: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for name, (kernel, args) in cases().items():
            for arch in arches:
                options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --generate-line-info"
                code = cute.compile(kernel, *args, make_fake_stream(), options=options)
                ptx = code.__ptx__ if isinstance(code.__ptx__, str) else code.__ptx__.decode()
                (folder / f"cute_{name}.{arch}.ptx").write_text(ptx)
                (folder / f"cute_{name}.{arch}.cubin").write_bytes(code.__cubin__)
        os.chdir("/")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["sm_90a", "sm_100a", "sm_103a"])
