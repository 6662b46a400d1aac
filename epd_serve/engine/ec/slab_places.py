"""Which part of a slab of device memory holds which feature. Pure: offsets and pins, no bytes.

A slab is a row of places without gaps. Each holds a feature, or is free. Any run of neighbours that nothing keeps can
become room for a new feature, so features that nothing keeps never fragment the slab: it is full only where no run
between kept places is long enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from store.feature import FeatureMeta

_GRANULE = 512  # what torch's device allocators align to: views of any dtype and wide copies stay aligned

Awaited = Callable[[str], bool]


@dataclass(eq=False)
class Place:
    """Part of a slab, changed by the slab alone.

    Attributes:
        key: the feature that is in it, or is being copied to it; "" for none.
        meta: that feature's.
        copying: who has not said yet that it is there: ranks. While there are some, nothing else may be put there.
        held: how many requests run that find it nowhere else.
        promised: requests that have been let through and will read it.
        cached: vLLM's encoder cache has a view of it.
        used: when it was used last, as a count.
    """

    offset: int
    span: int
    key: str = ""
    meta: FeatureMeta | None = None
    copying: set[int] = field(default_factory=set)
    held: int = 0
    promised: set[str] = field(default_factory=set)
    cached: bool = False
    used: int = 0

    def is_kept(self, awaited: Awaited) -> bool:
        """Whether its bytes must stay, or should: its feature is `awaited`."""
        return bool(self.copying or self.held or self.promised or self.cached) or (bool(self.key) and awaited(self.key))


class SlabPlaces:
    """The places of a slab of `capacity` bytes. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._places = [Place(0, capacity)]
        self._named: dict[str, Place] = {}
        self._uses = itertools.count(1)

    def __iter__(self) -> Iterator[Place]:
        """Those that hold features."""
        return iter(self._named.values())

    def find(self, key: str) -> Place | None:
        return self._named.get(key)

    def fits(self, nbytes: int, awaited: Awaited) -> bool:
        """Whether `reserve` would find room now."""
        return self._window(nbytes, awaited) is not None

    def reserve(self, key: str, nbytes: int, awaited: Awaited) -> Place | None:
        """Room for a feature that is nowhere in the slab; None where what is kept leaves no run that is long enough.

        The features that lie there are forgotten: those whose last use was longest ago.
        """
        assert key not in self._named
        window = self._window(nbytes, awaited)
        if window is None:
            return None
        dropped = self._places[window]
        for place in dropped:
            self._named.pop(place.key, None)
        start, span = dropped[0].offset, _span(nbytes)
        left = sum(place.span for place in dropped) - span
        made = Place(start, span, key)
        self._places[window] = [made, Place(start + span, left)] if left else [made]
        self._named[key] = made
        self.use(made)
        return made

    def forget(self, place: Place) -> None:
        """It holds no feature any more."""
        del self._named[place.key]
        place.key, place.used = "", 0

    def use(self, place: Place) -> None:
        """It goes later than those whose last use was before this."""
        place.used = next(self._uses)

    def _window(self, nbytes: int, awaited: Awaited) -> slice | None:
        """Of neighbours that nothing keeps, the run that is long enough and whose newest use is the oldest."""
        span = _span(nbytes)
        kept = [place.is_kept(awaited) for place in self._places]
        best: tuple[int, int] | None = None
        found: slice | None = None
        for start in range(len(self._places)):
            length = newest = 0
            for end in range(start, len(self._places)):
                if kept[end]:
                    break
                length, newest = length + self._places[end].span, max(newest, self._places[end].used)
                if length >= span:
                    if best is None or (newest, length) < best:
                        best, found = (newest, length), slice(start, end + 1)
                    break
        return found


def _span(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE
