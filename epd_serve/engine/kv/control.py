"""The control channel between D's and P's schedulers: one thread on each side around a pure desk.

P binds a ROUTER, every D connects a DEALER to the P's its requests name. The threads also beat: P tells each D which
transfers it still holds, D tells P which requests still wait for blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

import zmq

from epd_serve import wire
from epd_serve.engine.sockets import Socket, milliseconds, open_socket, readable
from epd_serve.engine.wake import WakeLine, idle_bell
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.prefill_desk import PrefillDesk
from epd_serve.wire import TransferKey

logger = logging.getLogger(__name__)

_BEAT_S = 0.5


class _Control(ABC):
    """A socket thread around a desk. `lock` guards the desk; call `flush` after putting something in its outbox."""

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        self._wake = WakeLine()
        self._closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake.listener, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def flush(self) -> None:
        self._wake.ring()

    def close(self) -> None:
        self._closing = True
        self._wake.ring()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closing:
            wait_s = max(0.0, next_beat - time.monotonic())
            ready = dict(self._poller.poll(milliseconds(wait_s)))
            if self._wake.listener in ready:
                self._wake.answer()
            for socket in ready:
                if socket is not self._wake.listener:
                    self._receive(socket)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_S
                self._beat()
            self._send()
        self._shut()

    @abstractmethod
    def _receive(self, socket: Socket) -> None: ...

    @abstractmethod
    def _beat(self) -> None: ...

    @abstractmethod
    def _send(self) -> None: ...

    @abstractmethod
    def _shut(self) -> None: ...


class PrefillControl(_Control):
    """P's end. `stops` collects transfers whose sending must stop; the connector takes them with the lock held."""

    def __init__(self, desk: PrefillDesk, endpoint: str) -> None:
        super().__init__("epd-kv-prefill-control")
        self.desk = desk
        self.stops: list[TransferKey] = []
        self._router = open_socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread.start()

    def _receive(self, socket: Socket) -> None:
        while readable(socket):
            peer, *frames = socket.recv_multipart()
            try:
                message = wire.to_prefill_scheduler.decode(b"".join(frames))
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the transfer control channel: %s", error)
                continue
            with self.lock:
                self.stops += self.desk.on_message(peer, message, time.monotonic())
        idle_bell.ring()

    def _beat(self) -> None:
        with self.lock:
            self.desk.expire(time.monotonic())
            self.desk.outbox += self.desk.alive()

    def _send(self) -> None:
        with self.lock:
            outbox, self.desk.outbox = self.desk.outbox, []
        for peer, message in outbox:
            self._router.send_multipart([peer, wire.encode(message)])

    def _shut(self) -> None:
        self._router.close()


class DecodeControl(_Control):
    """D's end: one DEALER per P, made when first needed."""

    def __init__(self, desk: DecodeDesk) -> None:
        super().__init__("epd-kv-decode-control")
        self.desk = desk
        self._dealers: dict[str, Socket] = {}
        self._thread.start()

    def _receive(self, socket: Socket) -> None:
        while readable(socket):
            try:
                message = wire.to_decode_scheduler.decode(socket.recv())
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the transfer control channel: %s", error)
                continue
            if isinstance(message, wire.Refused):
                logger.warning("prefill refused transfer %s: %s", message.key.transfer_id, message.reason)
            with self.lock:
                self.desk.on_message(message, time.monotonic())

    def _beat(self) -> None:
        with self.lock:
            self.desk.expire(time.monotonic())
            self.desk.outbox += self.desk.still_queued()

    def _send(self) -> None:
        with self.lock:
            outbox, self.desk.outbox = self.desk.outbox, []
        for endpoint, message in outbox:
            try:
                self._dealer(endpoint).send(wire.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("prefill at %s takes no messages; its transfers will time out", endpoint)

    def _dealer(self, endpoint: str) -> Socket:
        if endpoint not in self._dealers:
            dealer = open_socket(zmq.DEALER, linger_s=0.2)
            dealer.connect(endpoint)
            self._poller.register(dealer, zmq.POLLIN)
            self._dealers[endpoint] = dealer
        return self._dealers[endpoint]

    def _shut(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
