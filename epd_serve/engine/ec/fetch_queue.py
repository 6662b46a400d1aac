"""Which features to fetch from the second tier, and when. Pure.

In arrival order, each key once, a bounded number of bytes at one time, and a bounded line. A fetch that nobody wants
any more is dropped before it begins; one that has begun runs to its end, because its memory is being written.
"""

from __future__ import annotations

from collections.abc import Callable


class FetchQueue:
    """Not thread-safe; the owner holds a lock around every call.

    Args:
        max_bytes: how much may be fetched at one time; a larger feature is fetched alone.
        max_waiting: how many may stand in line; further prefetches are refused (they are hints), needs are not.
    """

    def __init__(self, max_bytes: int, max_waiting: int = 256) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[int, bool]] = {}  # key → bytes (0: not announced), needed; in arrival order
        self._running: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._running

    def add(self, key: str, nbytes: int, *, needed: bool) -> bool:
        """False when there is no place in the line. A key that is there keeps its place."""
        if key in self:
            return True
        if not needed and len(self._waiting) >= self._max_waiting:
            return False
        self._waiting[key] = (nbytes, needed)
        return True

    def next(self, wanted: Callable[[str, bool], bool]) -> str | None:
        """The next key to fetch, begun from now on; None when there is none, or no room for it beside the others.

        Args:
            wanted: of a key and whether a request needed it when it was added (else it is a prefetch).
        """
        while self._waiting:
            key, (nbytes, needed) = next(iter(self._waiting.items()))
            if not wanted(key, needed):
                del self._waiting[key]
                continue
            if self._running and sum(self._running.values()) + nbytes > self._max_bytes:
                return None
            del self._waiting[key]
            self._running[key] = nbytes
            return key
        return None

    def done(self, key: str) -> None:
        del self._running[key]
