"""One inline-PTX statement in CuTe DSL: what every device-side helper is made of."""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from typing import Any

from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_ATT = llvm.AsmDialect.AD_ATT


def asm(result: Any, operands: list[Any], code: str, constraints: str, effects: bool, loc: Any, ip: Any) -> Any:
    """One inline-PTX statement; ``effects`` adds a memory clobber and pins its order."""
    if effects:
        constraints += ",~{memory}" if constraints else "~{memory}"
    return llvm.inline_asm(
        result,
        operands,
        code,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=_ATT,
        loc=loc,
        ip=ip,
    )


def words(value: Any, n: int, loc: Any, ip: Any) -> list[Uint32]:
    return [Uint32(llvm.extractvalue(T.i32(), value, [i], loc=loc, ip=ip)) for i in range(n)]


def struct(element: Any, n: int) -> Any:
    return llvm.StructType.get_literal([element] * n)
