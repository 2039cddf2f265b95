"""Resources of a compiled kernel, read from the cubin itself: registers, local memory, shared memory, spills.

Needs no CUDA: the numbers sit in ``.nv.info`` attributes, and spill instructions are known by their opcodes.
:func:`sass` disassembles, where an ``nvdisasm`` is installed (``NVDISASM``, the ``nvidia-cuda-nvdisasm`` package, or
PATH).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_REGCOUNT, _FRAME_SIZE, _MAX_THREADS = 0x2F, 0x11, 0x05
_LDL, _STL = 0x983, 0x387  #: opcodes of loads and stores of local memory, the same from sm_70 to sm_103


@dataclass(frozen=True)
class Resources:
    """Per kernel. ``frame`` is local memory per thread in bytes; ``spill_*`` count LDL and STL instructions."""

    kernel: str
    registers: int
    frame: int
    static_smem: int
    spill_loads: int
    spill_stores: int

    @property
    def spills(self) -> bool:
        return self.frame > 0 or bool(self.spill_loads) or bool(self.spill_stores)


def _sections(data: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """(name, type, content, size) of every section of a little-endian ELF64."""
    if data[:4] != b"\x7fELF":
        raise ValueError("not an ELF image: expected a cubin")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    table = heads[names]
    strings = data[table[4] : table[4] + table[5]]
    for h in heads:
        name = strings[h[0] : strings.index(b"\0", h[0])].decode()
        content = b"" if h[1] == 8 else data[h[4] : h[4] + h[5]]  # 8: NOBITS
        yield name, h[1], content, h[5]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        fmt, attr, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if fmt == 4:
            yield attr, info[at : at + value]
            at += value
        else:
            yield attr, struct.pack("<H", value)


def _symbols(sections: list[tuple[str, int, bytes, int]]) -> list[str]:
    strtab = next(c for n, _, c, _ in sections if n == ".strtab")
    symtab = next(c for n, _, c, _ in sections if n == ".symtab")
    out = []
    for i in range(0, len(symtab), 24):
        (at,) = struct.unpack_from("<I", symtab, i)
        out.append(strtab[at : strtab.index(b"\0", at)].decode())
    return out


def _opcodes(text: bytes) -> Iterator[int]:
    """The low 12 bits of every 128-bit instruction."""
    return (word & 0xFFF for word, _ in struct.iter_unpack("<QQ", text))


@functools.cache
def nvdisasm() -> str | None:
    """Path of a disassembler, or None."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    hits = [*packaged.glob("cu*/bin/nvdisasm"), *packaged.glob("cuda_nvdisasm/bin/nvdisasm")]
    for candidate in (os.environ.get("NVDISASM"), *map(str, hits), shutil.which("nvdisasm")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def sass(cubin: bytes) -> list[str]:
    """Disassembled instructions, one a line, or [] without a disassembler."""
    tool = nvdisasm()
    if tool is None:
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run([tool, "-c", f.name], capture_output=True, text=True, check=False).stdout
    return [re.sub(r"\s+", " ", line).strip() for line in out.splitlines() if "/*" in line and ";" in line]


def resources(cubin: bytes) -> list[Resources]:
    """One entry per kernel of the cubin, in name order. Raises ValueError for anything but a cubin."""
    sections = list(_sections(cubin))
    names = _symbols(sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for name, _, content, _ in sections:
        if name != ".nv.info":
            continue
        for attr, payload in _attributes(content):
            if attr in (_REGCOUNT, _FRAME_SIZE) and len(payload) >= 8:
                index, value = struct.unpack_from("<II", payload)
                (registers if attr == _REGCOUNT else frames)[names[index]] = value
    kernels = sorted(n.removeprefix(".text.") for n, _, _, _ in sections if n.startswith(".text."))
    shared = {n.removeprefix(".nv.shared."): size for n, _, _, size in sections if n.startswith(".nv.shared.")}
    code = {n.removeprefix(".text."): Counter(_opcodes(c)) for n, _, c, _ in sections if n.startswith(".text.")}
    return [
        Resources(k, registers.get(k, 0), frames.get(k, 0), shared.get(k, 0), code[k][_LDL], code[k][_STL])
        for k in kernels
    ]
