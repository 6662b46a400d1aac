"""Who uses which part of a slab of device memory: the book that features in it are placed by. Nothing uses it yet.

`SlabBook` is pure: offsets, pins, names, least recent use. A feature that nobody pins may lie anywhere between pinned
ones, and any run of unpinned bytes can become room for a new feature; so unpinned features never fragment the slab,
and `reserve` fails only when no run between pins is long enough. Beyond the watermark the least recently used are
dropped in advance, so that most reservations find a gap at once. A place whose transfer is not known to have ended
stays pinned: that is the quarantine.
"""

from __future__ import annotations

import bisect
import operator
from collections import OrderedDict
from dataclasses import dataclass, field

_GRANULE = 512  # what torch's device allocators align to: views of any dtype and wide copies stay aligned


@dataclass(eq=False)
class Place:
    """Part of a slab. `pins` > 0: in use, or a transfer may still touch it. Changed by its book alone."""

    offset: int
    span: int
    nbytes: int
    key: str = ""
    pins: int = 1
    used: int = 0


@dataclass
class SlabBook:
    """Places of a slab of `capacity` bytes. Not thread-safe."""

    capacity: int
    watermark: float = 0.9
    evictions: int = 0
    _places: list[Place] = field(default_factory=list)  # by offset
    _named: dict[str, Place] = field(default_factory=dict)
    _idle: OrderedDict[int, Place] = field(default_factory=OrderedDict)  # by offset; least recently used first
    _used_bytes: int = 0
    _clock: int = 0

    def reserve(self, nbytes: int) -> Place | None:
        """Room for `nbytes`, pinned once and nameless; None when pins leave no run that is long enough."""
        span = _span(nbytes)
        found = self._gap(span) or self._window(span)
        if found is None:
            return None
        offset, dropped = found
        for place in dropped:
            self.evictions += 1
            self._remove(place)
        place = Place(offset, span, nbytes)
        bisect.insort(self._places, place, key=_offset)
        self._used_bytes += span
        return place

    def shrink(self, place: Place, nbytes: int) -> None:
        """It needs no more than `nbytes`; the rest is free again, and nobody writes there any more."""
        span = _span(nbytes)
        assert place.pins and span <= place.span
        self._used_bytes -= place.span - span
        place.span, place.nbytes = span, nbytes

    def name(self, place: Place, key: str) -> None:
        """The place holds this feature, whole and verified: from now on it is found by its key."""
        assert place.pins and key not in self._named
        place.key = key
        self._named[key] = place

    def find(self, key: str) -> Place | None:
        return self._named.get(key)

    def pin(self, place: Place) -> None:
        place.pins += 1
        self._idle.pop(place.offset, None)

    def unpin(self, place: Place) -> None:
        """The last pin of a nameless place frees it; a named one stays until its room is needed."""
        assert place.pins, "every unpin has its pin"
        place.pins -= 1
        if place.pins:
            return
        if not place.key:
            self._remove(place)
            return
        self._clock += 1
        place.used = self._clock
        self._idle[place.offset] = place
        while self._used_bytes > self.watermark * self.capacity and self._idle:
            self.evictions += 1
            self._remove(next(iter(self._idle.values())))

    def forget(self, key: str) -> None:
        """The feature is not found any more; its place goes with its last pin."""
        place = self._named.pop(key, None)
        if place is not None:
            place.key = ""
            if not place.pins:
                self._remove(place)

    @property
    def named(self) -> int:
        """How many features are found by key."""
        return len(self._named)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._used_bytes - sum(place.span for place in self._idle.values())

    def _remove(self, place: Place) -> None:
        self._idle.pop(place.offset, None)
        if place.key:
            del self._named[place.key]
        del self._places[bisect.bisect_left(self._places, place.offset, key=_offset)]
        self._used_bytes -= place.span

    def _gap(self, span: int) -> tuple[int, list[Place]] | None:
        """The smallest free gap that fits."""
        best: tuple[int, int] | None = None
        end = 0
        for offset, after in [
            *((place.offset, place.offset + place.span) for place in self._places),
            (self.capacity, 0),
        ]:
            size = offset - end
            if size >= span and (best is None or size < best[0]):
                best = size, end
            end = after
        return (best[1], []) if best is not None else None

    def _window(self, span: int) -> tuple[int, list[Place]] | None:
        """The run of neighbours without pins whose most recently used one is the oldest."""
        best: tuple[int, int, list[Place]] | None = None
        window: list[Place] = []
        start = 0
        for index, place in enumerate(self._places):
            if place.pins:
                window, start = [], place.offset + place.span
                continue
            window.append(place)
            end = self._places[index + 1].offset if index + 1 < len(self._places) else self.capacity
            while end - (window[0].offset + window[0].span) >= span:  # long enough without its first
                first = window.pop(0)
                start = first.offset + first.span
            if end - start >= span:
                newest = max(member.used for member in window)
                if best is None or newest < best[0]:
                    best = newest, start, list(window)
        return (best[1], best[2]) if best is not None else None


def _span(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _GRANULE) * _GRANULE


_offset = operator.attrgetter("offset")
