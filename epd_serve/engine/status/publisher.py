"""Says how busy one engine is: a thread with a PUB socket that sends `StageReport`s.

Owns the pace: on change at most every 50 ms, else every 500 ms, because an idle engine does not step and a proxy takes
one that falls silent for hung. What a report tells is the watch's business.
"""

from __future__ import annotations

import logging
import threading

import msgspec
import zmq

from epd_serve import wire
from epd_serve.sockets import Socket, bind, open_socket
from epd_serve.wiring import StageWiring

logger = logging.getLogger(__name__)


class LoadPublisher:
    """Runs from its making to `close`.

    Args:
        wiring: names an address (`load_publish`).
        change_s, idle_s: least time between two reports; longest.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, wiring: StageWiring, *, change_s: float = 0.05, idle_s: float = 0.5) -> None:
        self._change_s, self._idle_s = change_s, idle_s
        self._latest = wire.StageReport(wiring.instance, wiring.incarnation, 0)
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._socket: Socket = open_socket(zmq.PUB)
        # Here, not in the thread: an engine nobody hears must not start.
        bind(self._socket, wiring.load_publish, wiring.key_file)
        self._thread = threading.Thread(target=self._run, name="epd-load", daemon=True)
        self._thread.start()

    def offer(self, report: wire.StageReport) -> None:
        """The load is this now; its `seq` is set when it goes out. From any thread; costs next to nothing."""
        if report != self._latest:
            self._latest = report
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
            self._send(msgspec.structs.replace(self._latest, seq=seq))
            self._closing.wait(self._change_s)
            self._changed.wait(self._idle_s - self._change_s)
        self._socket.close()

    def _send(self, report: wire.StageReport) -> None:
        try:
            self._socket.send(wire.encode(report), zmq.NOBLOCK)
        except zmq.ZMQError:  # the next one is half a second away; a thread that ends would look like a dead engine
            logger.exception("a load report is lost")
