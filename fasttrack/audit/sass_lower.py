"""Disassembled SASS to the audit's instructions.

Meanings of mnemonics: CUDA Binary Utilities (https://docs.nvidia.com/cuda/cuda-binary-utilities/) and what ptxas emits
for known PTX: ACQBULK is griddepcontrol.wait, PREEXIT is launch_dependents, LDG...CONSTANT is ld.global.nc. A 64-bit
address is followed through its low register only. Instructions without an entry keep no pointer.
"""

from __future__ import annotations

import re
from typing import Any

from fasttrack.audit.cubin import Layout
from fasttrack.audit.ir import Access, Address, Function, Instruction, Leaf, Operand, Sync

#: constant-bank slot with the address of the parameter block, by where the block begins (sm_90; sm_100 and sm_103)
_BLOCK_POINTER = {0x210: 0x198, 0x380: 0x348}
_REGISTER = re.compile(r"^([-~!|]*)(U?R\d+|U?P\d+|U?RZ|U?PT)\b")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:U?RZ)?(?:(U?R\d+)\+?)?(0x[0-9a-f]+)?\]")
_HEX = re.compile(r"^-?0x[0-9a-f]+$")
_SETP = {"ISETP", "FSETP", "DSETP", "HSETP2", "UISETP", "PLOP3", "UPLOP3", "PSETP", "UPSETP", "ELECT", "UFSETP"}
_ONE_PRED = {"VOTE", "VOTEU", "SYNCS", "FCHK"}
_SILENT = """
    STG ST STS STL STAS STSM STT STTM RED REDG REDAS LDGSTS LDGDEPBAR DEPBAR SUST SURED
    BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK WARPSYNC BPT NANOSLEEP YIELD NOP
    BAR MEMBAR FENCE ERRBAR CCTL ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT WARPGROUP
    UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UTCBAR
"""
_NO_RESULT = frozenset(_SILENT.split())
_SCOPES = {"SYS": "sys", "GPU": "gpu", "SM": "cta", "CTA": "cta", "CLUSTER": "cluster", "VC": "sys"}


class SassLowering:
    """Lowers one function of nvdisasm's output."""

    def __init__(self, name: str, layout: Layout, files: list[str], origin: str) -> None:
        self.layout, self.files = layout, files
        self.function = Function(name, "sass", origin, layout.parameters, [])

    def run(self, code: list[dict[str, Any]]) -> Function:
        loc: tuple[str, int] | None = None
        count = len(code)
        for i, raw in enumerate(code):
            if "source-line" in raw and raw.get("source-file-id", -1) < len(self.files):
                loc = (self.files[raw["source-file-id"]], raw["source-line"])
            ins = self._instruction(i, raw, count)
            ins.loc = loc
            self.function.instructions.append(ins)
        return self.function

    def _instruction(self, i: int, raw: dict[str, Any], count: int) -> Instruction:
        opcode, text = raw["opcode"], raw.get("operands", "")
        guard_text = raw.get("predicate", "")
        operands = _split(text)
        words = opcode.split(".")
        base = words[0]
        ins = Instruction(i, opcode, f"{guard_text + ' ' if guard_text else ''}{opcode} {text}".strip(), i * 16)
        if guard_text and guard_text.lstrip("@!") not in ("PT", "UPT"):
            ins.guard = (guard_text.lstrip("@!"), "!" in guard_text)
        never = guard_text in ("@!PT", "@!UPT")
        if base in ("BRA", "JMP", "BRX", "CALL"):
            self._branch(ins, base, operands, count)
        elif base in ("EXIT", "RET", "KILL") or opcode.startswith("BPT.TRAP"):
            ins.ends = True
        ins.sync = _sync(words, operands)
        if ins.sync in (Sync.MBAR_WAIT, Sync.MBAR_ARRIVE, Sync.MBAR_EXPECT):
            spot = next((o for o in operands if o.startswith("[")), None)
            ins.barrier = self._address(spot) if spot else None
        self._values(ins, words, operands)
        if never:
            ins.accesses, ins.sync, ins.defs, ins.ends, ins.targets = (), Sync.NONE, (), False, ()
        return ins

    def _branch(self, ins: Instruction, base: str, operands: list[str], count: int) -> None:
        target = next((int(o, 16) // 16 for o in reversed(operands) if _HEX.match(o)), None)
        if target is None:
            target = next((v // 16 for o in operands if (v := self.layout.symbols.get(o)) is not None), None)
        table = tuple(t // 16 for t in self.layout.jumps.get(ins.line, ()) if t // 16 < count)
        if table:
            ins.targets = table
        elif target is not None and 0 <= target < count:
            ins.targets = (target,)
        else:
            self.function.notes.append(f"0x{ins.line:x}: {base} target is not followed")
        # a call also continues behind itself; a branch on divergence may fall through
        ins.ends = base != "CALL" and not {"DIV", "CONV"} & set(ins.opcode.split("."))
        for o in operands:
            m = _REGISTER.match(o)
            if m and "P" in m.group(2) and m.group(2)[-1] != "T" and ins.guard is None and base != "CALL":
                ins.guard = (m.group(2), "!" in m.group(1))

    # --- operands ----------------------------------------------------------------------------------------------

    def _operand(self, text: str) -> Operand | None:
        m = _REGISTER.match(text)
        if m:
            return None if m.group(2)[-1] in "TZ" else m.group(2)
        m = _CONSTANT.search(text)
        if m:
            return self._constant(m)
        if _HEX.match(text):
            return int(text, 16)
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        return None

    def _constant(self, m: re.Match[str]) -> Leaf:
        bank, offset = int(m.group(1), 16), int(m.group(3) or "0", 16)
        if bank == 0:
            found = self.layout.at(offset)
            if found is not None:
                return Leaf("param", "", found[0].index, None if m.group(2) else found[1])
            if offset == _BLOCK_POINTER.get(self.layout.base):
                return Leaf("paramaddr", "block")
        elif bank == 4:
            return Leaf("symbol", f"module variable at c[4][{offset:#x}]")
        return Leaf("special", "constant")

    def _words(self, text: str, count: int) -> tuple[Leaf, ...]:
        """The parameter behind each 32-bit word of a wide constant load, which may span several."""
        m = _CONSTANT.search(text)
        assert m is not None
        first = int(m.group(3) or "0", 16)
        out = []
        for k in range(count):
            found = self.layout.at(first + 4 * k)
            offset = None if found is None or m.group(2) else found[1]
            out.append(Leaf("param", "", found[0].index, offset) if found else Leaf("special", "constant"))
        return tuple(out)

    def _address(self, text: str) -> Address:
        inside = text[text.rindex("[") + 1 : text.rindex("]")]
        terms: list[Operand] = []
        offset = 0
        for part in re.split(r"\+", inside):
            if _HEX.match(part):
                offset += int(part, 16)
            else:
                value = self._operand(part)
                if isinstance(value, int):
                    offset += value
                elif value is not None:
                    terms.append(value)
        return Address(tuple(terms), offset)

    # --- values and accesses -----------------------------------------------------------------------------------

    def _values(self, ins: Instruction, words: list[str], operands: list[str]) -> None:
        base = words[0]
        ins.accesses = self._accesses(words, operands)
        if base in _NO_RESULT:
            ins.args = tuple(a for o in operands if isinstance(a := self._operand(o), str))
            return
        results, sources = _results(base, operands)
        width = _result_words(words)
        defs: list[str] = []
        for o in results:
            m = _REGISTER.match(o)
            if m and m.group(2)[-1] not in "TZ":
                defs.append(m.group(2))
                stem, number = re.fullmatch(r"(\D+)(\d+)", m.group(2)).groups()  # type: ignore[union-attr]
                if "P" not in stem:
                    defs += [f"{stem}{int(number) + k}" for k in range(1, width)]
        ins.defs = tuple(defs)
        values = [self._operand(o) for o in sources]
        ins.op, ins.args = _semantics(words, sources, values)
        if base in ("LDC", "LDCU", "ULDC") and isinstance(values[0], Leaf) and values[0].kind == "param":
            ins.op, ins.args = "parameters", self._words(sources[0], len(ins.defs))
        if ins.accesses and base not in _NO_RESULT:
            ins.op, ins.args = "load", ()

    def _accesses(self, words: list[str], operands: list[str]) -> tuple[Access, ...]:
        base = words[0]
        spots = [o for o in operands if o.startswith(("[", "desc["))]
        spots = [o for o in spots if o.count("[") >= 1 and not re.fullmatch(r"desc\[U?R\d+\]", o)]
        if not spots:
            return ()
        order, scope = _strength(words)
        width = _bytes(words)
        first = self._address(spots[0])
        values = tuple(v for o in operands[1:] if (v := self._operand(o)) is not None)
        if values and isinstance(values[0], str) and width > 4 and values[0][-1].isdigit():
            stem, number = re.fullmatch(r"(\D+)(\d+)", values[0]).groups()  # type: ignore[union-attr]
            values = tuple(f"{stem}{int(number) + k}" for k in range(width // 4))
        if base in ("LDG", "LD", "LDS", "LDL", "LDSM", "LDGMC"):
            space = {"LD": "generic", "LDS": "shared", "LDSM": "shared", "LDL": "local"}.get(base, "global")
            return (Access("load", space, first, width, order, scope),)
        if base in ("STG", "ST", "STS", "STL", "STSM"):
            space = {"ST": "generic", "STS": "shared", "STSM": "shared", "STL": "local"}.get(base, "global")
            return (Access("store", space, first, width, order, scope, values=values),)
        if base == "STAS":
            return (Access("store", "shared", first, width, "weak", "", "async"),)
        if base in ("ATOMG", "ATOM", "ATOMS", "RED", "REDG", "REDS"):
            space = {"ATOM": "generic", "ATOMS": "shared", "REDS": "shared"}.get(base, "global")
            what = "atomic" if base.startswith("ATOM") else "reduction"
            return (Access(what, space, first, width, "relaxed", scope or "gpu", values=values),)
        if base == "LDGSTS":
            return (Access("load", "global", self._address(spots[1])), Access("store", "shared", first))
        if base in ("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG") and len(spots) > 1:
            return self._bulk(base, words, first, self._address(spots[1]))
        if base in ("UBLKPF", "UTMAPF") or (base == "CCTL" and any(w.startswith("PF") for w in words)):
            level = "L1" if "PF1" in words else "L2"
            return (Access("prefetch", "tensor" if base == "UTMAPF" else "global", first, order=level),)
        return ()

    @staticmethod
    def _bulk(base: str, words: list[str], first: Address, second: Address) -> tuple[Access, ...]:
        if base == "UTMALDG" or (base == "UBLKCP" and words[1:3] == ["S", "G"]):
            space = "tensor" if base == "UTMALDG" else "global"
            return (Access("load", space, second, proxy="async"), Access("store", "shared", first, proxy="async"))
        if base == "UBLKCP" and words[1:3] == ["S", "S"]:
            return (Access("store", "shared", first, proxy="async"),)
        space, where = ("tensor", second) if base.startswith("UTMA") else ("global", first)
        what = "store" if base in ("UBLKCP", "UTMASTG") else "reduction"
        return (Access(what, space, where, proxy="async"),)


def _split(text: str) -> list[str]:
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    return [o for o in (*out, text[start:]) if o]


def _is_predicate(text: str) -> bool:
    m = _REGISTER.match(text)
    return m is not None and "P" in m.group(2)


def _results(base: str, operands: list[str]) -> tuple[list[str], list[str]]:
    """Split operands into results and sources: predicates around the first register are results."""
    if base in _SETP:
        return operands[:2], operands[2:]
    if base in _ONE_PRED:
        return operands[:1], operands[1:]
    k = 0
    while k < len(operands) and _is_predicate(operands[k]):
        k += 1
    k += 1
    while k < len(operands) and _is_predicate(operands[k]) and base not in ("SEL", "USEL", "FSEL"):
        k += 1
    return operands[:k], operands[k:]


def _result_words(words: list[str]) -> int:
    base = words[0]
    if base in ("HMMA", "IMMA", "QMMA", "OMMA"):
        return 2 if words[2:3] == ["F16"] else 4
    if base == "LDSM":
        return int(words[-1]) if words[-1].isdigit() else 1
    if base == "HGMMA":
        return 64
    if "128" in words:
        return 4
    wide = "WIDE" in words or "64" in words or "F64" in words
    if wide or base in ("DADD", "DMUL", "DFMA") or (base == "CS2R" and "32" not in words):
        return 2
    return 1


def _bytes(words: list[str]) -> int:
    for w, n in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if w in words:
            return n
    return 4


def _strength(words: list[str]) -> tuple[str, str]:
    if "CONSTANT" in words:
        return "nc", ""
    if "STRONG" in words:
        k = words.index("STRONG")
        return "relaxed", _SCOPES.get(words[k + 1] if k + 1 < len(words) else "", "")
    if "MMIO" in words:
        return "mmio", "sys"
    return "weak", ""


def _sync(words: list[str], operands: list[str]) -> Sync:
    base = words[0]
    if base == "ACQBULK":
        return Sync.WAIT
    if base == "PREEXIT":
        return Sync.TRIGGER
    if base == "BAR":
        if "ARV" in words:
            return Sync.BARRIER_ARRIVE
        return Sync.BARRIER if len(operands) < 2 or "RED" in words else Sync.PART_BARRIER
    if base == "UCGABAR_WAIT":
        return Sync.BARRIER
    if base == "UCGABAR_ARV":
        return Sync.BARRIER_ARRIVE
    if base == "SYNCS":
        if "PHASECHK" in words:
            return Sync.MBAR_WAIT
        return Sync.MBAR_ARRIVE if "ARRIVE" in words else Sync.NONE
    return Sync.FENCE_ASYNC if base == "FENCE" and "ASYNC" in words else Sync.NONE


def _semantics(words: list[str], sources: list[str], values: list[Operand | None]) -> tuple[str, tuple[Operand, ...]]:
    """Value semantics of an ALU instruction, in the terms of :mod:`fasttrack.audit.ir`."""
    base, kept = words[0], tuple(v for v in values if v is not None)
    if base in ("S2R", "S2UR", "CS2R"):
        name = sources[0].removeprefix("SR_").split(".")[0].lower() if sources else ""
        kind = {"clocklo": "clock", "clockhi": "clock", "globaltimerlo": "globaltimer", "cgactaid": "cluster_ctaid"}
        return "copy", (Leaf("special", kind.get(name, name)),)
    if base in ("ELECT", "VOTE", "VOTEU"):
        return "other", (*kept, Leaf("special", "laneid")) if base == "ELECT" else kept
    negative = any(s.startswith(("-", "~")) and _REGISTER.match(s) for s in sources)
    if base in ("IADD3", "UIADD3", "VIADD", "UVIADD", "IADD", "UIADD", "IMAD") and "HI" not in words:
        if base == "IMAD":
            return _imad(words, sources, values)
        kept = tuple(v for v in kept if not _predicate(v))
        if negative:
            positive = [
                v for s, v in zip(sources, values, strict=True) if v is not None and not s.startswith(("-", "~"))
            ]
            return "mask", tuple(v for v in positive if not _predicate(v))
        return ("copy" if len(kept) == 1 else "add"), kept
    if base in ("UIMAD",) and "HI" not in words:
        return _imad(words, sources, values)
    if base in ("MOV", "UMOV", "R2UR", "LDC", "LDCU", "ULDC", "UR2R"):
        return "copy", tuple(v for v in kept[:1])
    if base == "SHFL":
        return "copy", kept[:1]
    if base in ("LEA", "ULEA") and "HI" not in words:
        return "lea", kept
    if base in ("SHF", "USHF") and "L" in words and "HI" not in words and len(kept) == 2:
        return "shl", kept
    if base in ("LOP3", "ULOP3"):
        regs = tuple(v for v in values[:3] if v is not None)
        return "mask", tuple(v for v in regs if not isinstance(v, int))
    if base in ("SEL", "USEL", "VIMNMX", "UVIMNMX", "IMNMX"):
        return "select", tuple(v for v in kept if not _predicate(v))
    if base in ("PRMT", "UPRMT"):
        return "pack", kept
    if base in _SETP:
        return "compare", kept
    return "other", kept


def _predicate(v: Operand) -> bool:
    return isinstance(v, str) and v.lstrip("U").startswith("P")


def _imad(words: list[str], sources: list[str], values: list[Operand | None]) -> tuple[str, tuple[Operand, ...]]:
    a, b, c = (*values[:3], None, None, None)[:3]
    zero = [s.endswith(("RZ", "RZ.reuse")) for s in (*sources, "", "", "")[:3]]
    if zero[0] or zero[1]:
        return ("copy", (c,)) if c is not None and not sources[2].startswith("-") else ("other", ())
    if b == 1 and a is not None and c is not None:
        return ("mask", (a,)) if sources[2].startswith("-") else ("add", (a, c))
    if a is None or b is None:
        return "other", tuple(v for v in values if v is not None)
    if c is None:
        return "mul", (a, b)
    if "WIDE" in words and isinstance(c, str):  # the third operand is a pair; its high half matters to slices only
        stem, number = re.fullmatch(r"(\D+)(\d+)", c).groups()  # type: ignore[union-attr]
        return "mad", (a, b, c, f"{stem}{int(number) + 1}")
    return "mad", (a, b, c)
