"""Fetches features from the second tier in a few threads, so that none of them holds up another, nor the listener.

Owns the threads; what is fetched next is `FetchQueue`'s decision, what a result means the listener's. Each fetch is
announced on the instance's traffic board: KV packets that can wait leave the network to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from epd_serve.engine.traffic import TrafficBoard
from store.arena import Lease
from store.errors import CorruptFeatureError, StoreError, StoreFullError


class FetchQueue:
    """Which features to fetch, and when. Pure; not thread-safe: the owner holds a lock around every call.

    In arrival order, each key once, a bounded number of bytes at one time, and a bounded line. A fetch that nobody
    wants any more is dropped before it begins; one that has begun runs to its end: its memory is being written.

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


logger = logging.getLogger(__name__)

_ANNOUNCED_S = 2.0  # a fetch that takes longer is in trouble, and moves nothing


@dataclass(frozen=True)
class Fetched:
    """How a fetch ended: the feature, held, or `why` there is none (`missing`, `no_room`, `corrupt`, `unavailable`)."""

    key: str
    held: Lease | None
    why: str = ""


class Fetcher:
    """Args:
    fetch: blocks until the feature is here, verified and held, at most its own deadline.
    wanted: asked with the key and `needed` before a fetch begins; any thread.
    ended: called from the fetching thread; owns what is held.
    traffic: where fetches are announced.
    """

    def __init__(
        self,
        fetch: Callable[[str], Lease | None],
        wanted: Callable[[str, bool], bool],
        ended: Callable[[Fetched], None],
        *,
        max_bytes: int,
        traffic: TrafficBoard,
        threads: int = 3,
    ) -> None:
        self._fetch, self._wanted, self._ended = fetch, wanted, ended
        self._traffic = traffic
        self._queue = FetchQueue(max_bytes)
        self._turn = threading.Condition()  # guards _queue and _closing
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"epd-feature-fetch-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: str, nbytes: int, *, needed: bool) -> bool:
        """Fetch this when its turn comes. False: the line is full, or it stands there already."""
        with self._turn:
            if key in self._queue or not self._queue.add(key, nbytes, needed=needed):
                return False
            self._turn.notify()
        return True

    def busy_with(self, key: str) -> bool:
        with self._turn:
            return key in self._queue

    def close(self, timeout_s: float = 5.0) -> None:
        """Fetches that have begun end at their own deadline."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join(timeout=timeout_s)

    def _run(self) -> None:
        while (key := self._next()) is not None:
            result = self._fetched(key)
            with self._turn:
                self._queue.done(key)
                self._turn.notify_all()  # its bytes are free for the next
            self._ended(result)

    def _next(self) -> str | None:
        with self._turn:
            while not self._closing:
                if (key := self._queue.next(self._wanted)) is not None:
                    return key
                self._turn.wait(timeout=1.0)
        return None

    def _fetched(self, key: str) -> Fetched:
        try:
            with self._traffic.announce("fetch", _ANNOUNCED_S):
                held = self._fetch(key)
        except StoreFullError:
            return Fetched(key, None, "no_room")
        except CorruptFeatureError as error:
            logger.error("second tier: %s", error)
            return Fetched(key, None, "corrupt")
        except StoreError as error:
            logger.warning("second tier, feature %s: %s", key, error)
            return Fetched(key, None, "unavailable")
        except Exception:  # a fetching thread that dies would leave its key in flight for ever
            logger.exception("second tier, feature %s", key)
            return Fetched(key, None, "unavailable")
        return Fetched(key, held, "" if held is not None else "missing")
