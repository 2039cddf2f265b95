"""State that nobody owns: every stray write of a step is counted, and an honest step has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrack.target import Engine, EngineSpec, LedgerStep, Request, Sampling, StateWatchingEngine
from kimi_k3 import names
from kimi_k3.faults import wrap
from kimi_k3.target import TARGET

NULL, FREE, PAGE = "null slot", "free slot", "free page"


def build(arm: str = "optimized", draft_length: int = 0) -> Engine:
    switch = names.SWITCH_ON if arm == "optimized" else names.SWITCH_OFF
    return TARGET.engine(
        EngineSpec(
            "embedded",
            arm,
            switch,
            tp=2,
            draft_length=draft_length,
            max_requests=4,
            acceptance="measured" if draft_length else "none",
            options={"drafter": "rehearsal"} if draft_length else {},
            workdir=Path(),
        )
    )


def steps(engine: Engine, *, watched: bool = True) -> list[LedgerStep]:
    """Two requests at once; one that ends early and is followed by a third."""
    sampling = Sampling(ignore_eos=True)
    requests = [
        Request("a", (5, 6, 7), 3, sampling),
        Request("b", tuple(range(20, 38)), 8, sampling),
        Request("c", (9, 8), 3, sampling, arrival_step=4),
    ]
    assert isinstance(engine, StateWatchingEngine)
    engine.watch_state(watched)
    engine.generate(requests, run="run/with/parts")
    found = engine.drain_ledger()
    engine.watch_state(False)
    return found


@pytest.mark.parametrize(("arm", "draft_length"), [("optimized", 0), ("optimized", 3), ("stock", 0), ("stock", 3)])
def test_honest_steps_change_nothing_that_nobody_owns(arm: str, draft_length: int) -> None:
    found = steps(build(arm, draft_length))
    assert {"prefill", "verify" if draft_length else "decode"} <= {step.kind for step in found}
    assert [step.unowned_changed for step in found] == [0] * len(found)


def test_nothing_is_counted_and_nothing_is_wrapped_unless_asked() -> None:
    engine = build()
    assert {step.unowned_changed for step in steps(engine, watched=False)} == {None}
    assert "_forward" not in vars(engine.engine)  # type: ignore[attr-defined]


def write_state(slot: Callable[[torch.Tensor], int]) -> Callable[..., None]:
    def wrapper(real: Any, context: Any, *args: Any) -> None:
        real(context, *args)
        recurrent, slots = args[7], args[8]
        recurrent[slot(slots)] += 1

    return wrapper


def write_page(real: Any, context: Any, *args: Any) -> None:
    real(context, *args)
    args[1][-1, 3] += 1  # the last page: nobody owns it


STRAY: dict[str, tuple[str, Callable[..., None]]] = {
    NULL: ("kda_core", write_state(lambda slots: 0)),
    FREE: ("kda_core", write_state(lambda slots: 4)),
    PAGE: ("mla_core", write_page),
}


@pytest.mark.parametrize("where", STRAY)
def test_stray_writes_are_counted_in_every_specialised_step_and_no_other(where: str) -> None:
    engine = build()
    wrap(engine.engine, *STRAY[where])  # type: ignore[attr-defined]
    found = steps(engine)
    layers = engine.engine.model.config.num_hidden_layers  # type: ignore[attr-defined]
    for step in found:
        assert bool(step.unowned_changed) == (step.path == "specialized"), step
        assert (step.unowned_changed or 0) <= layers


def test_a_request_that_has_ended_owns_nothing_any_more() -> None:
    """A row that goes on writing into the slot it once had: unnoticed by tokens until somebody else has the slot."""
    engine = build()
    wrap(engine.engine, "kda_core", write_state(lambda slots: 1))  # type: ignore[attr-defined]
    found = steps(engine)
    alone = [step for step in found if step.path == "specialized" and 1 not in step.slots]
    together = [step for step in found if step.path == "specialized" and 1 in step.slots]
    assert alone, "request b had a step of its own"
    assert together
    assert all(step.unowned_changed for step in alone)
    assert not any(step.unowned_changed for step in together)
