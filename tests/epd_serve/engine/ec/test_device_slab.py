"""The book of a slab: places never overlap, pins hold, unpinned features never stand in the way."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.engine.ec.device_slab import Place, SlabBook

KIB = 1 << 10
CAPACITY = 64 * KIB


class Book(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = SlabBook(CAPACITY, watermark=0.9)
        self.pinned: list[Place] = []
        self.names = 0

    def longest_run_between_pins(self) -> int:
        ends = [(0, 0), *sorted((place.offset, place.offset + place.span) for place in self.pinned), (CAPACITY, 0)]
        return max(after[0] - before[1] for before, after in itertools.pairwise(ends))

    @rule(nbytes=st.integers(1, CAPACITY))
    def reserve(self, nbytes: int) -> None:
        room = self.longest_run_between_pins()
        place = self.book.reserve(nbytes)
        assert (place is not None) == (-(-nbytes // 512) * 512 <= room), "only pins may be in the way"
        if place is not None:
            self.pinned.append(place)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), keep=st.booleans())
    def unpin(self, data: st.DataObject, keep: bool) -> None:
        place = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        if keep and not place.key:
            self.names += 1
            self.book.name(place, f"k{self.names}")
        self.book.unpin(place)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.pinned))
        self.book.shrink(place, data.draw(st.integers(1, place.nbytes)))

    @rule(number=st.integers(1, 50))
    def pin_again(self, number: int) -> None:
        place = self.book.find(f"k{number}")
        if place is not None and place not in self.pinned:
            self.book.pin(place)
            self.pinned.append(place)

    @rule(number=st.integers(1, 50))
    def forget(self, number: int) -> None:
        self.book.forget(f"k{number}")
        assert self.book.find(f"k{number}") is None

    @invariant()
    def places_are_apart_and_inside(self) -> None:
        places = self.book._places
        for before, after in itertools.pairwise(places):
            assert before.offset + before.span <= after.offset
        assert not places or places[-1].offset + places[-1].span <= CAPACITY
        assert all(place in places for place in self.pinned)
        assert self.book.used_bytes == sum(place.span for place in places) <= CAPACITY
        assert self.book.pinned_bytes == sum(place.span for place in self.pinned)


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBook = Book.TestCase


def idle(book: SlabBook, key: str, nbytes: int) -> Place:
    place = book.reserve(nbytes)
    assert place is not None
    book.name(place, key)
    book.unpin(place)
    return place


def test_the_least_recently_used_go_first() -> None:
    book = SlabBook(4 * KIB, watermark=1.0)
    for key in "abcd":
        idle(book, key, KIB)
    first = book.find("a")
    assert first is not None
    book.pin(first)
    book.unpin(first)  # used again: "b" is the oldest now
    assert book.reserve(KIB) is not None
    assert [key for key in "abcd" if book.find(key)] == ["a", "c", "d"]


def test_beyond_the_watermark_old_features_go_before_room_is_asked_for() -> None:
    book = SlabBook(10 * KIB, watermark=0.5)
    for key in "abcdefgh":
        idle(book, key, KIB)
    assert book.used_bytes == 5 * KIB and [key for key in "abcdefgh" if book.find(key)] == list("defgh")


@given(st.lists(st.integers(1, 4 * KIB), min_size=50, max_size=80), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_a_slab_full_of_features_of_all_sizes_still_takes_the_largest(sizes: list[int], random: object) -> None:
    book = SlabBook(CAPACITY, watermark=1.0)
    for index, nbytes in enumerate(sizes):
        idle(book, f"k{index}", nbytes)
    assert book.reserve(CAPACITY) is not None
