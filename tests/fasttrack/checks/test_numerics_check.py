"""Comparison with an oracle, element by element, and faulty ops seen through the whole check."""

from dataclasses import replace

import pytest
import torch
from fake_target import TARGET
from harness import run_units, toy_scope

from fasttrack.checks.numerics import compare
from fasttrack.gates import GATES
from fasttrack.gates.numerics import FAMILIES

INF, NAN = float("inf"), float("nan")


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "exact", "bound", "worst", "failing", "nans"),
    [
        (t(1.0, 2.0), t(1.0, 2.5), t(0.1, 1.0), 0.5, 0, 0),
        (t(1.0, 2.0), t(1.2, 2.5), t(0.1, 1.0), 2.0, 1, 0),
        (t(1.0), t(1.0), t(0.0), 0.0, 0, 0),  # a zero bound is met by equality
        (t(1.0), t(1.0 + 1e-15), t(0.0), INF, 1, 0),  # and by nothing else
        (t(NAN), t(1.0), t(9.0), INF, 1, 1),
        (t(INF), t(1.0), t(9.0), INF, 1, 0),
        (t(INF, NAN), t(INF, NAN), t(0.0, 0.0), 0.0, 0, 0),
        (t(1.0), t(INF), t(9.0), INF, 1, 0),
        (t(1.0), t(1.5), t(NAN), INF, 1, 0),  # a bound that is no number bounds nothing
    ],
)
def test_compare(given, exact, bound, worst, failing, nans):
    found = compare(given, exact, bound)
    assert found["worst"] == pytest.approx(worst)
    assert (found["failing"], found["nan_outputs"]) == (failing, nans)


def test_compare_refuses_other_shapes():
    with pytest.raises(ValueError, match="shape"):
        compare(t(1.0), t(1.0, 1.0), t(1.0))


def faulty(**changes):
    """The toy target whose head op is served by something else."""

    class Faulty:
        def __getattr__(self, name):
            return getattr(TARGET, name)

        def numerics_cases(self, tier, options):
            for case in TARGET.numerics_cases(tier, options):
                run = changes.get(case.op)
                yield replace(case, run=lambda i, p, c=case, r=run: r(c, i, p)) if run else case

    return Faulty()


def last_row_forgotten(case, inputs, poison):
    outputs = case.run(inputs, poison)
    outputs["logits"][-1] = poison
    return outputs


def scratch_read(case, inputs, poison):
    outputs = case.run(inputs, poison)
    outputs["logits"][0, 0] += 0.0 if poison != poison else 1e-30
    outputs["logits"][0, 0] = (
        outputs["logits"][0, 0] if poison != poison else torch.nextafter(outputs["logits"][0, 0], torch.tensor(INF))
    )
    return outputs


def one_rank_dropped(case, inputs, poison):
    return case.run({**inputs, "hidden": inputs["hidden"].clone().index_fill_(1, torch.arange(32), 0.0)}, poison)


def padding_written(case, inputs, poison):
    outputs = case.run(inputs, poison)
    outputs["padding"][0, 0] = 1.0
    return outputs


@pytest.mark.parametrize(
    ("op", "fault", "gate"),
    [
        ("toy::head", last_row_forgotten, "numerics.poison"),
        ("toy::head", scratch_read, "numerics.poison"),
        ("toy::head", one_rank_dropped, "numerics.error"),
        ("toy::update", padding_written, "numerics.poison"),
    ],
)
def test_a_faulty_op_fails_its_gate(op, fault, gate, tmp_path):
    scope = toy_scope()
    records = run_units(scope, tmp_path, check="numerics", target=faulty(**{op: fault}))
    assert {r.family for r in records} == set(FAMILIES)
    result = GATES[gate](scope, records)
    assert result.verdict == "fail"
    assert op in result.reason
