"""The listener of a consumer: turns feature events and look-ups into features that are here, whole, to be pinned.

EPD-Serve §3.2, event-driven asynchronous prefetching: the event carries only the key; the listener looks the feature
up, verifies its checksum, and only then can the scheduler pin and promise it. What is here is read in place by the
worker; what has to come from the second tier is fetched by threads of its own, so that neither a slow fetch nor a
network that is gone holds up other features. A feature is looked up three times: on arrival of its request, on its
event, and once more before recomputing. An event of which no request has arrived moves no byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import zmq

from epd_serve import wire
from epd_serve.engine.ec.features import LOOK_S, Features
from epd_serve.engine.traffic import TrafficBoard
from epd_serve.peers import Peers
from epd_serve.sockets import Following, milliseconds, open_socket, readable
from epd_serve.trace import Trace
from epd_serve.wake import WakeLine, idle_waiter
from epd_serve.wiring import StageWiring
from store.errors import CorruptFeatureError, StoreError, StoreFullError
from store.feature_pool import FeaturePool

logger = logging.getLogger(__name__)

TOUCH_S = 0.25
"""How often features that must not be evicted are used; more often than `store_access.SPARE_S`."""

_OUTAGE_GRACE_S = 0.5  # a second tier that is gone: an encoder of this host may still put, one that works renews
_FETCHES, _MAX_FETCHES = 3, 256  # at one time; in line, too: what finds none is asked for again
_ANNOUNCED_S = 2.0  # a fetch that takes longer is in trouble, and moves nothing


class FeatureListener:
    """Owns the listener thread, its socket, and the threads that fetch.

    Args:
        lock: guards `features`; never held during a call of the pool that may take long.
        kept: features that running requests may need again, and that are used so that they stay.
        changed: called when something changed that reports tell.
    """

    def __init__(
        self,
        wiring: StageWiring,
        pool: FeaturePool,
        features: Features,
        lock: threading.Lock,
        kept: Callable[[], Iterable[str]],
        changed: Callable[[], None],
    ) -> None:
        self._wiring, self._pool, self._kept, self._changed = wiring, pool, kept, changed
        self._features, self._lock = features, lock
        self._trace = Trace(wiring.trace_path, wiring.instance)
        # Without metadata of its items no request is called before they are encoded, and none has arrived by then.
        self._takes_all = wiring.prefills and wiring.feature_prefetch == "event"
        self._short: set[str] = set()  # encoders that wait for room
        self._no_room: set[str] = set()
        self._fetching: set[str] = set()  # the two guarded by the lock, too
        self._fetcher = ThreadPoolExecutor(_FETCHES, "epd-feature-fetch") if pool.state != "none" else None
        self._traffic = TrafficBoard(wiring.traffic)
        self._touched_at = 0.0
        self._wake = WakeLine()
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="epd-feature-listener", daemon=True)
        self._thread.start()

    @property
    def without_room(self) -> int:
        """Features that the second tier has and there is no room for here."""
        return len(self._no_room)

    def ring(self) -> None:
        """There is something new to look for, or room for it."""
        self._wake.ring()

    def close(self) -> None:
        """Fetches that have begun end at their own deadline."""
        self._closing = True
        self._wake.ring()
        self._thread.join(timeout=5)
        if self._fetcher is not None:
            self._fetcher.shutdown(wait=False, cancel_futures=True)

    def _listen(self) -> None:
        socket, peers = open_socket(zmq.SUB), Peers(self._wiring)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        following = Following(socket, self._wiring.key_file)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake.listener, zmq.POLLIN)
        while not self._closing:
            with self._lock:
                looking = self._features.waiting()
            poll_s = LOOK_S if looking else TOUCH_S if any(self._kept()) else 1.0
            ready = dict(poller.poll(milliseconds(poll_s)))
            try:
                if peers.changed():
                    following.follow(peers.encoders())
                if self._wake.listener in ready:
                    self._wake.answer()
                if socket in ready:
                    for event in _at_hand(socket):
                        self._hear(event, time.monotonic())
                self._look_for_all(time.monotonic())
                self._touch(time.monotonic())
            except Exception:  # without its listener every request of this stage would wait for its deadline
                logger.exception("feature listener")
        socket.close()

    # --- events -----------------------------------------------------------------------------------------------------

    def _hear(self, event: wire.Announcement, now: float) -> None:
        features, awaited = self._features, False
        match event:
            case wire.StoreReport():
                (self._short.add if event.waiting_puts else self._short.discard)(event.instance)
            case wire.FeatureReady():
                self._trace.stamp(event.key, "feature_event")
                with self._lock:
                    awaited = features.made_no_more(event.key)
                self._ready(event, now)
            case wire.FeatureExpected():
                with self._lock:
                    features.made(event.items, now)
            case wire.FeaturePending():
                with self._lock:
                    features.renew(event.keys, now)
            case wire.FeatureFailed():
                with self._lock:
                    features.failed(event.key, "encoder", now)
                    awaited = features.made_no_more(event.key)
        if awaited:
            idle_waiter.wake()

    def _ready(self, event: wire.FeatureReady, now: float) -> None:
        """An event is a hint: it may be lost, late, twice, or about another host."""
        key, here = event.key, event.host in ("", self._wiring.arena_id)
        with self._lock:
            self._features.counters["events"] += 1
            self._features.announced(key, now, afar=event.pooled)
            if self._takes_all and not event.metadata:
                self._features.arrived([key], now)
            if not here and not event.pooled:
                if self._fetcher is None:
                    self._features.failed(key, "not_pooled", now)
                else:  # its encoder has it and is about to put it where we can reach it
                    self._features.hampered(key, "not_pooled", now + self._wiring.feature_wait_s)
                return
        self._changed()

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _look_for_all(self, now: float) -> None:
        with self._lock:
            due = [(key, row.last_look, row.cause) for key, row in self._features.to_look_for(now)]
            self._no_room = {key for key in self._no_room if self._features.wants(key)}
        for key, last_look, cause in due:
            if self._look_here(key):
                continue
            out_of_reach = self._fetcher is None or cause in ("unavailable", "no_room") or self._pool.state == "down"
            if last_look and out_of_reach:
                self._not_found(key)
                continue
            with self._lock:
                free = key not in self._fetching and len(self._fetching) < _MAX_FETCHES
                if self._fetcher is not None and free and self._features.fetch_due(key, now):
                    self._fetching.add(key)
                    self._fetcher.submit(self._fetch_now, key)

    def _look_here(self, key: str) -> bool:
        """Whether it is here, and whole, or there is nothing more to do for it now."""
        try:
            lease = self._pool.arena.lease(key)
        except CorruptFeatureError as error:
            logger.error("%s; it is fetched from elsewhere or recomputed", error)
            with self._lock:
                self._features.failed(key, "corrupt", time.monotonic())
            self._wake.ring()  # for its last look
            return True
        except StoreError as error:  # it did not answer: looked up again, until the request's deadline
            logger.warning("feature %s: %s", key, error)
            return True
        if lease is not None:
            with lease:
                self._found(key, lease.nbytes)
            return True
        with self._lock:
            news = self._features.missed(key)
        if news:
            idle_waiter.wake()  # its request may begin without it
        return False

    def _found(self, key: str, nbytes: int) -> None:
        with self._lock:
            self._features.found(key, time.monotonic())
            self._no_room.discard(key)
        idle_waiter.wake()
        self._changed()
        self._trace.stamp(key, "feature_pinned", nbytes=nbytes)

    def _not_found(self, key: str) -> None:
        with self._lock:
            self._features.not_found(key)
        self._changed()
        idle_waiter.wake()

    def _touch(self, now: float) -> None:
        """Use what must not be evicted; what running requests keep only while no encoder waits for room."""
        if now < self._touched_at + TOUCH_S:
            return
        self._touched_at = now
        with self._lock:
            keys = self._features.protected()
        if not self._short:
            keys += self._kept()
        if keys:
            self._pool.arena.touch(keys)

    # --- the second tier --------------------------------------------------------------------------------------------

    def _fetch_now(self, key: str) -> None:
        """On a thread of the fetcher's. One whose request has gone is not begun."""
        try:
            with self._lock:
                begin = self._features.wants(key, ahead=True)
            if begin and not self._closing:
                self._fetched(key)
        except Exception:  # a key that stays in flight would never be fetched again
            logger.exception("second tier, feature %s", key)
        finally:
            with self._lock:
                self._fetching.discard(key)
            self._wake.ring()

    def _fetched(self, key: str) -> None:
        why = "missing"
        try:
            with self._traffic.announce("fetch", _ANNOUNCED_S):
                lease = self._pool.fetch(key)
        except StoreFullError:
            lease, why = None, "no_room"
        except CorruptFeatureError as error:
            lease, why = None, "corrupt"
            logger.error("second tier: %s", error)
        except StoreError as error:
            lease, why = None, "unavailable"
            logger.warning("second tier, feature %s: %s", key, error)
        if lease is not None:
            with lease:
                with self._lock:
                    self._features.counters["fetched"] += 1
                self._found(key, lease.nbytes)
            return
        now = time.monotonic()
        with self._lock:
            self._features.counters[f"fetch_{why}"] += 1
            lost = self._features.looks_once_more(key)
            if why == "no_room" and self._features.wants(key) and not lost:
                self._features.no_room(key, now)
                self._no_room.add(key)
            elif why == "corrupt":
                self._features.failed(key, "corrupt", now)
            elif why == "unavailable":
                self._features.hampered(key, "unavailable", now + _OUTAGE_GRACE_S)
        if lost:
            self._not_found(key)
        self._changed()


def _at_hand(socket: zmq.Socket[bytes]) -> Iterator[wire.Announcement]:
    """All that is here."""
    while readable(socket, 0.0):
        try:
            yield wire.announcements.decode(socket.recv())
        except wire.DecodeError as error:
            logger.warning("ignoring a malformed announcement: %s", error)
