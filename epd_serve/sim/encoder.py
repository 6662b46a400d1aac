"""E of a simulated layout: real bytes put into the arena, and announced after that.

Owns what happens after an item's encode: a writer thread puts the feature, waits for room, and says how it went. What
the arena holds already is not encoded again. Which item is encoded when is the engine's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from epd_serve import wire
from epd_serve.sim.items import DTYPE, Item, feature_bytes, feature_shape
from epd_serve.sim.publishing import Publisher, RateLimitedPublisher, store_report
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.errors import StoreError, StoreFullError

logger = logging.getLogger(__name__)

RENEW_S = 0.2
_ROOM_LOOK_S = 0.05
_ROOM_WAIT_S = 10.0


class Encoder:
    """Runs between `start` and `close`.

    Args:
        store: None for an encoder alone, whose features go nowhere.
        drops: whether the next feature gets lost, a fault on demand.
    """

    def __init__(
        self,
        wiring: StageWiring,
        store: Arena | None,
        publisher: Publisher,
        bytes_per_token: int,
        *,
        drops: Callable[[], bool],
    ) -> None:
        self._wiring, self._store, self._publisher = wiring, store, publisher
        self._bytes_per_token = bytes_per_token
        self._drops = drops
        self._pending: OrderedDict[str, int] = OrderedDict()  # key → how many requests have it encoded
        self._counters: Counter[str] = Counter()
        self._reported = 0  # reports sent so far
        self._waiting_puts = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="epd-sim-put")
        self._reports = RateLimitedPublisher(self._report, change_s=0.05, idle_s=0.5)
        self._renewals = RateLimitedPublisher(self._renew, change_s=RENEW_S, idle_s=RENEW_S)

    def start(self) -> None:
        if self._wiring.publish:
            self._reports.start()

    def close(self) -> None:
        self._reports.close()
        self._renewals.close()
        self._writer.shutdown(wait=False, cancel_futures=True)

    def wants(self, item: Item, *, again: bool) -> bool:
        """Whether the item has to be encoded. One that is there is announced once more."""
        if self._store is not None and not again and self._store.contains(item.key):
            self._counters["encode_skipped"] += 1
            self._announce(item)
            return False
        self._pending[item.key] = self._pending.get(item.key, 0) + 1
        if len(self._pending) == 1 and self._wiring.publish:
            self._renewals.start()
        self._reports.changed()
        return True

    def begins(self, items: Iterable[Item]) -> None:
        """A request's step begins: what becomes of these will be announced."""
        if expected := {item.key: dict(item.metadata) for item in items if item.metadata}:
            self._publisher.send(wire.FeatureExpected(expected, self._wiring.incarnation))

    def dropped(self, item: Item) -> None:
        """A request that had it encoded has left before that."""
        self._settle(item.key)

    def encoded(self, item: Item) -> None:
        """The step that encodes it is over: store it, then say so."""
        self._counters["encoded"] += 1
        if self._store is None or self._drops():
            self._settle(item.key)
            return
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._writer, self._put, item).add_done_callback(lambda done: self._put_ended(item, done))

    def _put(self, item: Item) -> None:
        """In the writer thread; waits for room."""
        assert self._store is not None
        shape = feature_shape(item.tokens, self._bytes_per_token)
        data = feature_bytes(item.key, item.tokens * self._bytes_per_token)
        until = time.monotonic() + _ROOM_WAIT_S
        try:
            while True:
                try:
                    self._store.put(item.key, data, shape=shape, dtype=DTYPE)
                    return
                except StoreFullError:
                    if time.monotonic() >= until:
                        raise
                self._waiting_puts = 1
                time.sleep(_ROOM_LOOK_S)
        finally:
            self._waiting_puts = 0

    def _put_ended(self, item: Item, done: asyncio.Future[None]) -> None:
        self._settle(item.key)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._announce(item)
        elif isinstance(error, StoreError):
            logger.warning("feature %s is not stored: %s", item.key, error)
            self._publisher.send(wire.FeatureFailed(item.key, str(error)))
        else:
            logger.error("feature %s is not stored", item.key, exc_info=error)
            self._publisher.send(wire.FeatureFailed(item.key, type(error).__name__))

    def _announce(self, item: Item) -> None:
        self._publisher.send(
            wire.FeatureReady(
                item.key,
                item.tokens * self._bytes_per_token,
                self._wiring.incarnation,
                host=self._wiring.arena_id,
                pooled=bool(self._wiring.mooncake_master) or self._wiring.spans_nodes,
                metadata=dict(item.metadata),
            )
        )
        self._reports.changed()

    def _settle(self, key: str) -> None:
        left = self._pending.pop(key, 1) - 1
        if left:
            self._pending[key] = left
        self._reports.changed()

    def _renew(self) -> None:
        if self._pending:
            self._publisher.send(wire.FeaturePending(list(self._pending), self._wiring.incarnation))

    def _report(self) -> None:
        self._reported += 1
        self._publisher.send(
            store_report(
                self._wiring,
                self._store,
                seq=self._reported,
                waiting_puts=self._waiting_puts,
                encoding=len(self._pending),
                counters=dict(self._counters),
            )
        )
