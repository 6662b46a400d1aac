"""Features that requests of D would need again if they were preempted: leased, so that they are still there then.

A request whose KV came from P has its items behind it and needs no feature, until D runs out of blocks and preempts it:
then its whole prompt is computed here. If its items came as metadata they cannot be encoded here, and after the first
byte the proxy has no pixels to retry with. So D leases what lies at hand when such a request is admitted (P holds it at
that moment), until the request has finished. Nothing is fetched for this: what is afar is looked for when it is needed.

Leased features cannot be evicted, so they are bounded, and an encoder that waits for room gets it: a request that might
need its features goes behind one that does.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from store.arena import Lease
from store.errors import StoreError

logger = logging.getLogger(__name__)


class KeptFeatures:
    """Thread-safe. `keep` and `release` are the scheduler's and never block, `fill` and `make_room` the listener's.

    Args:
        lease: pins a feature that is at hand; raises StoreError.
        max_bytes: of all that is kept.
    """

    def __init__(self, lease: Callable[[str], Lease | None], *, max_bytes: int) -> None:
        self._lease = lease
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._keys_of: dict[str, frozenset[str]] = {}
        self._wanted: list[str] = []
        self._users: Counter[str] = Counter()
        self._held: dict[str, Lease] = {}
        self._bytes = 0
        self._counts: Counter[str] = Counter()

    def keep(self, request: str, keys: Iterable[str]) -> bool:
        """The request is admitted. Asked at every step; whether there is now something to `fill`."""
        if request in self._keys_of:
            return False
        with self._lock:
            mine = self._keys_of[request] = frozenset(keys)
            self._users.update(mine)
            self._wanted += mine - set(self._held)
            return bool(self._wanted)

    def fill(self) -> None:
        """Leases what was asked for since the last call. Takes the store's lock."""
        with self._lock:
            wanted, self._wanted = self._wanted, []
        for key in dict.fromkeys(wanted):
            try:
                held = self._lease(key)
            except StoreError as error:
                logger.warning("feature %s is not kept for its request: %s", key, error)
                held = None
            with self._lock:
                fits = held is not None and self._bytes + held.nbytes <= self._max_bytes
                self._counts["kept" if fits else "not_kept"] += 1
                if held is not None and fits and self._users[key] and key not in self._held:
                    self._held[key] = held
                    self._bytes += held.nbytes
                    held = None
            if held is not None:
                held.release()

    def make_room(self) -> None:
        """An encoder waits for room: nothing is kept any more for those who run now."""
        with self._lock:
            for key in list(self._held):
                self._let_go(key)

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished."""
        with self._lock:
            for request in requests:
                for key in self._keys_of.pop(request, ()):
                    self._users[key] -= 1
                    if not self._users[key]:
                        del self._users[key]
                        self._let_go(key)

    def counters(self) -> dict[str, int]:
        """For the store report."""
        with self._lock:
            return dict(self._counts)

    def _let_go(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.nbytes
            held.release()
