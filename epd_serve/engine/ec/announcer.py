"""One thread owns the publisher socket of a process and sends everything it has to say to consumers and proxies.

Announcements go out at once, in order. `FeaturePending` follows every 200 ms while there are features to renew, and a
`StoreReport` when something changed, at most every 50 ms, and every 500 ms when nothing did: an idle engine does not
step, so this cannot be driven by steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import zmq

from epd_serve import wire
from epd_serve.sockets import Socket, open_socket
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
        self._messages: queue.SimpleQueue[wire.Announcement | None] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._socket: Socket | None = None
        self._thread: threading.Thread | None = None
        if wiring.publish:
            self._socket = open_socket(zmq.PUB, linger_s=0.2)
            if wiring.publish_by_connecting:
                self._socket.connect(wiring.publish)
            else:
                self._socket.bind(wiring.publish)  # here, not in the thread: an encoder nobody hears must not start
            self._thread = threading.Thread(target=self._run, name="epd-announcer", daemon=True)

    def start(self) -> None:
        """From now on `report` and `pending` are called; what was announced before goes out first."""
        if self._thread is not None:
            self._thread.start()

    def announce(self, message: wire.Announcement) -> None:
        """From any thread."""
        if self._thread is not None:
            self._messages.put(message)
            self.changed()

    def changed(self) -> None:
        """Something a report tells has changed."""
        if self._thread is not None and not self._changed.is_set():
            self._changed.set()
            self._messages.put(None)

    def close(self) -> None:
        """What was announced goes out first."""
        self._closing.set()
        if self._thread is not None:
            self._messages.put(None)
            self._thread.join(timeout=5)

    def _run(self) -> None:
        assert self._socket is not None
        reported, renewed = 0.0, 0.0
        while True:
            now = time.monotonic()
            if now >= renewed + RENEW_S:
                renewed = now
                if keys := self._pending():
                    self._send(wire.FeaturePending(keys, self._incarnation))
            if now >= reported + (_REPORT_CHANGE_S if self._changed.is_set() else _REPORT_IDLE_S):
                reported = now
                self._changed.clear()
                self._send_report()
            next_report = reported + (_REPORT_CHANGE_S if self._changed.is_set() else _REPORT_IDLE_S)
            try:
                message = self._messages.get(timeout=max(0.0, min(renewed + RENEW_S, next_report) - now))
            except queue.Empty:
                continue
            if message is not None:
                self._send(message)
            elif self._closing.is_set() and self._messages.empty():
                break
        self._socket.close()

    def _send(self, message: wire.Announcement) -> None:
        assert self._socket is not None
        self._socket.send(wire.encode(message))

    def _send_report(self) -> None:
        try:
            self._send(self._report())
        except StoreError as error:  # the next report is half a second away
            logger.warning("no store report: %s", error)
        except Exception:  # a report must not end the renewals
            logger.exception("no store report")
