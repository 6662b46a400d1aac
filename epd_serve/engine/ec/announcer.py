"""What a process has to say to consumers and proxies, on its publisher socket, of one thread at a time.

Announcements leave in the thread that makes them: another one would first have to get Python's lock, which a step that
is under way gives up every 5 ms. `FeaturePending` follows every 200 ms while there are features to renew, and a
`StoreReport` when something changed, at most every 50 ms, and every 500 ms when nothing did: an idle engine does not
step, so a thread does this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq
from msgspec import structs

from epd_serve import wire
from epd_serve.sockets import Socket, bind, open_socket
from epd_serve.wake import ON_TIME_NS, end_waits_late
from epd_serve.wiring import StageWiring
from store.errors import StoreError

logger = logging.getLogger(__name__)

RENEW_S = 0.2
_REPORT_CHANGE_S = 0.05
_REPORT_IDLE_S = 0.5


class Announcer:
    """Silent where the wiring names no address (`publish`).

    Args:
        report: what this instance sees of the store; called in the announcer's thread.
        pending: keys whose deadlines are to be renewed; likewise.
    """

    def __init__(
        self, wiring: StageWiring, report: Callable[[], wire.StoreReport], pending: Callable[[], list[str]]
    ) -> None:
        self._incarnation = wiring.incarnation
        self._report, self._pending = report, pending
        self._reports = 0  # sent so far
        self._changed = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._socket: Socket | None = None  # guarded by it
        self._thread = threading.Thread(target=self._run, name="epd-announcer", daemon=True)
        if wiring.publish:
            self._socket = open_socket(zmq.PUB, linger_s=0.2)
            # Here, not in the thread: an encoder nobody hears must not start.
            bind(self._socket, wiring.publish, wiring.key_file)

    def start(self) -> None:
        """From now on `report` and `pending` are called."""
        if self._socket is not None:
            self._thread.start()

    def announce(self, message: wire.Announcement) -> None:
        """From any thread; waits for nobody who reads it."""
        self._send(message)
        self.changed()

    def changed(self) -> None:
        """Something a report tells has changed."""
        self._changed.set()

    def close(self) -> None:
        """What was announced goes out first."""
        self._closing = True
        self.changed()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _run(self) -> None:
        end_waits_late(ON_TIME_NS)  # begun amid those of gloo (`worker_threads`)
        reported, renewed = 0.0, 0.0
        while not self._closing:
            now = time.monotonic()
            try:
                if now >= renewed + RENEW_S:
                    renewed = now
                    if keys := self._pending():
                        self._send(wire.FeaturePending(keys, self._incarnation))
                if now >= reported + self._report_every_s():
                    reported = now
                    self._changed.clear()
                    report = self._report()
                    self._reports += 1
                    self._send(structs.replace(report, seq=self._reports))
            except Exception as error:  # a thread that ends would look like a dead encoder
                named = isinstance(error, StoreError)  # the next report is half a second away
                logger.warning("no renewal, or no store report: %s", error, exc_info=not named)
            left_s = min(renewed + RENEW_S, reported + self._report_every_s()) - time.monotonic()
            if left_s > 0 and self._changed.is_set():
                time.sleep(left_s)
            elif left_s > 0:
                self._changed.wait(left_s)

    def _report_every_s(self) -> float:
        return _REPORT_CHANGE_S if self._changed.is_set() else _REPORT_IDLE_S

    def _send(self, message: wire.Announcement) -> None:
        encoded = wire.encode(message)
        with self._lock:
            if self._socket is not None:
                self._socket.send(encoded)
