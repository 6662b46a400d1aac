"""Scheduler side of a consumer: the listener that turns feature events into pinned features.

EPD-Serve §3.2, event-driven asynchronous prefetching: the event carries only the key; the listener fetches, verifies
the checksum, pins, and only then tells the scheduler. It runs as a thread of the scheduler process because vLLM skips
the connector on steps without tokens (reference: driving prefetch from worker steps starves it). On one host the
arena is mapped by every process, so "fetch" is verify and pin; the worker reads the bytes in place.

Three paths lead to a feature: looked up on arrival of the request, on its event, and once more before recomputing.
Events may be lost; wanted keys are looked up again every `_RELOOK_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from epd_serve import wire
from epd_serve.engine.ec.feature_table import FeatureState, FeatureTable
from epd_serve.engine.sockets import Socket, milliseconds, open_socket, readable
from epd_serve.engine.wake import WakeLine, idle_bell
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.errors import CorruptFeatureError, StoreError
from store.lease import Lease

logger = logging.getLogger(__name__)

_RELOOK_S = 0.05


class FeatureConsumer:
    """Owns the listener thread, the pins, and the answers to vLLM's scheduler."""

    def __init__(self, wiring: StageWiring) -> None:
        self._arena = Arena.attach(wiring.arena)
        self._trace = Trace(wiring.trace_path, wiring.instance)
        # Only who prefills is worth prefetching for: D needs features after a preemption alone, and looks them up then.
        share = self._arena.stats().capacity_bytes // 4 if wiring.role.prefills else 0
        self._table: FeatureTable[_Pin] = FeatureTable(wait_s=wiring.feature_wait_s, max_prefetched_bytes=share)
        self._lock = threading.Lock()  # guards _table and _unpinned
        self._unpinned: list[Lease] = []
        self._closing = False
        self._wake = WakeLine()
        self._thread = threading.Thread(
            target=self._listen, args=(tuple(wiring.events.values()),), name="epd-feature-listener", daemon=True
        )
        self._thread.start()

    def ready_or_lost(self, request: str, keys: Iterable[str]) -> bool:
        """True when every feature is pinned or given up (then vLLM encodes it locally). O(len(keys)), never blocks."""
        now = time.monotonic()
        settled, new = True, False
        with self._lock:
            for key in keys:
                fresh = self._table.pinned(key) is None
                state = self._table.need(request, key, now)
                settled &= state is not FeatureState.WANTED
                new |= fresh and state is FeatureState.WANTED
        if new:
            self._wake.ring()
        return settled

    def give_up(self, keys: Iterable[str], cause: str) -> None:
        """The proxy says that no encoder produced these."""
        with self._lock:
            for key in keys:
                self._table.failed(key, cause)

    def pinned(self, key: str) -> Lease | None:
        """The pin of a feature that is here, verified; holds until the requests that need it have finished."""
        with self._lock:
            pin = self._table.pinned(key)
        return pin.lease if pin is not None else None

    def release(self, requests: Iterable[str]) -> None:
        """These requests have finished. The listener gives the pins back: the store's lock is not for the scheduler."""
        with self._lock:
            self._table.release(requests)
            unpinned = bool(self._unpinned)
        if unpinned:
            self._wake.ring()

    def waiting(self) -> bool:
        """Whether a request waits for a feature."""
        with self._lock:
            return bool(self._table.wanted())

    def close(self) -> None:
        self._closing = True
        self._wake.ring()
        self._thread.join(timeout=5)
        with self._lock:
            self._table.close()
        self._arena.close()  # ends the leases

    def _listen(self, endpoints: tuple[str, ...]) -> None:
        events = open_socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        for endpoint in endpoints:
            events.connect(endpoint)
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(self._wake.listener, zmq.POLLIN)
        while not self._closing:
            with self._lock:
                waiting = bool(self._table.wanted())
            ready = dict(poller.poll(milliseconds(_RELOOK_S if waiting else 1.0)))
            if self._wake.listener in ready:
                self._wake.answer()
            announced = self._drain(events) if events in ready else []
            self._look_up(announced)
            self._give_back()
        events.close()

    def _drain(self, events: Socket) -> list[str]:
        """Read all events at hand; the keys announced, in arrival order."""
        announced: dict[str, None] = {}
        while readable(events):
            try:
                event = wire.announcements.decode(events.recv())
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed feature event: %s", error)
                continue
            if isinstance(event, wire.FeatureReady):
                announced[event.key] = None
                self._trace.stamp(event.key, "feature_event")
            elif isinstance(event, wire.FeatureFailed):
                with self._lock:
                    self._table.failed(event.key, "encoder")
                idle_bell.ring()
        return list(announced)

    def _look_up(self, announced: list[str]) -> None:
        with self._lock:
            self._table.expire(time.monotonic())
            keys = dict.fromkeys(key for key in announced if self._table.accepts(key))
            keys.update(dict.fromkeys(self._table.wanted()))
        for key in keys:  # fetch outside the lock: the scheduler must not wait for a checksum
            try:
                lease = self._arena.lease(key)
            except CorruptFeatureError as error:
                logger.error("%s; the request recomputes it", error)
                with self._lock:
                    self._table.failed(key, "corrupt")
                idle_bell.ring()
                continue
            except StoreError as error:  # it did not answer: looked up again, until the request's deadline
                logger.warning("feature %s: %s", key, error)
                continue
            if lease is not None:
                with self._lock:
                    self._table.arrived(key, _Pin(lease, self._unpinned), time.monotonic())
                idle_bell.ring()
                self._trace.stamp(key, "feature_pinned", nbytes=lease.nbytes)

    def _give_back(self) -> None:
        with self._lock:
            leases, self._unpinned[:] = self._unpinned[:], []
        for lease in leases:
            try:
                lease.release()
            except StoreError as error:  # the store did not answer: tried again with the next ones
                logger.warning("a feature stays pinned for now: %s", error)
                with self._lock:
                    self._unpinned.append(lease)


@dataclass(frozen=True)
class _Pin:
    """A lease that is given back by the listener thread, whoever lets go of it."""

    lease: Lease
    unpinned: list[Lease]

    @property
    def nbytes(self) -> int:
        return self.lease.nbytes

    def release(self) -> None:
        self.unpinned.append(self.lease)
