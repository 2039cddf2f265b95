"""Every planted synchronisation fault is found, with the right rule and parameter; the kernel without it is clean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from audit_contracts import CONTRACTS
from audit_kernels import FAULTS, KERNELS, Fault

from fasttrack.audit.findings import Finding
from fasttrack.audit.run import audit_units
from fasttrack.audit.unit import Unit
from fasttrack.target import KernelContract, KernelParameter


def audit(ptx: str, contract: KernelContract, schedule: tuple[KernelContract, ...] = ()) -> list[Finding]:
    units = [Unit(contract.kernel, "sm_90a", ptx, None, contract=contract)]
    schedules = {"layer": tuple(c.kernel for c in schedule)} if schedule else {}
    report, problems = audit_units(units, schedules, {c.kernel: c for c in (contract, *schedule)}, jobs=1)
    assert not problems
    return [f for f in report.findings if f.severity != "note"]


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_without_fault_is_clean(name: str) -> None:
    assert audit(KERNELS[name], CONTRACTS[name]) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault_is_found(fault: Fault) -> None:
    found = audit(fault.bad, CONTRACTS[fault.good])
    assert (fault.rule, fault.parameter) in {(f.rule, f.parameter) for f in found}
    assert all(f.line > 0 and f.message for f in found)


def test_trigger_before_the_input_of_a_dependent_is_written() -> None:
    """The dependent reads y before its wait; the producer launches it, then stores y."""
    producer = CONTRACTS["scale"]
    reader = KernelContract(
        "reader", (KernelParameter("y", "activation", early=True, reason="thought to be complete"),)
    )
    found = audit(KERNELS["scale"], producer, (producer, reader))
    rules = {(f.rule, f.kernel, f.parameter) for f in found}
    assert ("store-after-trigger", "scale", "y") in rules
    assert ("exposed-dependent", "reader", "y") in rules
    store = next(f for f in found if f.rule == "store-after-trigger")
    assert store.instruction.startswith("st.global.f32")
    patient = replace(reader, parameters=(KernelParameter("y", "activation"),))
    assert audit(KERNELS["scale"], producer, (producer, patient)) == []


def test_early_trigger_exposes_the_kernel_after_the_next() -> None:
    """N+2: the middle kernel launches its dependent before its own wait, so the dependent's early read is not safe."""
    first = KernelContract("first", (KernelParameter("prefix", "output"),))
    middle = KernelContract("scale", CONTRACTS["scale"].parameters)
    last = KernelContract("last", (KernelParameter("prefix", "activation", early=True, reason="two kernels back"),))
    ptx = KERNELS["scale"]
    assert audit(ptx, middle, (first, middle, last)) == []
    eager = replace(middle, trigger="entry")
    found = [f for f in audit(ptx, eager, (first, eager, last)) if f.rule == "exposed-dependent"]
    assert [(f.kernel, f.parameter) for f in found] == [("last", "prefix")]
    assert "scale" in found[0].message
    assert "trigger before their own wait" in found[0].message
