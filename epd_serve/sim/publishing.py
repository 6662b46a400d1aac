"""What a simulated stage announces: one publisher per address, and reports at the pace that real stages keep.

All of it in the stage's event loop. A publisher never waits for those who listen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from epd_serve import wire
from epd_serve.sockets import SUBSCRIBES, Socket, bind, open_socket, readable
from epd_serve.wire import StoreReport
from epd_serve.wiring import StageWiring
from store.arena import Arena

logger = logging.getLogger(__name__)


class Publisher:
    """Sends announcements. Silent without an address.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, address: str, wiring: StageWiring) -> None:
        self._socket: Socket | None = None
        if address:
            self._socket = open_socket(zmq.XPUB, linger_s=0.2)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            bind(self._socket, address, wiring.key_file)

    def send(self, message: wire.Announcement) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(message))

    def subscribed(self) -> set[bytes]:
        """Topics that somebody has subscribed to since the last call; b"" is everything."""
        topics = set()
        while self._socket is not None and readable(self._socket):
            word = self._socket.recv()
            if word.startswith(SUBSCRIBES):
                topics.add(word[len(SUBSCRIBES) :])
        return topics

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class RateLimitedPublisher:
    """Once started, calls `report` on change, at most every `change_s`, and every `idle_s` when nothing changes."""

    def __init__(self, report: Callable[[], None], *, change_s: float, idle_s: float) -> None:
        self._report = report
        self._change_s, self._idle_s = change_s, idle_s
        self._last = 0.0
        self._dirty = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        self._fire()

    def changed(self) -> None:
        """Something the report tells has changed. Costs next to nothing."""
        if not self._dirty and self._last:
            self._dirty = True
            loop = asyncio.get_running_loop()
            self._arm(max(0.0, self._last + self._change_s - loop.time()))

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        if self._closed:
            return
        self._dirty = False
        self._last = asyncio.get_running_loop().time()
        try:
            self._report()
        except Exception:  # the next report is half a second away; without it the stage would look dead
            logger.exception("no report")
        self._arm(self._change_s if self._dirty else self._idle_s)

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._fire)


def store_report(
    wiring: StageWiring,
    store: Arena | None,
    *,
    seq: int,
    counters: dict[str, int],
    waiting_puts: int = 0,
    encoding: int = 0,
) -> StoreReport:
    """What this instance sees of the store now."""
    stats = store.stats() if store is not None else None
    return StoreReport(
        instance=wiring.instance,
        incarnation=wiring.incarnation,
        capacity_bytes=stats.capacity_bytes if stats else 0,
        used_bytes=stats.used_bytes if stats else 0,
        leased=stats.leased if stats else 0,
        pool="up" if wiring.mooncake_master else "none",
        waiting_puts=waiting_puts,
        encoding=encoding,
        counters=counters,
        seq=seq,
    )
