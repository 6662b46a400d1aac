"""D's worker side: the listener that receives packets and DONE, and the exactly-once reports to vLLM.

Packets are written of transfers that D's scheduler has announced (`Expect`, before P hears of their blocks) and that
are not reported yet; all others are dropped and counted. vLLM asserts on an unknown or doubled report, so a transfer is
reported when two things have met: the step that told this worker about the request (`expect`), and its end, of which
`epd_serve.kv.arrivals` keeps account. The report waits for a packet of it that is being written: then its blocks are
vLLM's again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.kv.regions import ShapesDifferError, pieces_of
from epd_serve.engine.kv.transport import LinkError, ReceiveSide
from epd_serve.engine.vital_thread import HUNG_S, VitalThread
from epd_serve.kv.arrivals import Arrivals, Worker
from epd_serve.kv.faults import Faults
from epd_serve.sockets import bind, milliseconds, open_socket
from epd_serve.trace import Trace
from epd_serve.wake import WakeLine, idle_waiter
from epd_serve.wire import TransferKey
from npu_ops.fences import DeviceHungError
from npu_ops.memory import DeviceMemory

logger = logging.getLogger(__name__)

_IDLE_S = 1.0


@dataclass(frozen=True)
class Expected:
    """A request of D's that waits for its KV, and the blocks that were reserved for what is missing.

    `awaits_token`: it cannot run before P's first token is known, too.
    """

    key: TransferKey
    request: str
    blocks: tuple[int, ...]
    awaits_token: bool = False


@dataclass
class _Peer:
    """A connection that has said hello.

    Attributes:
        worker: instance, incarnation and rank: who it is, over all its connections.
        memory: transport and staging memory of its hello.
        last_seq: of its packets; staged: how many had a part in a transfer, until its DONE.
    """

    side: ReceiveSide
    worker: Worker
    memory: tuple[str, str]
    last_seq: int = -1
    staged: Counter[TransferKey] = field(default_factory=Counter)


class Receiver:
    """Owns the ROUTER that the workers of P connect to, and its thread.

    Args:
        target: instance and incarnation of D.
        shape: of this worker's KV cache (`regions.shape_of`).
        sides: D's ends of the transports; P chooses one per link.
        device: that the listener thread enters.
        node: where it is. why_not: why it takes no KV by a transport from a worker of a node, or "".
        key_file: of the deployment's key, where the endpoint is a TCP port.
        gate: before it is open the device is not entered, and hello is refused: D is starting.
    """

    def __init__(
        self,
        endpoint: str,
        target: str,
        shape: Mapping[str, Any],
        sides: Sequence[ReceiveSide],
        trace: Trace,
        *,
        device: DeviceMemory,
        faults: Faults,
        node: str = "local",
        why_not: Callable[[str, str], str] = lambda transport, node: "",
        key_file: str = "",
        gate: CaptureGate = capture_gate,
    ) -> None:
        self._target = target
        self._gate = gate
        self._node = node
        self._why_not = why_not
        self._shape = dict(shape)
        self._sides = {side.name: side for side in sides}
        self._trace = trace
        self._device = device
        self._entered = False  # the listener's thread
        self._faults = faults
        self._lock = threading.Lock()
        # `_lock` guards it; of what may arrive, reading needs `_copying` only.
        self._arrivals = Arrivals[Expected](one_sided=any(side.quarantine_s > 0 for side in sides))
        self._copying = threading.Lock()  # held while a packet is written; taken after _lock
        self._peers: dict[bytes, _Peer] = {}
        self._unexpected = 0  # parts of packets that were dropped
        self._late: list[tuple[float, int, bytes, bytes]] = []  # heap of answers that a fault delays
        self._number = itertools.count()
        self._closing = threading.Event()
        self._wake = WakeLine()
        self._router = open_socket(zmq.ROUTER)
        bind(self._router, endpoint, key_file)
        self._poller = zmq.Poller()
        self._poller.register(self._wake.listener, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = VitalThread("epd-kv-receiver", self._listen)
        self._thread.start()

    # --- model runner thread --------------------------------------------------------------------------------------

    def expect(
        self, expected: Iterable[Expected], failed: Iterable[TransferKey], told: Iterable[TransferKey] = ()
    ) -> None:
        """What this step's metadata says: new requests that wait, transfers the scheduler gave up, and those whose
        first token it has been told."""
        with self._lock:
            for item in expected:
                self._arrivals.expect(item.key, item, conditional=item.awaits_token)
            for key in told:
                self._arrivals.complete(key)
            for key in failed:
                self._arrivals.give_up(key)

    def take_finished(self) -> tuple[list[Expected], list[Expected]]:
        """(received, failed) since the last call, each transfer once.

        Raises:
            DeviceHungError: a packet is being written, without end, and may be in blocks that would be given back.
        """
        self._thread.look()
        with self._lock:
            taken = self._arrivals.take(ok=True)  # all their packets are written: nothing to wait for
            if self._arrivals.has_ended():
                # After this report the blocks are reused: no write of a packet may be under way.
                if not self._copying.acquire(timeout=HUNG_S):
                    raise DeviceHungError(f"a KV packet has been under way to the device for {HUNG_S:g} s")
                taken += self._arrivals.take(ok=False)
                self._copying.release()
        for item, end in taken:
            if not end.ok:
                logger.warning("KV transfer %s of %s failed: %s", item.key.transfer_id, item.request, end.reason)
        return [item for item, end in taken if end.ok], [item for item, end in taken if not end.ok]

    def close(self) -> None:
        self._closing.set()
        self._wake.ring()
        self._thread.join(timeout=5)

    # --- listener thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closing.is_set():
            self._thread.beat()
            if not self._entered and self._gate.passed():
                self._device.enter_thread()
                self._entered = True
            try:
                self._turn()
            except wire.DecodeError as error:
                logger.warning("ignoring a malformed message on the KV data channel: %s", error)
            except DeviceHungError:  # what it has been given may still be written, to blocks that are others' then
                raise
            except Exception:  # a dead thread would leave every transfer of this worker to its deadline
                logger.exception("the KV data channel")
        self._router.close()
        for side in self._sides.values():
            side.close()

    def _turn(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, peer, data = heapq.heappop(self._late)
            self._router.send_multipart([peer, data])
        wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else _IDLE_S
        if self._router in dict(self._poller.poll(milliseconds(wait_s) + 1)):
            frames = self._router.recv_multipart()
            self._handle(frames[0], wire.to_decode_worker.decode(frames[-1]))

    def _handle(self, peer: bytes, message: wire.ToDecodeWorker) -> None:
        if isinstance(message, wire.Hello):
            self._answer(peer, self._greet(peer, message))
        elif isinstance(message, wire.Packet):
            self._take(peer, message)
            self._answer(peer, wire.Credit(message.seq))
        elif isinstance(message, wire.Probe):
            self._answer(peer, self._probe(peer, message))
        elif isinstance(message, wire.Expect):
            with self._lock:
                self._arrivals.announce(message.key)
            self._router.send_multipart([peer, wire.encode(wire.Expecting(message.key))])
        elif isinstance(message, wire.FirstToken):
            with self._lock:
                self._arrivals.complete(message.key)
            idle_waiter.wake()
        else:
            self._done(peer, message)

    def _answer(self, peer: bytes, message: wire.ToPrefillWorker) -> None:
        for delay_s in self._faults.deliveries(message):
            if delay_s:
                due = time.monotonic() + delay_s
                heapq.heappush(self._late, (due, next(self._number), peer, wire.encode(message)))
            else:
                self._router.send_multipart([peer, wire.encode(message)])

    # --- links ----------------------------------------------------------------------------------------------------

    def _greet(self, peer: bytes, hello: wire.Hello) -> wire.ToPrefillWorker:
        if not self._entered:
            return wire.HelloRefused(wire.STARTING)
        known = self._peers.get(peer)
        repeated = known is not None and known.memory == (hello.transport, hello.staging)
        if not repeated and (reason := _failure_of(lambda: self._attach(peer, hello))):
            logger.error("refusing KV from %s: %s", hello.source, reason)
            return wire.HelloRefused(reason)
        side = self._peers[peer].side
        return wire.HelloAck(self._target, *side.session(), side.scratch(), self._shape, self._node)

    def _attach(self, peer: bytes, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise LinkError(f"version: {wire.VERSION} here, {hello.version} there")
        if why := self._why_not(hello.transport, hello.node):
            raise LinkError(why)
        side = self._sides.get(hello.transport)
        if side is None:
            raise LinkError(f"transport: {' or '.join(self._sides)} here, {hello.transport} there")
        side.attach(peer, hello, pieces_of(self._shape, hello.shape, sending=False))
        worker, memory = (hello.source, hello.shape.get("rank", 0)), (hello.transport, hello.staging)
        # Its former connections, also those of its former lives: what still comes over them counts as lost.
        for former in [
            key for key, it in self._peers.items() if (_place(it.worker), it.memory) == (_place(worker), memory)
        ]:
            del self._peers[former]
        self._peers[peer] = _Peer(side, worker, memory)

    def _probe(self, peer: bytes, probe: wire.Probe) -> wire.ToPrefillWorker:
        if reason := _failure_of(lambda: self._side(peer).probe(peer, probe)):
            logger.error("KV link: %s", reason)
            return wire.HelloRefused(reason)
        return wire.Credit(probe.seq)

    def _side(self, peer: bytes) -> ReceiveSide:
        if peer not in self._peers:
            raise LinkError("a packet from a peer that has not said hello")
        return self._peers[peer].side

    # --- transfers ------------------------------------------------------------------------------------------------

    def _take(self, peer: bytes, packet: wire.Packet) -> None:
        """Write one packet, once. What cannot be written fails its transfers: a hole must not pass for KV."""
        known = self._peers.get(peer)
        if known is not None:
            if packet.seq <= known.last_seq:
                return  # delivered twice
            known.last_seq = packet.seq
        with self._copying:
            keys = {key for key, _ in packet.parts}
            # Of transfers that are over, or never were: their blocks are others'.
            dropped = {key for key in keys if not self._arrivals.may_arrive(key)}
            if known is not None:
                known.staged.update(keys - dropped)
            reason = _failure_of(lambda: self._side(peer).packet(peer, packet, dropped))
        if dropped:
            self._unexpected += len(dropped)
            logger.info("dropped KV of %s, which nobody expects (%d so far)", _names(dropped), self._unexpected)
        if reason:
            logger.error("KV link: %s", reason)
            with self._lock:
                for key, _ in packet.parts:
                    self._arrivals.lost(key, reason)
            idle_waiter.wake()

    def _done(self, peer: bytes, done: wire.Done) -> None:
        self._faults.reached("received")
        known = self._peers.get(peer)
        worker, packets = (None, 0) if known is None else (known.worker, known.staged.pop(done.key, 0))
        with self._lock:
            end = self._arrivals.done(worker, done, packets)
            if end is not None:
                self._trace.stamp(done.key.transfer_id, "kv_done", ok=end.ok)
        idle_waiter.wake()


def _names(keys: Iterable[TransferKey]) -> str:
    return ", ".join(sorted(key.transfer_id for key in keys))


def _place(worker: Worker) -> Worker:
    """A worker in all its lives."""
    source, rank = worker
    return source.rpartition(":")[0], rank


def _failure_of(action: Callable[[], None]) -> str:
    """Runs it; why it failed, or ""."""
    try:
        action()
    except (LinkError, ShapesDifferError) as error:
        return str(error)
    except DeviceHungError:
        raise
    except Exception as error:  # what a device or a mapping says concerns this link, not the worker
        logger.exception("the KV data channel")
        return f"{type(error).__name__}: {error}"
    return ""
