"""Cubins: parameter layout from the ELF attributes, instructions from nvdisasm's JSON.

The attribute numbers are those ``cuobjdump -elf`` prints for ``.nv.info``: EIATTR_KPARAM_INFO, EIATTR_PARAM_CBANK and
EIATTR_INDIRECT_BRANCH_TARGETS.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fasttrack.audit.ir import Parameter
from fasttrack.errors import UsageError

MAX_BYTES = 16 << 20
_KPARAM_INFO, _PARAM_CBANK, _BRANCH_TARGETS = 0x17, 0x0A, 0x34


@dataclass(frozen=True)
class Layout:
    """Where a kernel's parameters sit in constant bank 0, in bytes."""

    base: int
    size: int
    parameters: tuple[Parameter, ...]
    symbols: dict[str, int] = field(default_factory=dict)  #: label -> byte offset in the kernel's section
    jumps: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: indirect branch -> its targets, byte offsets

    def at(self, address: int) -> tuple[Parameter, int] | None:
        """The parameter that holds this byte of the bank, and the offset inside it."""
        return self.within(address - self.base)

    def within(self, offset: int) -> tuple[Parameter, int] | None:
        for p in self.parameters:
            if p.offset <= offset < p.offset + p.size:
                return p, offset - p.offset
        return None


@functools.cache
def find_nvdisasm() -> str | None:
    """``$NVDISASM``, the PyPI package ``nvidia-cuda-nvdisasm``, or the PATH; None when there is none."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    hits = sorted([*packaged.glob("cu*/bin/nvdisasm*"), *packaged.glob("cuda_nvdisasm/bin/nvdisasm*")])
    for candidate in (os.environ.get("NVDISASM"), *map(str, hits), shutil.which("nvdisasm")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def layouts(data: bytes, origin: str) -> dict[str, Layout]:
    """Kernel -> parameter layout. Raises :class:`UsageError` unless ``data`` is a complete CUDA ELF image."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{len(data) >> 20} MiB of cubin", where=origin, expected=f"at most {MAX_BYTES >> 20} MiB")
    if not data:
        raise UsageError("empty file", where=origin, expected="a cubin (ELF)")
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise UsageError("not an ELF image", where=origin, expected="a cubin")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine != 190:
        raise UsageError(f"ELF image of machine {machine}", where=origin, expected="a cubin (machine 190, NVIDIA CUDA)")
    out = {}
    try:
        sections = _sections(data)
        symbols = _symbols(sections)
        for name, content in sections:
            if name.startswith(".nv.info."):
                layout = _layout(content)
                kernel = name.removeprefix(".nv.info.")
                if layout is not None:
                    out[kernel] = replace(layout, symbols=symbols.get(f".text.{kernel}", {}))
    except (struct.error, ValueError, IndexError, UnicodeDecodeError):
        raise UsageError("cubin is truncated or damaged", where=origin, expected="a complete cubin") from None
    if not out:
        raise UsageError("cubin without a kernel", where=origin, expected="at least one kernel")
    return out


def _sections(data: bytes) -> list[tuple[str, bytes]]:
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    table = heads[names]
    strings = data[table[4] : table[4] + table[5]]
    out = []
    for h in heads:
        if h[1] != 8 and h[4] + h[5] > len(data):  # 8: a section without content
            raise ValueError("section beyond the end")
        name = strings[h[0] : strings.index(b"\0", h[0])].decode()
        out.append((name, b"" if h[1] == 8 else data[h[4] : h[4] + h[5]]))
    return out


def _symbols(sections: list[tuple[str, bytes]]) -> dict[str, dict[str, int]]:
    """Section -> symbol -> value, from the ELF64 symbol table."""
    content = dict(sections)
    table, names = content.get(".symtab", b""), content.get(".strtab", b"")
    out: dict[str, dict[str, int]] = {}
    for at in range(0, len(table) - 23, 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", table, at)
        if 0 < section < len(sections):
            label = names[name : names.index(b"\0", name)].decode()
            out.setdefault(sections[section][0], {})[label] = value
    return out


def _layout(info: bytes) -> Layout | None:
    at, base, size, parameters = 0, None, 0, []
    jumps: dict[int, tuple[int, ...]] = {}
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:
            continue
        payload = info[at : at + value]
        at += value
        if attribute == _KPARAM_INFO and len(payload) >= 12:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", payload)
            parameters.append(Parameter(ordinal, "", offset, flags >> 18))
        elif attribute == _PARAM_CBANK and len(payload) >= 8:
            _, base, size = struct.unpack_from("<IHH", payload)
        elif attribute == _BRANCH_TARGETS:  # repeated: branch, 0, count, targets
            words = struct.unpack(f"<{len(payload) // 4}I", payload[: len(payload) // 4 * 4])
            k = 0
            while k + 3 <= len(words):
                jumps[words[k]] = words[k + 3 : k + 3 + words[k + 2]]
                k += 3 + words[k + 2]
    if base is None:
        return None
    return Layout(base, size, tuple(sorted(parameters, key=lambda p: p.index)), jumps=jumps)


def disassemble(data: bytes, origin: str) -> tuple[list[dict[str, Any]], list[str]]:
    """nvdisasm's functions and source file names. Raises :class:`UsageError` when the tool refuses the image."""
    tool = find_nvdisasm()
    if tool is None:
        raise UsageError("no nvdisasm", where=origin, expected="pip install nvidia-cuda-nvdisasm, or NVDISASM")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        command = [tool, "-json", "-g", "-ndf", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    try:
        document = json.loads(done.stdout)
        functions = document[1]
    except (ValueError, IndexError, TypeError):
        reason = next((x for x in done.stderr.splitlines() if "fatal" in x or "error" in x), "no output")
        raise UsageError(f"nvdisasm cannot read it: {reason[:120]}", where=origin, expected="a cubin") from None
    files: list[str] = []
    if len(document) > 2:
        folders = document[2].get("directories", [])
        for f in document[2].get("files", []):
            k = f.get("dir-idx", -1)
            files.append(os.path.join(folders[k], f["file"]) if 0 <= k < len(folders) else f["file"])
    return functions, files
