"""Looks how the links of one sending worker are, and says so: a thread with a PUB socket that sends `KvReport`s.

Owns the pace: on change at most every 200 ms, else every second, because an idle worker does not step; what somebody
waits for, within 50 ms. What a report tells is the links' business. The proxy subscribes
(`proxy/registry/announcements.py`); a report that is lost costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from epd_serve import wire
from epd_serve.sockets import Socket, bind, open_socket
from epd_serve.wiring import StageWiring, worker_endpoint

logger = logging.getLogger(__name__)


class Reporter:
    """Looks, and is silent, where the wiring names no address (`kv_publish`).

    Args:
        snapshot: the links as they are now; called in the reporter's thread. Must not block.
        change_s, idle_s: least time between two reports; longest. urgent_s: least time where there is urgent news.

    Raises:
        zmq.ZMQError: its address cannot be bound.
    """

    def __init__(
        self,
        wiring: StageWiring,
        rank: int,
        snapshot: Callable[[], wire.KvReport],
        *,
        change_s: float = 0.2,
        idle_s: float = 1.0,
        urgent_s: float = 0.04,
    ) -> None:
        self._snapshot = snapshot
        self._urgent_s, self._change_s, self._idle_s = min(urgent_s, change_s), change_s, idle_s
        self._changed, self._urgent = threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._socket: Socket | None = None
        self._thread = threading.Thread(target=self._run, name="epd-kv-reporter", daemon=True)
        if wiring.kv_publish:
            self._socket = open_socket(zmq.PUB, linger_s=0.2)
            address = worker_endpoint(wiring.kv_publish, rank)
            # Here, not in the thread: a worker that nobody hears must not start.
            bind(self._socket, address, wiring.key_file)

    def start(self) -> None:
        """From now on `snapshot` is called."""
        self._thread.start()

    def changed(self) -> None:
        """Something a report tells has changed. From any thread; costs next to nothing."""
        self._changed.set()

    def changed_urgently(self) -> None:
        """Somebody waits for what has changed. From any thread."""
        self._urgent.set()
        self._changed.set()

    def close(self) -> None:
        """No report follows. Any number of calls."""
        self._closing.set()
        self.changed_urgently()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        elif self._socket is not None:  # never started, or ended: closing twice is harmless
            self._socket.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.clear()  # before the snapshot: what changes from here on is in the next one
            self._urgent.clear()
            self._send()
            self._closing.wait(self._urgent_s)
            self._urgent.wait(self._change_s - self._urgent_s)
            self._changed.wait(self._idle_s - self._change_s)
        if self._socket is not None:
            self._socket.close()

    def _send(self) -> None:
        try:
            report = wire.encode(self._snapshot())
            if self._socket is not None:
                self._socket.send(report)
        except Exception:  # the next report is a second away; a thread that ends would look like a dead worker
            logger.exception("no KV report")
