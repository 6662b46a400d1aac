"""The control channel between D's and P's schedulers: one thread on each side around a pure desk.

P binds a ROUTER, every D connects a DEALER to the P's its requests name. The threads also beat: P tells each D which
transfers it still holds, D tells P which requests still wait for blocks and says again what must not be lost. `changed`
is called, in that thread, when the desk may have changed.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import zmq

from epd_serve import wire
from epd_serve.kv.decode_desk import ASK_AGAIN_S, DecodeDesk
from epd_serve.kv.faults import Faults
from epd_serve.kv.prefill_desk import PrefillDesk
from epd_serve.sockets import Socket, bind, connect, milliseconds, open_socket, readable
from epd_serve.wake import WakeLine, idle_waiter
from epd_serve.wire import TransferKey

logger = logging.getLogger(__name__)

_BEAT_S = 0.5

Peer = TypeVar("Peer")  # whom a message goes to
Message = TypeVar("Message")


class _Desk(Protocol[Peer, Message]):
    outbox: list[tuple[Peer, Message]]

    def beat(self, now: float) -> None: ...


class _Control(ABC, Generic[Peer, Message]):
    """A socket thread around a desk. `lock` guards the desk; call `flush` after putting something in its outbox."""

    def __init__(self, name: str, desk: _Desk[Peer, Message], faults: Faults, changed: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._desk = desk
        self._faults = faults
        self._changed = changed
        self._late: list[tuple[float, int, Peer, Message]] = []  # heap: delayed by a fault
        self._number = itertools.count()
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
        self._next_beat = 0.0
        while not self._closing:
            try:
                self._turn()
            except Exception:  # a dead thread would leave every transfer of this stage to its deadline
                logger.exception("the transfer control channel")
        self._shut()

    def _turn(self) -> None:
        wake_at = min(self._next_beat, self._late[0][0]) if self._late else self._next_beat
        ready = dict(self._poller.poll(milliseconds(max(0.0, wake_at - time.monotonic()))))
        if self._wake.listener in ready:
            self._wake.answer()
        for socket in ready:
            if socket is not self._wake.listener:
                self._receive(socket)
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            with self.lock:
                self._desk.beat(time.monotonic())
                self._beat()
            self._changed()
        self._send()

    def _send(self) -> None:
        with self.lock:
            outbox, self._desk.outbox = self._desk.outbox, []
        for peer, message in outbox:
            for delay_s in self._faults.deliveries(message):
                if delay_s:
                    heapq.heappush(self._late, (time.monotonic() + delay_s, next(self._number), peer, message))
                else:
                    self._try_to_deliver(peer, message)
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, peer, message = heapq.heappop(self._late)
            self._try_to_deliver(peer, message)

    def _try_to_deliver(self, peer: Peer, message: Message) -> None:
        """One that cannot be sent keeps no other from being sent; whatever matters is said again."""
        try:
            self._deliver(peer, message)
        except Exception:
            logger.exception("%s could not be sent to %s", type(message).__name__, peer)

    def _beat(self) -> None:  # only D's end has more to say
        """With the lock held, at each beat of the desk."""

    @abstractmethod
    def _receive(self, socket: Socket) -> None: ...

    @abstractmethod
    def _deliver(self, peer: Peer, message: Message) -> None: ...

    @abstractmethod
    def _shut(self) -> None: ...


class PrefillControl(_Control[bytes, wire.ToDecodeScheduler]):
    """P's end. `stops` collects transfers whose sending must stop; the connector takes them with the lock held.

    Args:
        key_file: of the deployment's key, where the endpoint is a TCP port.
    """

    def __init__(
        self,
        desk: PrefillDesk,
        endpoint: str,
        faults: Faults,
        changed: Callable[[], None] = idle_waiter.wake,
        *,
        key_file: str = "",
    ) -> None:
        super().__init__("epd-kv-prefill-control", desk, faults, changed)
        self.desk = desk
        self.stops: list[TransferKey] = []
        self._router = open_socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a D that had to connect again keeps its name
        bind(self._router, endpoint, key_file)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread.start()

    def _receive(self, socket: Socket) -> None:
        heard: list[tuple[bytes, wire.ToPrefillScheduler]] = []
        while readable(socket):
            peer, *frames = socket.recv_multipart()
            try:
                heard.append((peer, wire.to_prefill_scheduler.decode(b"".join(frames))))
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the transfer control channel: %s", error)
        with self.lock:  # once: an offer that was withdrawn while this process was stopped is never seen standing
            for peer, message in heard:
                self.stops += self.desk.on_message(peer, message, time.monotonic())
        self._changed()

    def _deliver(self, peer: bytes, message: wire.ToDecodeScheduler) -> None:
        self._router.send_multipart([peer, wire.encode(message)])

    def _shut(self) -> None:
        self._router.close()


@dataclass
class _Offer:
    """A READY that waits until the workers of D in `unaware`, who were told at `said_at`, expect its transfer."""

    endpoint: str
    ready: wire.Ready
    unaware: set[str]
    said_at: float
    withdrawn: bool = False


class DecodeControl(_Control[str, wire.FromDecodeControl]):
    """D's end: one DEALER per P and per worker of D's own, made when first needed. `key_file`: as P's.

    An offer reaches the desk, and P, when D's own workers expect its transfer. The step that tells them of the request
    would be too late for that: it may begin when the one before has ended, and P may have computed the prompt already.
    """

    def __init__(
        self,
        desk: DecodeDesk,
        faults: Faults,
        changed: Callable[[], None] = idle_waiter.wake,
        *,
        key_file: str = "",
    ) -> None:
        super().__init__("epd-kv-decode-control", desk, faults, changed)
        self.desk = desk
        self._key_file = key_file
        self._identity = uuid.uuid4().hex.encode()
        self._dealers: dict[str, Socket] = {}
        self._offers: dict[TransferKey, _Offer] = {}
        self._unoffered: list[TransferKey] = []
        self._thread.start()

    # With the lock held, and `flush` afterwards:

    def offer(self, endpoint: str, ready: wire.Ready) -> None:
        """vLLM allocated the blocks: tell D's workers, then P."""
        self._offers[ready.key] = offer = _Offer(endpoint, ready, set(ready.endpoints), time.monotonic())
        self._tell(offer)

    def withdraw(self, key: TransferKey) -> None:
        """The request leaves: if P has not heard of its blocks yet it will not."""
        if key in self._offers:
            self._offers[key].withdrawn = True

    def take_unoffered(self) -> list[TransferKey]:
        """Withdrawn before P heard of them, each once: the workers, which have, may report them."""
        unoffered, self._unoffered = self._unoffered, []
        return unoffered

    def _tell(self, offer: _Offer) -> None:
        self.desk.outbox += [(worker, wire.Expect(offer.ready.key)) for worker in sorted(offer.unaware)]

    def _beat(self) -> None:
        now = time.monotonic()
        for offer in self._offers.values():
            if now >= offer.said_at + ASK_AGAIN_S:  # what was lost would hold D's blocks for ever
                offer.said_at = now
                self._tell(offer)

    def _on_expecting(self, worker: str, key: TransferKey) -> None:
        offer = self._offers.get(key)
        if offer is None:  # said twice
            return
        offer.unaware.discard(worker)
        if offer.unaware:
            return
        del self._offers[key]
        if offer.withdrawn:
            self._unoffered.append(key)
        else:
            self.desk.reserved(offer.endpoint, offer.ready, time.monotonic())

    def _receive(self, socket: Socket) -> None:
        while readable(socket):
            try:
                message = wire.to_decode_control.decode(socket.recv())
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the transfer control channel: %s", error)
                continue
            with self.lock:
                if isinstance(message, wire.Expecting):
                    worker = next(endpoint for endpoint, dealer in self._dealers.items() if dealer is socket)
                    self._on_expecting(worker, message.key)
                    continue
                failed = self.desk.on_message(message, time.monotonic())
            if failed and isinstance(message, wire.Refused):
                logger.warning("prefill refused transfer %s: %s", message.key.transfer_id, message.reason)
        self._changed()

    def _deliver(self, peer: str, message: wire.FromDecodeControl) -> None:
        if isinstance(message, wire.Ready):
            self._faults.reached("ready")
        try:
            self._dealer(peer).send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("%s takes no messages; transfers will time out", peer)

    def _dealer(self, endpoint: str) -> Socket:
        if endpoint not in self._dealers:
            dealer = open_socket(zmq.DEALER, linger_s=0.2)
            dealer.setsockopt(zmq.ROUTING_ID, self._identity)
            connect(dealer, endpoint, self._key_file)
            self._poller.register(dealer, zmq.POLLIN)
            self._dealers[endpoint] = dealer
        return self._dealers[endpoint]

    def _shut(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
