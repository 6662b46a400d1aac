"""A link's connection to one worker of D: the socket, the choice of a transport, messages out and answers in.

Owns nothing of transfers. All of it runs in the link's thread; other threads only ring `wake` and set `closing`.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from epd_serve import wire
from epd_serve.engine.kv.regions import LinkPieces, ShapesDifferError, pieces_of
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage, SendSide
from epd_serve.errors import ConfigError
from epd_serve.kv.faults import Faults
from epd_serve.kv.transport_selection import between
from epd_serve.sockets import Socket, connect, milliseconds, open_socket
from epd_serve.wake import WakeLine

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.1
_TURN_S = 1.0

Probe = Callable[[SendSide, SendMessage, AwaitMessage], None]


class Connection:
    """Closed until `open` succeeds, and again after `close`.

    Args:
        source: instance and incarnation of P; shape: of its KV cache (`regions.shape_of`).
        sides: P's ends of the transports, in order of preference.
        timeout_s: silence of D after which it counts as gone.
        probe: tries an open transport; raises LinkError where it does not carry bytes.
        on_credit: called when a staged packet has arrived, after its side knows.
        node: of P. key_file: of the deployment's key, where the endpoint is a TCP port.
        on_turn: called every second of a wait for D: each has a deadline of its own.

    Attributes:
        target: instance and incarnation of D that answers; "" while closed.
        side: the transport in use.
        reason: why it is not the first choice, or "".
        staged_seq: number of the last staged packet that was sent, 0 before there was one.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        source: str,
        shape: Mapping[str, Any],
        sides: Sequence[SendSide],
        timeout_s: float,
        faults: Faults,
        probe: Probe,
        on_credit: Callable[[int], None],
        node: str = "local",
        key_file: str = "",
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = ""
        self.side = sides[0]
        self.reason = ""
        self.staged_seq = 0
        self.wake = WakeLine()
        self.closing = threading.Event()
        self._endpoint = endpoint
        self._source = source
        self._shape = dict(shape)
        self._sides = tuple(sides)
        self._timeout_s = timeout_s
        self._faults = faults
        self._probe = probe
        self._on_credit = on_credit
        self._node = node
        self._key_file = key_file
        self._on_turn = on_turn
        self._socket: Socket | None = None
        self._hangup: Socket | None = None  # readable once D's end has closed
        self._poller = zmq.Poller()
        self._poller.register(self.wake.listener, zmq.POLLIN)
        self._late: list[tuple[float, bytes]] = []  # a heap of messages that a fault delays

    @property
    def is_open(self) -> bool:
        return bool(self.target)

    def open(self) -> None:
        """Offer one transport after the other until D accepts one and it carries bytes.

        Raises:
            LinkError: D is silent, or no transport will do; then it names each with its reason.
        """
        reasons: list[str] = []
        for side in self._sides:
            self.close()
            try:
                hello = self._hello(side)
            except LinkError as error:
                reasons.append(f"{side.label}: {error}")
                continue
            self._connect()
            self.send(hello)
            answer = self.receive()  # silence ends the attempt: another transport would meet the same
            if answer == wire.HelloRefused(wire.STARTING):
                raise LinkError("decode is starting")  # likewise: in a moment it may take the first choice
            try:
                ack = self._accepted(side, answer)
            except LinkError as error:
                reasons.append(f"{side.label}: {error}")
                continue
            self.target, self.side = ack.target, side
            self.reason = "; ".join(filter(None, (*reasons, between(self._node, ack.node))))
            why = f" ({self.reason})" if self.reason else ""
            logger.info("KV link to %s uses %s%s", self._endpoint, side.label, why)
            return
        self.close()
        raise LinkError("; ".join(reasons))

    def who(self) -> str:
        """The life of D that answers on the open connection now. Raises LinkError.

        Saying hello twice changes nothing at the life that has heard it; another one, to which ZMQ has reconnected by
        itself, says its own name.
        """
        self.wait(0.0)  # what is here was not asked for now
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            self.send(self._hello(self.side))  # again: it may have gone the way of a connection that has just broken
            again = min(end, time.monotonic() + _ASK_AGAIN_S)
            while (answer := self._await(again)) is not None:
                if isinstance(answer, wire.HelloAck):
                    return answer.target
                self._heed(answer)
        raise self._silent()

    def close(self) -> None:
        self.target = ""
        self.staged_seq = 0
        self._late.clear()
        for socket in (self._socket, self._hangup):
            if socket is not None and socket in self._poller:
                self._poller.unregister(socket)
        if self._socket is not None and self._hangup is not None:
            self._socket.disable_monitor()
            self._hangup.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._hangup = None

    def send(self, message: wire.ToDecodeWorker) -> None:
        if isinstance(message, wire.Packet):
            self.staged_seq = message.seq
        for delay_s in self._faults.deliveries(message):
            if delay_s:
                heapq.heappush(self._late, (time.monotonic() + delay_s, wire.encode(message)))
            else:
                self._deliver(wire.encode(message))

    def receive(self) -> wire.ToPrefillWorker:
        """The next answer. Raises LinkError after `timeout_s` of silence, or when the link closes while it opens."""
        answer = self._await(time.monotonic() + self._timeout_s)
        if answer is None:
            raise self._silent()
        return answer

    def wait(self, until: float) -> None:
        """Sleep until the clock says so, somebody rings, or D has answered; takes the credits that came in."""
        answer = self._poll(until)
        while answer is not None:
            self._heed(answer)
            answer = self._poll(0.0)

    def _connect(self) -> None:
        """Raises LinkError where there is no such address, or no socket is left. `close` takes what was made so far."""
        try:
            self._socket = open_socket(zmq.DEALER)
            # What waits for a D that has stopped is bounded by the staging memory. ZMQ's own bound, 1000 messages,
            # would be met first, and end the link.
            self._socket.setsockopt(zmq.SNDHWM, 0)
            # ZMQ would connect again by itself and say nothing: an idle link has to notice that its D has died, and
            # packets on their way may be lost.
            self._hangup = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            connect(self._socket, self._endpoint, self._key_file)
        except (zmq.ZMQError, ConfigError) as error:
            raise LinkError(f"no connection: {error}") from error
        for socket in (self._socket, self._hangup):
            self._poller.register(socket, zmq.POLLIN)

    def _hello(self, side: SendSide) -> wire.Hello:
        return wire.Hello(wire.VERSION, self._source, side.name, self._shape, *side.hello(), self._node)

    def _heed(self, answer: wire.ToPrefillWorker) -> None:
        if isinstance(answer, wire.Credit):
            self.side.credit(answer.seq)
        elif isinstance(answer, wire.HelloRefused):
            raise LinkError(f"refused: {answer.reason}")

    def _accepted(self, side: SendSide, answer: wire.ToPrefillWorker) -> wire.HelloAck:
        if isinstance(answer, wire.HelloRefused):
            raise LinkError(f"refused: {answer.reason}")
        if not isinstance(answer, wire.HelloAck):
            raise LinkError(f"expected an answer to hello, got {type(answer).__name__}")
        side.opened(answer, self._pieces(answer))
        self._probe(side, self.send, self.receive)
        return answer

    def _pieces(self, ack: wire.HelloAck) -> LinkPieces | None:
        try:
            return pieces_of(self._shape, ack.shape, sending=True)
        except ShapesDifferError as error:
            raise LinkError(str(error)) from error

    def _await(self, until: float) -> wire.ToPrefillWorker | None:
        while (answer := self._poll(until)) is None and time.monotonic() < until:
            if self.closing.is_set() and not self.is_open:
                raise LinkError("the link is closing")
        return answer

    def _silent(self) -> LinkError:
        return LinkError(f"decode has been silent for {self._timeout_s} s")

    def _poll(self, until: float) -> wire.ToPrefillWorker | None:
        """One answer of D if one is here, or comes before `until` or a ring."""
        while True:
            self._on_turn()
            self._deliver_late()
            now = time.monotonic()
            next_s = min(until, self._late[0][0] if self._late else until, now + _TURN_S) - now
            ready = dict(self._poller.poll(max(0, milliseconds(next_s + 0.001))))  # rounded up: never early
            if rung := self.wake.listener in ready:
                self.wake.answer()
            if self._socket is not None and self._socket in ready:
                return self._read(self._socket)
            if self._hangup is not None and self._hangup in ready:
                keys = "" if self.is_open or not self._key_file else ", as where the keys of the two differ"
                raise LinkError(f"decode's end of the connection has closed{keys}")
            if rung or time.monotonic() >= until:
                return None

    def _read(self, socket: Socket) -> wire.ToPrefillWorker:
        try:
            answer = wire.to_prefill_worker.decode(socket.recv())
        except wire.DecodeError as error:
            raise LinkError(f"malformed answer: {error}") from error
        if isinstance(answer, wire.Credit):
            self._on_credit(answer.seq)
        return answer

    def _deliver(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.send(data, zmq.NOBLOCK)  # it takes any number

    def _deliver_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            self._deliver(heapq.heappop(self._late)[1])
