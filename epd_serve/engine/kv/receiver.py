"""D's worker side: the listener that receives packets and DONE, and the exactly-once reports to vLLM.

vLLM asserts on an unknown or doubled report, so a transfer is reported when two things have met: the step that told
this worker about the request (`expect`), and its end (DONE, or `fail` from the scheduler). DONE may come first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from epd_serve import wire
from epd_serve.engine.kv.regions import differences
from epd_serve.engine.kv.transport import LinkError, ReceiveSide
from epd_serve.engine.sockets import open_socket, readable
from epd_serve.kv.tombstones import Tombstones
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.004


@dataclass(frozen=True)
class Expected:
    """A request of D's that waits for its KV, and the blocks that were reserved for what is missing."""

    key: TransferKey
    request: str
    blocks: tuple[int, ...]


class Receiver:
    """Owns the ROUTER that every P worker of the same rank connects to, and its thread."""

    def __init__(self, endpoint: str, target: str, shape: Mapping[str, Any], side: ReceiveSide, trace: Trace) -> None:
        self._target = target
        self._shape = dict(shape)
        self._side = side
        self._trace = trace
        self._changed = threading.Condition()
        self._expected: dict[TransferKey, Expected] = {}
        self._ended: dict[TransferKey, wire.Done] = {}
        self._over = Tombstones()
        self._copying = threading.Lock()  # held while a packet is written; taken after _changed
        self._greeted: set[bytes] = set()
        self._closing = threading.Event()
        self._router = open_socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._thread = threading.Thread(target=self._listen, name="epd-kv-receiver", daemon=True)
        self._thread.start()

    # --- model runner thread --------------------------------------------------------------------------------------

    def expect(self, expected: Iterable[Expected], failed: Iterable[TransferKey]) -> None:
        """What this step's metadata says: new requests that wait, and transfers the scheduler gave up."""
        with self._changed:
            for item in expected:
                self._expected[item.key] = item
            for key in failed:
                if key in self._expected and key not in self._ended:
                    self._ended[key] = wire.Done(key, ok=False, reason="given up by the scheduler")

    def take_finished(self, *, idle: bool) -> tuple[list[Expected], list[Expected]]:
        """(received, failed) since the last call, each transfer once. An idle step waits briefly for one."""
        with self._changed:
            if idle and self._expected and not self._ended:
                self._changed.wait(_IDLE_WAIT_S)
            received: list[Expected] = []
            failed: list[Expected] = []
            for key in [key for key in self._ended if key in self._expected]:
                done, item = self._ended.pop(key), self._expected.pop(key)
                with self._copying:  # after this report the blocks are reused: no write of a packet may be under way
                    self._over.add(key, done.reason)
                (received if done.ok else failed).append(item)
                if not done.ok:
                    logger.warning("KV transfer %s of %s failed: %s", key.transfer_id, item.request, done.reason)
            return received, failed

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    # --- listener thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closing.is_set():
            if not readable(self._router, 0.2):
                continue
            frames = self._router.recv_multipart()
            try:
                self._handle(frames[0], wire.to_decode_worker.decode(frames[-1]))
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the KV data channel: %s", error)
        self._router.close()
        self._side.close()

    def _handle(self, peer: bytes, message: wire.ToDecodeWorker) -> None:
        if isinstance(message, wire.Hello):
            self._answer(peer, self._greet(peer, message))
        elif isinstance(message, wire.Packet):
            if reason := self._copy(peer, message):
                logger.error("KV link: %s", reason)
                for key, _ in message.parts:
                    self._end(wire.Done(key, False, reason))
            self._answer(peer, wire.Credit(message.seq))
        elif isinstance(message, wire.Probe):
            self._answer(peer, wire.Credit(message.seq))
        else:
            self._trace.stamp(message.key.transfer_id, "kv_done", ok=message.ok)
            if message.ok and peer not in self._greeted:  # ZMQ reconnected by itself: packets may be lost
                message = wire.Done(message.key, False, "the link was interrupted")
            self._end(message)

    def _copy(self, peer: bytes, packet: wire.Packet) -> str:
        """Write one packet; "" or why it cannot be written, which ends its transfers: a hole must not pass for KV."""
        with self._copying:
            # Late packets of transfers that were given up: their blocks are reused.
            dropped = {key for key, _ in packet.parts if key in self._over}
            try:
                self._side.packet(peer, packet, dropped)
            except LinkError as error:
                return str(error)
        return ""

    def _end(self, done: wire.Done) -> None:
        with self._changed:
            if done.key not in self._over:
                self._ended.setdefault(done.key, done)
                self._changed.notify_all()

    def _greet(self, peer: bytes, hello: wire.Hello) -> wire.ToPrefillWorker:
        mine = {**self._shape, "version": wire.VERSION, "transport": self._side.name}
        theirs = {**hello.shape, "version": hello.version, "transport": hello.transport}
        if reason := differences(mine, theirs):
            logger.error("refusing KV from %s: %s", hello.source, reason)
            return wire.HelloRefused(reason)
        try:
            self._side.attach(peer, hello)
        except LinkError as error:
            logger.error("refusing KV from %s: %s", hello.source, error)
            return wire.HelloRefused(str(error))
        self._greeted.add(peer)
        session, bases = self._side.session()
        return wire.HelloAck(self._target, session, bases)

    def _answer(self, peer: bytes, message: wire.ToPrefillWorker) -> None:
        self._router.send_multipart([peer, wire.encode(message)])
