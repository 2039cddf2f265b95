"""Allocators hand out what is free, once, and get everything back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_k3.reference.cache import NULL_SLOT, PageAllocator, SlotAllocator


class PagesAgainstCounts(RuleBasedStateMachine):
    """The allocator next to a plain dictionary of reference counts."""

    pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.pages, page_size=4)
        self.owners: list[list[int]] = []

    def counts(self) -> dict[int, int]:
        flat = [page for owner in self.owners for page in owner]
        return {page: flat.count(page) for page in flat}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        before = self.counts()
        got = self.allocator.allocate(count)
        if count > self.pages - len(before):
            assert got is None
        else:
            assert got is not None
            assert len(set(got)) == count
            assert not set(got) & set(before)
            self.owners.append(got)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.owners))
        self.allocator.share(prefix)
        self.owners.append(list(prefix))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.allocator.release(owner)

    @invariant()
    def accounts_agree(self) -> None:
        counts = self.counts()
        assert self.allocator.free == self.pages - len(counts)
        assert [self.allocator.references(p) for p in range(self.pages)] == [
            counts.get(p, 0) for p in range(self.pages)
        ]


PagesAgainstCounts.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPages = PagesAgainstCounts.TestCase


def test_a_free_page_can_be_neither_shared_nor_freed_again() -> None:
    allocator = PageAllocator(2, 4)
    (page,) = allocator.allocate(1) or []
    allocator.release([page])
    with pytest.raises(ValueError, match="already free"):
        allocator.release([page])
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share([page])


def test_pages_for_rounds_up() -> None:
    allocator = PageAllocator(2, 4)
    assert [allocator.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_slots_are_disjoint_never_null_and_all_come_back() -> None:
    allocator = SlotAllocator(requests=3, draft_length=7)
    taken = [allocator.allocate() for _ in range(3)]
    flat = [slot for slots in taken for slot in slots or []]
    assert len(flat) == len(set(flat)) == 24
    assert NULL_SLOT not in flat
    assert max(flat) < allocator.slots == 25
    assert allocator.allocate() is None
    allocator.release(taken[1] or [])
    assert allocator.free == 1
    assert allocator.allocate() == taken[1]
    with pytest.raises(ValueError, match="not allocated"):
        allocator.release([NULL_SLOT])
