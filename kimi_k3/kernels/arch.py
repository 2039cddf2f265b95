"""What differs between the architectures that one kernel source serves. Importable without CUDA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """Limits that geometry depends on. ``smem_block``: most dynamic shared memory of a block, bytes."""

    name: str
    sms: int
    smem_block: int
    smem_sm: int
    registers_sm: int = 65536
    warpgroup_mma: bool = False  #: has wgmma, an optional fast path of sm_90a


H200 = Arch("sm_90a", sms=132, smem_block=232448, smem_sm=233472, warpgroup_mma=True)
B200 = Arch("sm_100a", sms=148, smem_block=232448, smem_sm=233472)
GB300 = Arch("sm_103a", sms=152, smem_block=232448, smem_sm=233472)

ARCHES = {a.name: a for a in (H200, B200, GB300)}


def of_capability(major: int, minor: int) -> Arch:
    """The description for a compute capability. Raises ValueError for GPUs that no kernel was built for."""
    known = {(9, 0): H200, (10, 0): B200, (10, 3): GB300}
    if (major, minor) not in known:
        raise ValueError(f"compute capability {major}.{minor}: expected 9.0, 10.0 or 10.3 (sm_90a, sm_100a, sm_103a)")
    return known[(major, minor)]


def blocks_per_sm(arch: Arch, threads: int, registers: int, smem: int) -> int:
    """Resident blocks of one kernel on one SM, by threads, registers (256 per warp granularity) and shared memory."""
    warps = -(-threads // 32)
    by_registers = arch.registers_sm // (warps * (-(-registers * 32 // 256) * 256)) if registers else 32
    by_smem = arch.smem_sm // (smem + 1024)  # 1 KB of every block is reserved
    return max(0, min(2048 // (warps * 32), by_registers, by_smem, 32))


def padding(smem: int, per_sm: int, smem_sm: int = H200.smem_sm) -> int:
    """Bytes to add to a block's dynamic ``smem`` so that at most ``per_sm`` blocks fit on an SM (0: no limit).

    A grid of exactly per_sm blocks on every SM runs evenly; when more fit, the next launch's blocks crowd some SMs.
    """
    if not per_sm:
        return 0
    least = smem_sm // (per_sm + 1)  # with the 1 KB that is reserved beside it, per_sm + 1 blocks are too many
    return max(0, least - smem)
