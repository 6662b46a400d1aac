"""The listener of a consumer: turns feature events and look-ups into verified, pinned features.

EPD-Serve §3.2, event-driven asynchronous prefetching: the event carries only the key; the listener fetches, verifies
the checksum, pins, and only then does the scheduler promise the feature. What is here is read in place by the worker;
what has to come from the second tier is fetched by threads of its own (`fetcher.py`), so that neither a slow fetch nor
a network that is gone holds up other features. A feature is looked up three times: on arrival of its request, on its
event, and once more before recomputing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from epd_serve import wire
from epd_serve.engine.ec.expected_features import ExpectedFeatures
from epd_serve.engine.ec.feature_desk import FeatureDesk
from epd_serve.engine.ec.fetcher import Fetched, Fetcher
from epd_serve.engine.ec.kept_features import KeptFeatures
from epd_serve.engine.ec.lookups import RELOOK_S, Lookups
from epd_serve.engine.ec.subscription import Subscription
from epd_serve.engine.traffic import TrafficBoard
from epd_serve.peers import Peers
from epd_serve.sockets import milliseconds
from epd_serve.trace import Trace
from epd_serve.wake import WakeLine, idle_waiter
from epd_serve.wiring import StageWiring
from store.arena import Lease
from store.errors import CorruptFeatureError, StoreError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)

_OUTAGE_GRACE_S = 0.5  # a second tier that is gone: an encoder of this host may still put, one that works renews


class FeatureListener:
    """Owns the listener thread and its sockets. `lock` guards `desk` and `expected`, never a call of the pool."""

    def __init__(
        self,
        wiring: StageWiring,
        pool: FeaturePool,
        desk: FeatureDesk,
        expected: ExpectedFeatures,
        lock: threading.Lock,
        kept: KeptFeatures,
        changed: Callable[[], None],
        *,
        max_bytes: int,
    ) -> None:
        self._wiring, self._pool, self._changed = wiring, pool, changed
        self._desk, self._table, self._expected, self._lock = desk, desk.table, expected, lock
        self._kept = kept
        self._trace = Trace(wiring.trace_path, wiring.instance)
        self._lookups = Lookups()
        self._no_room: set[str] = set()
        self._short: set[str] = set()  # instances that wait for room
        self._last_look: set[str] = set()  # doubted keys whose last fetch is under way
        self._fetched: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._arrived_keys: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._wake = WakeLine()
        self._closing = False
        self._fetcher: Fetcher | None = None
        if pool.state != "none":
            self._fetcher = Fetcher(
                pool.fetch,
                self._accepts,
                self._fetch_ended,
                max_bytes=max_bytes,
                traffic=TrafficBoard(wiring.traffic),
            )
        self._thread = threading.Thread(target=self._listen, name="epd-feature-listener", daemon=True)
        self._thread.start()

    @property
    def without_room(self) -> int:
        """Features that the second tier has and there is no room for here."""
        return len(self._no_room)

    def ring(self) -> None:
        """There is something new to look up, or room for it."""
        self._wake.ring()

    def look_ahead(self, keys: Iterable[str]) -> None:
        """Look whether these are here, once. From any thread."""
        self._arrived_keys.put(tuple(keys))
        self._wake.ring()

    def close(self) -> None:
        self._closing = True
        self._wake.ring()
        self._thread.join(timeout=5)
        if self._fetcher is not None:
            self._fetcher.close()
        self._take_fetched()
        self._kept.make_room()

    def _listen(self) -> None:
        events, peers = Subscription(self._wiring.key_file), Peers(self._wiring)
        poller = zmq.Poller()
        poller.register(events.socket, zmq.POLLIN)
        poller.register(self._wake.listener, zmq.POLLIN)
        while not self._closing:
            with self._lock:
                looking = self._desk.waiting()
            ready = dict(poller.poll(milliseconds(RELOOK_S if looking else 1.0)))
            try:
                if peers.changed():
                    events.follow(peers.encoders())
                if self._wake.listener in ready:
                    self._wake.answer()
                    for key in self._no_room:  # there may be some now
                        self._lookups.hurry(key, remote=True)
                announced = self._hear(events) if events.socket in ready else {}
                self._take_fetched()
                self._look_for_new_requests()
                self._look_up(announced)
                self._kept.fill()
            except Exception:  # without its listener every request of this stage would wait for its deadline
                logger.exception("feature listener")
        events.close()

    # --- events -----------------------------------------------------------------------------------------------------

    def _hear(self, events: Subscription) -> dict[str, int]:
        """Read all events at hand; the keys that may be here now, with their bytes, in arrival order."""
        announced: dict[str, int] = {}
        now = time.monotonic()
        for event in events.at_hand():
            if isinstance(event, wire.StoreReport):
                self._heed(event, now)
            if isinstance(event, wire.FeatureReady):
                self._trace.stamp(event.key, "feature_event")
                if self._ready(event, now):
                    announced[event.key] = event.nbytes
            with self._lock:
                match event:
                    case wire.FeatureExpected():
                        self._table.renew(event.items, now)
                        self._expected.began(event.items, now)
                    case wire.FeaturePending():
                        self._table.renew(event.keys, now)
                        self._expected.renew(event.keys, now)
                    case wire.FeatureFailed():
                        self._table.failed(event.key, "encoder", now)
                awaited = isinstance(event, wire.FeatureReady | wire.FeatureFailed) and self._expected.ended(event.key)
            if awaited:
                idle_waiter.wake()
        return announced

    def _heed(self, report: wire.StoreReport, now: float) -> None:
        """Whether somebody waits for room that is pinned here."""
        if report.waiting_puts:
            self._short.add(report.instance)
            self._kept.make_room()
            with self._lock:
                self._desk.make_room(now)
        elif report.instance in self._short:
            self._short.discard(report.instance)
            if not self._short:
                with self._lock:
                    self._desk.room_again()

    def _ready(self, event: wire.FeatureReady, now: float) -> bool:
        """Whether to look this key up now. An event is a hint: it may be lost, late, twice, or about another host."""
        here = event.host in ("", self._wiring.arena_id)
        with self._lock:
            self._desk.counters["events"] += 1
            self._desk.counters["late_events"] += self._table.announced(event.key)
            if not here and not event.pooled:
                if self._fetcher is None:
                    self._table.failed(event.key, "not_pooled", now)
                else:  # its encoder has it and is about to put it where we can reach it
                    self._table.hampered(event.key, "not_pooled", now + self._wiring.feature_wait_s)
                return False
            worth_it = self._table.accepts(event.key)
        self._lookups.hurry(event.key, remote=event.pooled)
        self._changed()
        return worth_it

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _look_up(self, announced: dict[str, int]) -> None:
        now = time.monotonic()
        with self._lock:
            self._table.expire(now)
            wanted = self._table.wanted()
            doubted = set(self._table.doubted())
        keys = dict.fromkeys((*announced, *wanted))
        self._lookups.forget_all_but(keys)
        self._no_room.intersection_update(keys)
        self._last_look.intersection_update(doubted)
        for key in keys:
            if key in doubted and key not in self._last_look:
                self._look_for_the_last_time(key)
            elif self._lookups.local_due(key, now) and not self._look_here(key):
                self._look_afar(key, announced.get(key), now)

    def _look_for_new_requests(self) -> None:
        while not self._arrived_keys.empty():
            for key in self._arrived_keys.get():
                if self._accepts(key, needed=False):
                    self._look_here(key)

    def _look_here(self, key: str) -> bool:
        """Pin it if it is here. True: nothing more to do for it."""
        try:
            held = self._pool.arena.lease(key)
        except CorruptFeatureError as error:
            logger.error("%s; it is fetched from elsewhere or recomputed", error)
            with self._lock:
                self._table.failed(key, "corrupt", time.monotonic())
            self._wake.ring()  # for its last look
            return True
        except StoreError as error:  # it did not answer: looked up again, until the request's deadline
            logger.warning("feature %s: %s", key, error)
            return True
        if held is not None:
            self._arrived(key, held)
            return True
        with self._lock:
            news = self._table.missed(key)
        if news:
            idle_waiter.wake()  # its request may begin without it
        return False

    def _look_afar(self, key: str, announced_bytes: int | None, now: float) -> None:
        """Have it fetched: for a request, or as a prefetch where it was announced."""
        if self._fetcher is not None and not self._fetcher.busy_with(key) and self._lookups.remote_due(key, now):
            with self._lock:
                needed = self._table.requested(key)
            if needed or announced_bytes is not None:  # else its request has gone since the look-up began
                self._fetcher.submit(key, announced_bytes or 0, needed=needed)

    def _look_for_the_last_time(self, key: str) -> None:
        with self._lock:
            cause = self._table.cause(key)
        if self._look_here(key):
            return
        if self._fetcher is None or cause in ("unavailable", "no_room") or self._pool.state == "down":
            self._not_found(key)
        else:
            self._last_look.add(key)
            self._fetcher.submit(key, 0, needed=True)  # if it is being fetched already, that is the last look

    def _not_found(self, key: str) -> None:
        with self._lock:
            self._table.not_found(key)
        self._last_look.discard(key)
        self._changed()
        idle_waiter.wake()

    def _arrived(self, key: str, held: Lease) -> None:
        with self._lock:
            # Counted once: the copy that a fetch brings may be found here before the fetch reports it.
            self._desk.counters["prefetched"] += self._table.accepts(key) and not self._table.requested(key)
            self._table.arrived(key, held, time.monotonic())
        idle_waiter.wake()
        self._changed()
        self._trace.stamp(key, "feature_pinned", nbytes=held.nbytes)

    # --- the second tier --------------------------------------------------------------------------------------------

    def _accepts(self, key: str, needed: bool) -> bool:
        with self._lock:
            return self._table.accepts(key) and (not needed or self._table.requested(key))

    def _fetch_ended(self, result: Fetched) -> None:
        self._fetched.put(result)
        self._wake.ring()

    def _take_fetched(self) -> None:
        while not self._fetched.empty():
            result = self._fetched.get()
            key, now = result.key, time.monotonic()
            with self._lock:
                self._desk.counters["fetched" if result.held is not None else f"fetch_{result.why}"] += 1
                doubted = key in self._table.doubted()
            if result.held is not None:
                self._no_room.discard(key)
                self._arrived(key, result.held)
            elif doubted:
                self._not_found(key)
            elif result.why == "no_room":
                self._waits_for_room(key, now)
            elif result.why == "corrupt":
                with self._lock:
                    self._table.failed(key, "corrupt", now)
            elif result.why == "unavailable":
                with self._lock:
                    self._table.hampered(key, "unavailable", now + _OUTAGE_GRACE_S)

    def _waits_for_room(self, key: str, now: float) -> None:
        """Back-pressure: tried again when leases go, until the request's deadline; a prefetch is let be."""
        with self._lock:
            if not self._table.requested(key):
                return
            self._table.hampered(key, "no_room", float("inf"))
        self._no_room.add(key)
        self._lookups.put_off(key, now)
        self._changed()
