"""What a consumer (P, PD, D) knows of the features its requests need. Pure state, no sockets, no store, no vLLM.

One item per key, one transition table:

    state      what happens                           becomes
    (unknown)  need                                   WANTED    deadline: wait_s from now
    (unknown)  need, and a failure is remembered      DOUBTED
    (unknown)  arrived                                READY     a prefetch: let go after hold_s, or for newer ones
    WANTED     renewed                                WANTED    deadline: wait_s from now, renew_limit_s at most in all
    WANTED     arrived                                READY
    WANTED     failed, deadline                       DOUBTED   the store is asked once more: its index is the truth
    DOUBTED    renewed                                WANTED    some encoder has it after all
    DOUBTED    arrived                                READY
    DOUBTED    not found, last_look_s over            LOST
    LOST       arrived, renewed                       READY, WANTED   while a request has not decided to recompute
    LOST       need of another request                DOUBTED   for that one; those who know it as LOST still do
    READY      parked                                 WANTED    unpinned, and not looked for until PARK_S are over
    any        last request released                  (unknown)

READY means: the bytes were verified and are pinned, always. LOST is final for a request when it *decides*
(`decide`): until then it waits for a recompute slot, and a feature that comes late is used. A decided request is never
held up again, whatever becomes of the item.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from epd_serve.engine.ec.feature_item import UNSETTLED, FeatureState, Item
from store.arena import Lease

PARK_S = 1.5
"""How long parked features are left alone; longer than the time between two reports of an encoder without room."""
_MAX_FAILED = 1024


class FeatureTable:
    """Not thread-safe; the owner holds one lock around every call. Times are monotonic seconds.

    Args:
        wait_s: how long a wanted feature may take, from its first need or its last renewal.
        max_prefetched_bytes: bound on features nobody asked for yet, because pinned bytes cannot be evicted from the
            store; the oldest is let go. 0: nothing is prefetched.
        hold_s: how long such a feature stays pinned.
        renew_limit_s: how long an encoder can keep a feature wanted by renewals: it may be stuck, not slow.
        last_look_s: how long the store may take to say that a doubted feature is not there.
    """

    def __init__(
        self,
        *,
        wait_s: float,
        max_prefetched_bytes: int,
        hold_s: float = 10.0,
        renew_limit_s: float = 120.0,
        last_look_s: float = 3.0,
    ) -> None:
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._renew_limit_s = renew_limit_s
        self._last_look_s = last_look_s
        self._max_prefetched_bytes = max_prefetched_bytes
        self._prefetched_bytes = 0
        self._items: dict[str, Item] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # READY without requests, oldest first
        self._keys_of: dict[str, set[str]] = {}
        self._parked: set[str] = set()
        self._parked_until = float("-inf")
        self._failed: OrderedDict[str, str] = OrderedDict()  # before any request asked: key → cause, oldest first
        self.lost_by_cause: Counter[str] = Counter()
        self.doubts = 0  # features that became DOUBTED so far: somebody has to look them up

    # --- what requests need -----------------------------------------------------------------------------------------

    def need(self, request: str, key: str, now: float) -> FeatureState:
        """A request needs this feature: what became of it, as far as this request is concerned."""
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = Item(FeatureState.WANTED, now, now + self._wait_s)
            if (cause := self._failed.pop(key, None)) is not None:  # the encoder answers before its request gets here
                self._doubt(item, cause, now)
        if request not in item.requests:
            item.requests.add(request)
            self._keys_of.setdefault(request, set()).add(key)
            self._no_longer_idle(key, item)
            if item.state is FeatureState.LOST:
                self._doubt(item, item.cause, now)
        if request in item.decided and item.state is not FeatureState.READY:
            return FeatureState.LOST
        if item.state in UNSETTLED and now >= item.deadline:
            if item.state is FeatureState.WANTED:
                self._doubt(item, item.cause, now)
            else:
                self._lose(item)
        if item.state is FeatureState.LOST:
            item.told.add(request)
        elif item.state is FeatureState.DOUBTED and request in item.told:  # looked up for another request
            return FeatureState.LOST
        return item.state

    def decide(self, request: str, keys: Iterable[str]) -> None:
        """The request recomputes these lost features: nothing that happens to them holds it up again."""
        for key in keys:
            assert request in self._items[key].told
            self._items[key].decided.add(request)

    def undecide(self, request: str) -> None:
        """The request has recomputed what it had to, or need not any more."""
        for key in self._keys_of.get(request, ()):
            self._items[key].decided.discard(request)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished: what only they needed is unpinned."""
        for request in requests:
            for key in self._keys_of.pop(request, ()):
                self._leaves(request, key)

    def forgo(self, request: str) -> None:
        """The request does without what is not here: nobody looks for it on its behalf. It may ask anew."""
        for key in [key for key in self._keys_of.get(request, ()) if self._items[key].pin is None]:
            self._keys_of[request].discard(key)
            self._leaves(request, key)

    def incomplete(self) -> dict[str, None]:
        """Requests that need something that is not here, in the order in which they first needed anything."""
        return {
            request: None
            for request, keys in self._keys_of.items()
            if any(self._items[key].state is not FeatureState.READY for key in keys)
        }

    def park(self, stay: Collection[str], now: float) -> None:
        """What none of the requests `stay` needs is unpinned and not looked for, until `unpark` or for `PARK_S`;
        patience lasts longer.

        What is looked for as the only item of its requests goes on: they hold no room for anything else. So does what
        is lost, or looked for the last time.
        """
        while self._idle:
            self._drop(next(iter(self._idle)))
        self._parked, self._parked_until = set(), now + PARK_S
        for key, item in self._items.items():
            one_of_several = any(len(self._keys_of[request]) > 1 for request in item.requests)
            waits = item.state is FeatureState.READY or (item.state is FeatureState.WANTED and one_of_several)
            if waits and item.requests.isdisjoint(stay):
                self._unpin(item)
                item.state = FeatureState.WANTED
                item.deadline = max(now, min(self._parked_until + self._wait_s, item.born + self._renew_limit_s))
                self._parked.add(key)

    def unpark(self) -> None:
        """What is parked is looked for again."""
        self._parked.clear()

    def pinned(self, key: str) -> Lease | None:
        """The pin of a READY feature that a request needs, else None: a mere prefetch may be let go at any time."""
        item = self._items.get(key)
        return item.pin if item is not None and item.requests else None

    def cause(self, key: str) -> str:
        """Why a feature that some request needs is lost, or would be at its deadline."""
        return self._items[key].cause

    def lost(self, key: str) -> bool:
        item = self._items.get(key)
        return item is not None and item.state is FeatureState.LOST

    # --- what is heard and found ------------------------------------------------------------------------------------

    def wanted(self) -> list[str]:
        """Keys to look up in the store, oldest first."""
        return [key for key, item in self._items.items() if item.open and key not in self._parked]

    def doubted(self) -> list[str]:
        """Of these, the ones that are looked up for the last time: tell `not_found`."""
        return [key for key, item in self._items.items() if item.state is FeatureState.DOUBTED]

    def requested(self, key: str) -> bool:
        """Whether a request needs it, as opposed to a prefetch."""
        item = self._items.get(key)
        return item is not None and bool(item.requests)

    def accepts(self, key: str) -> bool:
        """Whether an announced feature is worth fetching: wanted, or new and therefore a prefetch."""
        item = self._items.get(key)
        if item is not None:
            return item.open and key not in self._parked
        return self._max_prefetched_bytes > 0 and not self._parked

    def announced(self, key: str) -> bool:
        """An encoder says that it is there: a failure before that is forgotten. True if a request had lost it."""
        self._failed.pop(key, None)
        item = self._items.get(key)
        return item is not None and item.state is FeatureState.LOST

    def arrived(self, key: str, pin: Lease, now: float) -> None:
        """The feature was fetched, verified and pinned. Owns `pin` from here on."""
        self._failed.pop(key, None)
        item = self._items.get(key)
        if item is None:
            self._items[key] = Item(FeatureState.READY, now, now + self._hold_s, pin=pin)
            self._idle[key] = None
            self._prefetched_bytes += pin.nbytes
            while self._prefetched_bytes > self._max_prefetched_bytes:
                self._drop(next(iter(self._idle)))
        elif item.open:
            item.state, item.pin = FeatureState.READY, pin
        else:
            pin.release()

    def renew(self, keys: Iterable[str], now: float) -> None:
        """An encoder holds these: queued, running or being stored."""
        for key in keys:
            self._failed.pop(key, None)
            item = self._items.get(key)
            if item is not None and item.open and now < item.born + self._renew_limit_s:
                deadline = min(now + self._wait_s, item.born + self._renew_limit_s)
                item.state, item.deadline, item.cause = FeatureState.WANTED, deadline, "deadline"
                item.told &= item.decided

    def failed(self, key: str, cause: str, now: float) -> None:
        """The feature will not come: it is looked up once more for those who wait, or else for the next who asks."""
        item = self._items.get(key)
        if item is None:
            self._failed[key] = cause
            if len(self._failed) > _MAX_FAILED:
                self._failed.popitem(last=False)
        elif item.state is FeatureState.WANTED:
            self._doubt(item, cause, now)

    def hampered(self, key: str, cause: str, deadline: float) -> None:
        """The feature may still come, but this stands in its way, and there is no use in waiting beyond `deadline`."""
        item = self._items.get(key)
        if item is not None and item.state is FeatureState.WANTED:
            item.cause, item.deadline = cause, min(item.deadline, deadline)

    def missed(self, key: str) -> bool:
        """The store of this host does not have it, so far. True where that is news about an item that is wanted."""
        item = self._items.get(key)
        if item is None or item.missed:
            return False
        item.missed = True
        return True

    def is_missed(self, key: str) -> bool:
        return self._items[key].missed

    def not_found(self, key: str) -> None:
        """The store does not have this doubted feature."""
        item = self._items.get(key)
        if item is not None and item.state is FeatureState.DOUBTED:
            self._lose(item)

    def expire(self, now: float) -> None:
        """Let go of prefetched features that nobody asked for in time, and look for parked ones again."""
        if now >= self._parked_until:
            self._parked.clear()
        while self._idle and self._items[next(iter(self._idle))].deadline <= now:
            self._drop(next(iter(self._idle)))

    def close(self) -> None:
        """Unpin everything."""
        for key in list(self._items):
            self._drop(key)
        self._keys_of.clear()

    def _doubt(self, item: Item, cause: str, now: float) -> None:
        item.state, item.cause, item.deadline = FeatureState.DOUBTED, cause, now + self._last_look_s
        self.doubts += 1

    def _lose(self, item: Item) -> None:
        item.state = FeatureState.LOST
        self.lost_by_cause[item.cause] += 1

    def _leaves(self, request: str, key: str) -> None:
        item = self._items[key]
        for known in (item.requests, item.told, item.decided):
            known.discard(request)
        if not item.requests:
            self._drop(key)

    def _no_longer_idle(self, key: str, item: Item) -> None:
        if key in self._idle:
            del self._idle[key]
            assert item.pin is not None
            self._prefetched_bytes -= item.pin.nbytes

    def _drop(self, key: str) -> None:
        item = self._items.pop(key)
        self._parked.discard(key)
        self._no_longer_idle(key, item)
        self._unpin(item)

    def _unpin(self, item: Item) -> None:
        if item.pin is not None:
            item.pin.release()
            item.pin = None
