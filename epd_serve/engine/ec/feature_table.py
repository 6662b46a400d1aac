"""What a consumer (P, PD, D) knows of the features its requests need. Pure state, no sockets, no store, no vLLM.

One item per key, one transition table:

    (unknown) --need--> WANTED --arrived--> READY --last request released--> (unknown)
    (unknown) --prefetched--> READY (nobody needs it yet; dropped after `hold_s`)
    (unknown) --failed--> remembered for the next request, which is LOST at once
    WANTED --failed | deadline--> LOST --last request released--> (unknown)

READY means: the bytes were verified and are pinned (design §4.4, must). LOST is final for the requests that saw it:
a decision once made is not changed under a running request, it recomputes locally.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Pin(Protocol):
    """A verified feature that stays where it is until released (`store.arena.Lease` is one)."""

    @property
    def nbytes(self) -> int: ...

    def release(self) -> None: ...


class FeatureState(enum.Enum):
    WANTED = "wanted"
    READY = "ready"
    LOST = "lost"


PinT = TypeVar("PinT", bound=Pin)
_MAX_FAILED = 1024


@dataclass
class _Item(Generic[PinT]):
    state: FeatureState
    deadline: float  # WANTED: when to give up. READY without requests: when to let go.
    pin: PinT | None = None
    requests: set[str] = field(default_factory=set)


class FeatureTable(Generic[PinT]):
    """Not thread-safe; the owner holds one lock around every call.

    Args:
        wait_s: how long a wanted feature may take before the request recomputes it.
        hold_s: how long a prefetched feature that nobody asked for stays pinned.
        max_prefetched_bytes: bound on such features, because pinned bytes cannot be evicted from the store; the oldest
            is let go. 0: nothing is prefetched.
    """

    def __init__(self, *, wait_s: float, max_prefetched_bytes: int, hold_s: float = 10.0) -> None:
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._max_prefetched_bytes = max_prefetched_bytes
        self._prefetched_bytes = 0
        self._items: dict[str, _Item[PinT]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # READY without requests, oldest first
        self._keys_of: dict[str, set[str]] = {}
        self._failed: OrderedDict[str, str] = OrderedDict()  # before any request asked: key → cause, oldest first
        self.lost_by_cause: Counter[str] = Counter()

    def need(self, request: str, key: str, now: float) -> FeatureState:
        """A request needs this feature. The first call makes the item WANTED; later calls report what became of it."""
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(FeatureState.WANTED, now + self._wait_s)
            if (cause := self._failed.pop(key, None)) is not None:  # the encoder answers before its request gets here
                self._lose(item, cause)
        if request not in item.requests:
            item.requests.add(request)
            self._keys_of.setdefault(request, set()).add(key)
            self._no_longer_idle(key, item)
        if item.state is FeatureState.WANTED and now >= item.deadline:
            self._lose(item, "deadline")
        return item.state

    def pinned(self, key: str) -> PinT | None:
        """The pin of a READY feature that a request needs, else None: a mere prefetch may be let go at any time."""
        item = self._items.get(key)
        return item.pin if item is not None and item.requests else None

    def wanted(self) -> list[str]:
        """Keys to look up in the store, oldest first."""
        return [key for key, item in self._items.items() if item.state is FeatureState.WANTED]

    def accepts(self, key: str) -> bool:
        """Whether an announced feature is worth fetching: wanted, or new and therefore a prefetch."""
        self._failed.pop(key, None)
        item = self._items.get(key)
        return item.state is FeatureState.WANTED if item is not None else self._max_prefetched_bytes > 0

    def arrived(self, key: str, pin: PinT, now: float) -> None:
        """The feature was fetched, verified and pinned. Owns `pin` from here on."""
        self._failed.pop(key, None)
        item = self._items.get(key)
        if item is None:
            self._items[key] = _Item(FeatureState.READY, now + self._hold_s, pin)
            self._idle[key] = None
            self._prefetched_bytes += pin.nbytes
            while self._prefetched_bytes > self._max_prefetched_bytes:
                self._drop(next(iter(self._idle)))
        elif item.state is FeatureState.WANTED:
            item.state, item.pin = FeatureState.READY, pin
        else:
            pin.release()

    def failed(self, key: str, cause: str) -> None:
        """The feature will not come: those who wait recompute, or else the next request that asks."""
        item = self._items.get(key)
        if item is None:
            self._failed[key] = cause
            if len(self._failed) > _MAX_FAILED:
                self._failed.popitem(last=False)
        elif item.state is FeatureState.WANTED:
            self._lose(item, cause)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished: what only they needed is unpinned."""
        for request in requests:
            for key in self._keys_of.pop(request, ()):
                item = self._items[key]
                item.requests.discard(request)
                if not item.requests:
                    self._drop(key)

    def expire(self, now: float) -> None:
        """Let go of prefetched features that nobody asked for in time."""
        while self._idle and self._items[next(iter(self._idle))].deadline <= now:
            self._drop(next(iter(self._idle)))

    def close(self) -> None:
        """Unpin everything."""
        for key in list(self._items):
            self._drop(key)
        self._keys_of.clear()

    def _lose(self, item: _Item[PinT], cause: str) -> None:
        item.state = FeatureState.LOST
        self.lost_by_cause[cause] += 1

    def _no_longer_idle(self, key: str, item: _Item[PinT]) -> None:
        if key in self._idle:
            del self._idle[key]
            assert item.pin is not None
            self._prefetched_bytes -= item.pin.nbytes

    def _drop(self, key: str) -> None:
        item = self._items.pop(key)
        self._no_longer_idle(key, item)
        if item.pin is not None:
            item.pin.release()
