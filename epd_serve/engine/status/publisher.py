"""Says how busy one engine is, and what it has cached: a thread with an XPUB socket.

Owns the pace: on change at most every 50 ms, else every 500 ms, because an idle engine does not step and a proxy takes
one that falls silent for hung. What a report tells is the watch's business, and the ledger's. Of an XPUB socket, unlike
PUB, it is heard who subscribes: whoever does is told all that is cached.
"""

from __future__ import annotations

import logging
import threading

import msgspec
import zmq

from epd_serve import wire
from epd_serve.cache_ledger import CacheLedger
from epd_serve.sockets import SUBSCRIBES, Socket, bind, open_socket, readable
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)


class LoadPublisher:
    """Runs from its making to `close`.

    Args:
        wiring: names an address (`load_publish`).
        cache: what is cached; None where nothing is.
        change_s, idle_s: least time between two reports; longest.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self, wiring: StageWiring, cache: CacheLedger | None = None, *, change_s: float = 0.05, idle_s: float = 0.5
    ) -> None:
        self._change_s, self._idle_s = change_s, idle_s
        self._cache = cache
        self._latest = wire.StageReport(wiring.instance, wiring.incarnation, 0)
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._socket: Socket = open_socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # a second subscriber is heard, too
        # Here, not in the thread: an engine nobody hears must not start.
        bind(self._socket, wiring.load_publish, wiring.key_file)
        self._thread = threading.Thread(target=self._run, name="epd-load", daemon=True)
        self._thread.start()

    def offer(self, report: wire.StageReport) -> None:
        """The load is this now; its `seq` is set when it goes out. From any thread; costs next to nothing."""
        if report != self._latest:
            self._latest = report
            self._changed.set()

    def cache_changed(self) -> None:
        """The ledger has something to tell. From any thread."""
        self._changed.set()

    def close(self) -> None:
        """No report follows. Any number of calls."""
        self._closing.set()
        self._changed.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        seq = 0
        while not self._closing.is_set():
            seq += 1
            self._changed.clear()  # before the look: what changes from here on is in the next one
            try:
                self._send(msgspec.structs.replace(self._latest, seq=seq))
                self._tell_cache()
            except Exception:  # the next one is half a second away; a thread that ends would look like a dead engine
                logger.exception("a load report is lost")
            self._closing.wait(self._change_s)
            self._changed.wait(self._idle_s - self._change_s)
        self._socket.close()

    def _tell_cache(self) -> None:
        everybody, us = SUBSCRIBES, SUBSCRIBES + wire.WHOLE_TOPIC + self._latest.instance.encode()
        asked = False
        while readable(self._socket):
            asked |= self._socket.recv() in (everybody, us)
        if self._cache is None:
            return
        if asked:
            self._cache.tell_whole()
        for report in self._cache.take():
            self._send(report)

    def _send(self, report: wire.StageReport | wire.CacheReport) -> None:
        self._socket.send(wire.encode(report), zmq.NOBLOCK)
