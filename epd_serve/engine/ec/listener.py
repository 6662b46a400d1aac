"""The listener of a consumer: turns feature events and look-ups into features that are here, whole, to be pinned.

EPD-Serve §3.2, event-driven asynchronous prefetching: the event carries only the key; the listener looks the feature
up, verifies its checksum, and only then can the scheduler pin and promise it. What is here is copied to the devices
that will read it, where they have a slab (`slab.py`), if its encoder does not write it there; else read in place by the
worker. What has to come from the second tier is fetched by threads of its own, so that neither a slow fetch nor a
network that is gone holds up others. A feature is looked up three times: on arrival of its request, on its event, and
once more before recomputing. An event of which no request has arrived moves no byte.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import zmq

from epd_serve import wire
from epd_serve.engine.ec.features import LOOK_S, Features
from epd_serve.engine.ec.slab import FeatureSlab
from epd_serve.engine.traffic import TrafficBoard
from epd_serve.peers import Peers
from epd_serve.sockets import Following, open_socket
from epd_serve.trace import Trace
from epd_serve.wake import WakeLine, idle_waiter
from epd_serve.wiring import StageWiring
from store.arena import Lease
from store.errors import CorruptFeatureError, StoreError, StoreFullError
from store.feature import FeatureMeta
from store.feature_pool import FeaturePool
from store.mooncake.client import ASCEND

logger = logging.getLogger(__name__)

TOUCH_S = 0.25
"""How often features that must not be evicted are used; more often than `store_access.SPARE_S`."""

_FETCHES, _MAX_FETCHES = 3, 256  # at one time; in line, too: what finds none is asked for again
_ANNOUNCED_S = 2.0  # a fetch that takes longer is in trouble, and moves nothing


class FeatureListener:
    """Owns the listener thread, its socket, and the threads that fetch.

    Args:
        changed: called when something changed that reports tell.
        slab: where features go that are here; None where they stay in the arena.
    """

    def __init__(
        self,
        wiring: StageWiring,
        pool: FeaturePool,
        features: Features,
        changed: Callable[[], None],
        slab: FeatureSlab | None = None,
    ) -> None:
        self._slab = slab
        self._wiring, self._pool, self._features, self._changed = wiring, pool, features, changed
        self._trace = Trace(wiring.trace_path, wiring.instance)
        # Without metadata of its items no request is called before they are encoded, and none has arrived by then.
        self._takes_all = wiring.prefills and wiring.feature_prefetch == "event"
        self._short: set[str] = set()  # encoders that wait for room
        self._fetching: set[str] = set()  # guarded by the features' lock
        self._fetched: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self._fetcher = ThreadPoolExecutor(_FETCHES, "epd-feature-fetch") if pool.state != "none" else None
        self._traffic = TrafficBoard(wiring.traffic)
        self._wake = WakeLine()
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="epd-feature-listener", daemon=True)
        self._thread.start()

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
        poller = self._slab.poller if self._slab is not None else zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake.listener, zmq.POLLIN)
        due = 0.0
        while not self._closing:
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + TOUCH_S
                    if peers.changed():
                        following.follow(peers.encoders())
                        self._follow(peers)
                    self._touch()
                with self._features.lock:
                    poll_s = LOOK_S if self._features.waiting() else TOUCH_S if self._features.kept else 1.0
                ready = dict(poller.poll(round(1000 * poll_s)))
                if self._wake.listener in ready:
                    self._wake.answer()
                if socket in ready:
                    for event in _at_hand(socket):
                        self._hear(event, time.monotonic())
                if self._slab is not None:
                    for meta in self._slab.hear(time.monotonic()):
                        self._ready_to_read(meta)
                while not self._fetched.empty():
                    lease = self._fetched.get()
                    if self._slab is None or not self._slab.copy(lease, time.monotonic()):
                        with lease:
                            self._ready_to_read(lease.meta)
                self._look_for_all(time.monotonic())
            except Exception:  # without its listener every request of this stage would wait for its deadline
                logger.exception("feature listener")
        socket.close()

    def _follow(self, peers: Peers) -> None:
        """Who may write to the slab: over Ascend none that shares a device, which cannot be connected with itself."""
        if self._slab is not None:
            encoders = peers.encoders_by_name()
            beside = (name for name, shares in encoders.items() if shares and self._wiring.mooncake_protocol == ASCEND)
            self._slab.follow(encoders.keys(), frozenset(beside), time.monotonic())

    # --- events -----------------------------------------------------------------------------------------------------

    def _hear(self, event: wire.Announcement, now: float) -> None:
        """An event is a hint: it may be lost, late, twice, or about another host."""
        features, was_made = self._features, False
        with features.lock:
            match event:
                case wire.StoreReport():
                    (self._short.add if event.waiting_puts else self._short.discard)(event.instance)
                case wire.FeatureMade():
                    was_made = features.announced(event.key, now, afar=False)
                case wire.FeatureReady():
                    was_made = features.announced(event.key, now, afar=event.pooled)
                    self._ready(event, now)
                case wire.FeatureExpected():
                    features.made(event.items, now)
                case wire.FeaturePending():
                    features.renew(event.keys, now)
                case wire.FeatureFailed():
                    was_made = features.failed(event.key, "encoder", now)
        if self._slab is not None and (not isinstance(event, wire.FeatureReady) or self._can_have(event)):
            self._slab.note(event, now)
        if was_made:
            idle_waiter.wake()

    def _can_have(self, event: wire.FeatureReady) -> bool:
        """Whether the store of this host has it, or can fetch it."""
        return event.pooled or event.host in ("", self._wiring.arena_id)

    def _ready(self, event: wire.FeatureReady, now: float) -> None:
        self._trace.stamp(event.key, "feature_event")
        self._features.counters["events"] += 1
        if self._takes_all and not event.metadata:
            self._features.arrived([event.key], now)
        if self._can_have(event) or (self._slab is not None and self._slab.may_come(event.key, now)):
            return
        if self._fetcher is None:
            self._features.failed(event.key, "not_pooled", now)
        else:  # its encoder has it and is about to put it where we can reach it
            self._features.hampered(event.key, "not_pooled", now + self._wiring.feature_wait_s)

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _look_for_all(self, now: float) -> None:
        with self._features.lock:
            due = list(self._features.to_look_for(now))
        for key, row in due:
            if self._look_here(key, last=row.last_look):
                continue
            hopeless = self._fetcher is None or row.cause in ("unavailable", "no_room") or self._pool.state == "down"
            if row.last_look and hopeless:
                with self._features.lock:
                    self._features.not_found(key)
                self._news()
            elif self._fetcher is not None:
                self._fetch(self._fetcher, key, now)

    def _look_here(self, key: str, *, last: bool) -> bool:
        """Whether it is here, and whole, or there is nothing more to do for it now."""
        if self._slab is not None and self._slab.is_coming(key, time.monotonic(), last=last):
            return True
        lease, copied = None, False
        try:
            lease = self._pool.arena.lease(key, verify=False)
            if lease is not None:
                copied = self._slab is not None and self._slab.copy(lease, time.monotonic())
                self._pool.arena.verify(lease)  # meanwhile
        except StoreError as error:  # it did not answer: looked up again, until the request's deadline
            logger.warning("feature %s: %s", key, error)
            if isinstance(error, CorruptFeatureError):  # it is fetched from elsewhere, or recomputed
                with self._features.lock:
                    self._features.counters["corrupt"] += 1
                    self._features.failed(key, "corrupt", time.monotonic())
            if copied and self._slab is not None:
                self._slab.spoil(key)
            elif lease is not None:
                lease.release()
            return True
        if lease is not None:
            if not copied:
                with lease:
                    self._ready_to_read(lease.meta)
            return True
        if self._slab is not None and (meta := self._slab.has(key)) is not None:
            self._ready_to_read(meta)
            return True
        with self._features.lock:
            news = self._features.missed(key)
        if news:
            idle_waiter.wake()  # its request may begin without it
        return False

    def _ready_to_read(self, meta: FeatureMeta) -> None:
        with self._features.lock:
            self._features.found(meta.key, time.monotonic())
        self._news()
        self._trace.stamp(meta.key, "feature_pinned", nbytes=meta.nbytes)

    def _news(self) -> None:
        idle_waiter.wake()
        self._changed()

    def _touch(self) -> None:
        """Use what must not be evicted; what running requests keep only while no encoder waits for room."""
        with self._features.lock:
            keys = self._features.protected(kept=not self._short)
        if keys:
            self._pool.arena.touch(keys)

    # --- the second tier --------------------------------------------------------------------------------------------

    def _fetch(self, fetcher: ThreadPoolExecutor, key: str, now: float) -> None:
        with self._features.lock:
            free = key not in self._fetching and len(self._fetching) < _MAX_FETCHES
            if free and self._features.fetch_due(key, now):
                self._fetching.add(key)
                fetcher.submit(self._fetch_now, key)

    def _fetch_now(self, key: str) -> None:
        """On a thread of the fetcher's. One whose request has gone is not begun."""
        lease, why = None, "missing"
        with self._features.lock:
            begin = not self._closing and self._features.wants(key, ahead=True)
        try:
            if begin:
                with self._traffic.announce("fetch", _ANNOUNCED_S):
                    lease = self._pool.fetch(key)
        except Exception as error:
            full, corrupt = isinstance(error, StoreFullError), isinstance(error, CorruptFeatureError)
            why = "no_room" if full else "corrupt" if corrupt else "unavailable"
            if not full:
                logger.warning("second tier, feature %s: %s", key, error, exc_info=not isinstance(error, StoreError))
        with self._features.lock:
            self._fetching.discard(key)
            if lease is not None:
                self._features.counters["fetched"] += 1
            elif begin:
                self._features.not_fetched(key, why, time.monotonic())
        if lease is not None:
            self._fetched.put(lease)
        self._news()
        self._wake.ring()


def _at_hand(socket: zmq.Socket[bytes]) -> Iterator[wire.Announcement]:
    """All that is here."""
    while True:
        try:
            yield wire.announcements.decode(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        except wire.DecodeError as error:
            logger.warning("ignoring a malformed announcement: %s", error)
