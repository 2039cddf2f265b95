"""Which parameter does an address come from? An answer that shares nothing with the tracer.

The instructions an address depends on are *executed* with numbers: parameter ``i`` holds ``(i + 1) << 40``, special
registers hold small primes, a 64-bit value read from memory at an address in parameter ``i``'s range is
``(i + 1) << 52``, anything else read is a small integer. Bits 40 to 51 of the result name the parameter; when they are
zero the pointer itself came from memory, and the bits above name the parameter that led to it.
"""

from __future__ import annotations

import re

from fasttrack.audit.flow import Flow
from fasttrack.audit.ptx_text import Body, Statement, type_bytes

SHIFT, LOADED = 40, 52
_MASK = (1 << 64) - 1
_SPECIAL = {"%tid": 5, "%ctaid": 3, "%ntid": 128, "%nctaid": 7, "%laneid": 5}


class Oracle:
    """Executes address slices of a kernel without followed calls: instruction i is statement i."""

    def __init__(self, body: Body, flow: Flow) -> None:
        self.body, self.flow = body, flow
        self.parameters = {p.name: i for i, p in enumerate(body.parameters)}
        self.memory: dict[str, int] = {}
        self.busy: set[tuple[int, str]] = set()

    def parameter_of(self, index: int) -> int | None:
        """Position of the parameter the global access at statement ``index`` goes through; None when it is none."""
        s = self.body.statements[index]
        spots = [o for o in s.operands if o.startswith("[")]
        reads_second = s.opcode.startswith("cp.async") and ".global.shared::cta" not in s.opcode
        address = self.address(index, spots[1] if reads_second and len(spots) > 1 else spots[0])
        top = (address >> SHIFT) & 0xFFF or (address & _MASK) >> LOADED
        return top - 1 if 1 <= top <= len(self.parameters) else None

    def address(self, index: int, text: str) -> int:
        inside = text.strip("[] ").split(",")[0]
        total = 0
        for part in re.split(r"\s*\+\s*", inside):
            total += self.value(index, part.strip())
        return total

    def value(self, index: int, text: str) -> int:
        text = text.strip()
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0)
        if text.split(".")[0] in _SPECIAL:
            return _SPECIAL[text.split(".")[0]]
        if text in self.parameters:
            return (self.parameters[text] + 1) << SHIFT
        if not text.startswith("%"):
            return 1 << 20 if re.match(r"[A-Za-z_$]", text) else 0  # a variable in shared memory, or a float
        name = next((n for n in self.flow.definitions if n == text or n.startswith(text + "@")), text)
        places = self.flow.defs_of(index, name)
        for d in sorted(places, key=lambda d: (d >= index, -d)):
            if (d, name) not in self.busy:
                self.busy.add((d, name))
                try:
                    return self.execute(d, text)
                finally:
                    self.busy.discard((d, name))
        return 0

    def execute(self, d: int, reg: str) -> int:
        s = self.body.statements[d]
        words = s.opcode.split(".")
        base, bits = words[0], 8 * (type_bytes(words[-1]) or 8)
        args = s.operands[1:]

        def v(k: int) -> int:
            return self.value(d, args[k])

        if base == "ld":
            return self.load(d, s, reg)
        if base in ("mov", "cvta", "cvt", "shfl", "mapa", "not"):
            if args[0].startswith("{"):
                low, high = (self.value(d, x) for x in args[0].strip("{} ").split(","))
                return (low & 0xFFFFFFFF) | (high << 32)
            if s.operands[0].startswith("{"):
                names = [x.strip() for x in s.operands[0].strip("{} ").split(",")]
                return (v(0) >> (32 * names.index(reg))) & 0xFFFFFFFF
            return v(0) if base != "cvt" or bits == 64 else v(0) & 0xFFFFFFFF
        simple = {
            "add": lambda: v(0) + v(1),
            "sub": lambda: v(0) - v(1),
            "mul": lambda: v(0) * v(1),
            "mad": lambda: v(0) * v(1) + v(2),
            "fma": lambda: v(0) * v(1) + v(2),
            "shl": lambda: v(0) << (v(1) & 63),
            "shr": lambda: v(0) >> (v(1) & 63),
            "and": lambda: v(0) & v(1),
            "or": lambda: v(0) | v(1),
            "xor": lambda: v(0) ^ v(1),
            "selp": lambda: v(0) or v(1),
            "min": lambda: min(v(0), v(1)),
            "max": lambda: max(v(0), v(1)),
            "div": lambda: v(0) // (v(1) or 1),
            "rem": lambda: v(0) % (v(1) or 1),
        }
        found = simple[base]() if base in simple else 1
        wide = "wide" in words or bits == 64
        return found if wide else ((found + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)

    def load(self, d: int, s: Statement, reg: str) -> int:
        spot = next(o for o in s.operands if o.startswith("["))
        where = self.address(d, spot)
        words = s.opcode.split(".")
        if "param" in words:
            return where & ~((1 << SHIFT) - 1) if type_bytes(words[-1]) == 8 else 2
        if "shared" in words or "local" in words or not where >> SHIFT:
            return self.stored(d, words)
        if type_bytes(words[-1]) == 8:
            return ((where >> SHIFT) & 0xFFF or (where & _MASK) >> LOADED) << LOADED
        return 2

    def stored(self, d: int, words: list[str]) -> int:
        """What the kernel stored to shared or local memory; only pointers matter, so the first 64-bit store will do."""
        if type_bytes(words[-1]) != 8:
            return 2
        for i, s in enumerate(self.body.statements):
            pointer = type_bytes(s.opcode.rsplit(".", 1)[-1]) == 8 and "global" not in s.opcode
            if not s.opcode.startswith("st.") or not pointer or (i, "stored") in self.busy:
                continue
            self.busy.add((i, "stored"))
            try:
                return self.value(i, s.operands[1].strip("{} ").split(",")[0])
            finally:
                self.busy.discard((i, "stored"))
        return 2
