"""Circular lists threaded through the slot table, and the search for room among them. Callers hold the arena's lock."""

from __future__ import annotations

from collections.abc import Iterable

from store.arena.layout import (
    H_ROVER,
    H_USED,
    H_WIDEST,
    S_OFFSET,
    S_PLACE_NEXT,
    S_PLACE_PREV,
    S_SPAN,
    SLOT_WORDS,
    Geometry,
)


class Ring:
    """Doubly linked; slot 0 is its head and in no list itself."""

    def __init__(self, words: memoryview, geometry: Geometry, prev_word: int, next_word: int) -> None:
        self._words = words
        self._prev = geometry.slots_word + prev_word
        self._next = geometry.slots_word + next_word

    def first(self) -> int:
        """The first slot, or 0."""
        return int(self._words[self._next])

    def before(self, slot: int) -> int:
        return int(self._words[self._prev + slot * SLOT_WORDS])

    def after(self, slot: int) -> int:
        return int(self._words[self._next + slot * SLOT_WORDS])

    def insert(self, slot: int, before: int) -> None:
        """Puts `slot` right after `before` (0: first)."""
        words, at = self._words, slot * SLOT_WORDS
        after = words[self._next + before * SLOT_WORDS]
        words[self._prev + at] = before
        words[self._next + at] = after
        words[self._next + before * SLOT_WORDS] = slot
        words[self._prev + after * SLOT_WORDS] = slot

    def append(self, slot: int) -> None:
        self.insert(slot, self._words[self._prev])

    def take_out(self, slot: int) -> None:
        words, at = self._words, slot * SLOT_WORDS
        before, after = words[self._prev + at], words[self._next + at]
        words[self._next + before * SLOT_WORDS] = after
        words[self._prev + after * SLOT_WORDS] = before

    def rebuild(self, slots: Iterable[int]) -> None:
        self._words[self._prev] = self._words[self._next] = 0
        for slot in slots:
            self.append(slot)


class Space:
    """The data region: taken spans in order of offset, gaps in between. Next fit, so that filling costs no search."""

    def __init__(self, words: memoryview, geometry: Geometry) -> None:
        self._words = words
        self._slots_word = geometry.slots_word
        self._capacity = geometry.capacity_bytes
        self._ring = Ring(words, geometry, S_PLACE_PREV, S_PLACE_NEXT)

    def find(self, span: int) -> int | None:
        """A slot (0: the start) with a gap of at least `span` bytes behind it, or None."""
        words = self._words
        if span > words[H_WIDEST]:
            return None
        start = slot = int(words[H_ROVER])
        widest = 0
        while True:
            gap = self.gap_after(slot)
            if gap >= span:
                return slot
            widest = max(widest, gap)
            slot = self._ring.after(slot)
            if slot == start:
                words[H_WIDEST] = widest
                return None

    def gap_after(self, slot: int) -> int:
        """Free bytes between the end of `slot` and the next one."""
        words, table = self._words, self._slots_word
        after = self._ring.after(slot)
        end = words[table + after * SLOT_WORDS + S_OFFSET] if after else self._capacity
        at = table + slot * SLOT_WORDS
        return int(end - words[at + S_OFFSET] - words[at + S_SPAN])

    def take(self, slot: int, before: int, span: int) -> None:
        """Gives `slot` the first `span` bytes of the gap behind `before`, and offers the rest."""
        words = self._words
        place = self._slots_word + before * SLOT_WORDS
        at = self._slots_word + slot * SLOT_WORDS
        words[at + S_OFFSET] = words[place + S_OFFSET] + words[place + S_SPAN]
        words[at + S_SPAN] = span
        self._ring.insert(slot, before)
        words[H_ROVER] = slot
        words[H_USED] += span
        self.offer(slot)

    def give_back(self, slot: int) -> int:
        """Frees the span of `slot`; returns the slot before the gap, which the caller takes at once or offers."""
        words = self._words
        before = self._ring.before(slot)
        self._ring.take_out(slot)
        words[H_USED] -= words[self._slots_word + slot * SLOT_WORDS + S_SPAN]
        if words[H_ROVER] == slot:
            words[H_ROVER] = before
        return before

    def offer(self, slot: int) -> None:
        """Lets searches find the gap behind `slot`. A gap that was never offered costs no later search in vain."""
        gap = self.gap_after(slot)
        if gap > self._words[H_WIDEST]:
            self._words[H_WIDEST] = gap

    def rebuild(self, slots: list[int]) -> None:
        """From the offsets and spans of the given slots."""
        words, table = self._words, self._slots_word
        words[table + S_OFFSET] = words[table + S_SPAN] = 0
        self._ring.rebuild(sorted(slots, key=lambda slot: int(words[table + slot * SLOT_WORDS + S_OFFSET])))
        words[H_ROVER] = self._ring.before(0)
        words[H_WIDEST] = self._capacity
        words[H_USED] = sum(words[table + slot * SLOT_WORDS + S_SPAN] for slot in slots)
