"""One link: the thread at a P worker that sends everything for one D worker.

A thread per peer, so that a dead or slow peer delays no other. The queue keeps order: packets of a transfer, then its
DONE. A transfer that was stopped or preempted has a new generation; packets of older generations are skipped.

A connection that fails takes every transfer with it that has packets on it: what was in flight may be lost, so none of
them may reach its DONE.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from epd_serve import wire
from epd_serve.engine.kv.transport import LayerPacket, LinkError, SendSide
from epd_serve.engine.sockets import Socket, milliseconds, open_socket, readable
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey

logger = logging.getLogger(__name__)


@dataclass
class Outgoing:
    """A transfer on its way. `lock` is held while its source blocks are read.

    Attributes:
        target: instance and incarnation of D that reserved the blocks.
        generation: raised when what is queued must not be sent any more.
    """

    key: TransferKey
    request: str
    target: str
    generation: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def skip(self) -> None:
        """Skip what is queued, without waiting: for blocks that stay held until the transfer is over."""
        self.generation += 1

    def invalidate(self) -> None:
        """Skip what is queued; returns when no packet of it is being read (bounded by the link's deadline)."""
        with self.lock:
            self.generation += 1


@dataclass(frozen=True)
class PacketJob:
    out: Outgoing
    generation: int
    packet: LayerPacket
    written: Callable[[], None]  # waits until the device has written these layers


@dataclass(frozen=True)
class DoneJob:
    out: Outgoing
    generation: int
    ok: bool
    reason: str = ""


class Link:
    """Connects lazily, reconnects after a failure, ends with `close`.

    Args:
        endpoint: D worker's data address.
        timeout_s: silence of D after which the link fails, and every transfer queued on it.
        on_over: called once per transfer, from this thread, when DONE was sent or cannot be.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        source: str,
        shape: Mapping[str, Any],
        side: SendSide,
        timeout_s: float,
        on_over: Callable[[Outgoing], None],
        trace: Trace,
    ) -> None:
        self._endpoint = endpoint
        self._source = source
        self._shape = dict(shape)
        self._side = side
        self._timeout_s = timeout_s
        self._on_over = on_over
        self._trace = trace
        self._queue: queue.Queue[PacketJob | DoneJob | None] = queue.Queue()
        self._socket: Socket | None = None
        self._target = ""
        self._open: set[TransferKey] = set()  # packets on this connection, DONE not sent
        self._broken: set[TransferKey] = set()  # lost something: nothing more is sent
        self._replaced: set[str] = set()  # former lives of D
        self._thread = threading.Thread(target=self._run, name="epd-kv-link", daemon=True)
        self._thread.start()

    def put(self, job: PacketJob | DoneJob) -> None:
        self._queue.put(job)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=self._timeout_s)

    def _run(self) -> None:
        self._warm()
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            except LinkError as error:
                logger.error("KV link to %s: %s", self._endpoint, error)
                self._fail(job.out)
            except Exception:  # a dead thread would hold P's blocks and let D wait for ever
                logger.exception("KV link to %s", self._endpoint)
                self._fail(job.out)
            if isinstance(job, DoneJob):
                self._broken.discard(job.out.key)
                self._on_over(job.out)
        self._disconnect()
        self._side.close()

    def _warm(self) -> None:
        """Open the link before traffic: a first transfer costs 0.4 s to 3.8 s more. Failure is found again later."""
        try:
            self._connect()
        except (LinkError, zmq.ZMQError) as error:
            logger.info("KV link to %s is not open yet: %s", self._endpoint, error)
            self._disconnect()

    def _do(self, job: PacketJob | DoneJob) -> None:
        out = job.out
        if out.key in self._broken:
            return  # after a lost packet nothing of this transfer may arrive, least of all a DONE
        if out.target in self._replaced:  # the connection to its successor stays
            logger.error("KV link to %s: %s is gone", self._endpoint, out.target)
            self._broken.add(out.key)
            return
        if self._target != out.target:
            self._reconnect(out.target)
        if isinstance(job, DoneJob):
            # Preempted after its last chunk: its packets were skipped, so it is not whole.
            stale = job.ok and job.generation != out.generation
            done = wire.Done(out.key, job.ok and not stale, "preempted by prefill" if stale else job.reason)
            self._send(done)
            self._open.discard(out.key)
            self._trace.stamp(out.key.transfer_id, "kv_sent", ok=done.ok)
            return
        job.written()
        with out.lock:
            if job.generation == out.generation:
                self._open.add(out.key)
                self._side.move(job.packet, self._send, self._receive)
        self._drain()

    def _fail(self, out: Outgoing) -> None:
        """The link failed under this transfer: it ends, and so does all that is queued for the same life of D."""
        self._disconnect()
        self._broken.add(out.key)
        with self._queue.mutex:
            waiting = [job.out for job in self._queue.queue if job is not None]
        self._broken.update(other.key for other in waiting if other.target == out.target)

    def _reconnect(self, target: str) -> None:
        former = self._target
        self._disconnect()
        self._connect()
        if former and self._target != former:
            self._replaced.add(former)
        if self._target != target:  # who answers lives, and READY is sent after its sender has bound this address
            self._replaced.add(target)
            raise LinkError(f"{target} reserved the blocks, {self._target} answers")

    def _connect(self) -> None:
        self._socket = open_socket(zmq.DEALER)
        self._socket.connect(self._endpoint)
        staging, staging_bytes = self._side.hello()
        self._send(wire.Hello(wire.VERSION, self._source, self._side.name, self._shape, staging, staging_bytes))
        answer = self._receive()
        if isinstance(answer, wire.HelloRefused):
            raise LinkError(f"refused: {answer.reason}")
        if not isinstance(answer, wire.HelloAck):
            raise LinkError(f"expected an answer to hello, got {type(answer).__name__}")
        self._side.opened(answer)
        self._target = answer.target

    def _disconnect(self) -> None:
        self._target = ""
        self._broken |= self._open
        self._open.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: wire.ToDecodeWorker) -> None:
        assert self._socket is not None
        if not self._socket.poll(milliseconds(self._timeout_s), zmq.POLLOUT):
            raise LinkError(f"decode takes no messages for {self._timeout_s} s")
        self._socket.send(wire.encode(message))

    def _receive(self) -> wire.ToPrefillWorker:
        assert self._socket is not None
        if not readable(self._socket, self._timeout_s):
            raise LinkError(f"decode has been silent for {self._timeout_s} s")
        try:
            return wire.to_prefill_worker.decode(self._socket.recv())
        except wire.DecodeError as error:
            raise LinkError(f"malformed answer: {error}") from error

    def _drain(self) -> None:
        """Take credits that have come in, so that the next packet finds room."""
        assert self._socket is not None
        while readable(self._socket):
            answer = self._receive()
            if isinstance(answer, wire.Credit):
                self._side.credit(answer.seq)
