"""The feature agent of one worker: fetches features into its slab of device memory when its scheduler side says so.

vLLM skips connectors on steps without tokens, so fetching cannot ride on steps: the agent is threads of the worker
process with a ZMQ endpoint. One thread owns the socket; a few others fetch and verify, in the order asked. All of them
enter the device first. Which offset a feature goes to, and when a place may be used again, is decided by the scheduler
side (`device_ledger.py`); the agent adds what only the worker knows: whether a load that the model's stream has queued
from that place is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.ec.device_slab import DeviceSlab
from epd_serve.engine.ec.device_tier import DeviceTier, object_name
from epd_serve.engine.ec.device_trailer import TRAILER_BYTES, FeatureShape, Integrity
from epd_serve.sockets import Socket, bind, milliseconds, open_socket
from epd_serve.wake import WakeLine
from npu_ops.memory import DeviceMemory, DeviceMemoryError
from store.errors import CorruptFeatureError, StoreError

logger = logging.getLogger(__name__)

_START_S = 60.0
_Answer = wire.AgentReady | wire.AgentRefused | wire.Fetched | wire.FetchFailed | wire.FetchSettled


@dataclass
class _Transfer:
    """One fetch: tells the peer of its end exactly once, and of its late end after that."""

    seq: int
    answer: Callable[[_Answer], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _settled: bool = False
    _failed: bool = False

    def settled(self) -> None:
        with self._lock:
            self._settled = True
            if self._failed:
                self.answer(wire.FetchSettled(self.seq))

    def fail(self, cause: str, reason: str, nbytes: int = 0) -> None:
        with self._lock:
            self._failed = True
            self.answer(wire.FetchFailed(self.seq, cause, reason, self._settled, nbytes))


class FeatureAgent:
    """Owns the slab, the endpoint and the fetch threads of one worker.

    Made by the worker side of the connector of P, PD and D (`store_access.open_reader`). A slab that
    cannot be had does not stop the worker: the agent says so to the scheduler side, which stays on the host path.

    Args:
        tier: opens the tier's client; called in the agent's thread, after it has entered the device.
        endpoint: ZMQ address to bind, of this rank alone.
        incarnation: of this instance.
        fetchers: transfers at one time.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        tier: Callable[[], DeviceTier],
        *,
        endpoint: str,
        rank: int,
        incarnation: str,
        slab_bytes: int,
        fetchers: int = 2,
    ) -> None:
        self._memory = memory
        self._open_tier = tier
        self._rank = rank
        self._incarnation = incarnation
        self._slab_bytes = slab_bytes
        self._jobs: queue.SimpleQueue[tuple[bytes, wire.FetchInto] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bytes, _Answer]] = queue.SimpleQueue()
        self._wake = WakeLine()
        self._ring_lock = threading.Lock()  # one thread at a time may ring
        self._reads: dict[int, tuple[int, Callable[[], None]]] = {}  # offset → end, wait for the load queued last
        self._reads_lock = threading.Lock()
        self._closing = False
        self._refusal = ""
        self._opened = threading.Event()
        socket = open_socket(zmq.ROUTER)
        bind(socket, endpoint)  # here: an agent that nobody can reach must not start
        self._threads = [threading.Thread(target=self._serve, args=(socket,), name="epd-feature-agent", daemon=True)]
        self._threads += [
            threading.Thread(target=self._fetch_all, name=f"epd-feature-fetch-{index}", daemon=True)
            for index in range(fetchers)
        ]
        self._fetchers = fetchers
        for thread in self._threads:
            thread.start()
        self._opened.wait(_START_S)

    def load(self, offset: int, nbytes: int, shape: FeatureShape) -> torch.Tensor:
        """A copy of a pinned feature for the model, queued on the calling thread's stream. Copies on the device."""
        feature = self._memory.clone(self._slab.view(offset, nbytes))
        with self._reads_lock:  # on one stream, so the last fence covers the loads before it
            self._reads[offset] = offset + nbytes, self._memory.fence()
        return shape.read(feature)

    def close(self) -> None:
        self._closing = True
        for _ in range(self._fetchers):
            self._jobs.put(None)
        self._ring()
        for thread in self._threads:
            thread.join(timeout=5)

    # --- the agent thread -----------------------------------------------------------------------------------------

    def _serve(self, socket: Socket) -> None:
        self._open()
        self._opened.set()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake.listener, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(milliseconds(1.0)))
            if self._wake.listener in ready:
                self._wake.answer()
            while not self._answers.empty():
                peer, answer = self._answers.get()
                socket.send_multipart([peer, wire.encode(answer)])
            if socket in ready:
                peer, raw = socket.recv_multipart()
                self._take(peer, raw)
        socket.close()

    def _open(self) -> None:
        try:
            self._memory.enter_thread()
            self._tier = self._open_tier()
            self._slab = DeviceSlab(self._memory, self._tier, self._slab_bytes)
            self._integrity = Integrity(self._memory)
        except (StoreError, DeviceMemoryError) as error:
            self._refusal = str(error)
            logger.warning("features do not go to device memory here: %s", error)
            return
        if self._integrity.weaker_because:
            logger.warning("features are verified by samples only: %s", self._integrity.weaker_because)

    def _take(self, peer: bytes, raw: bytes) -> None:
        try:
            message = wire.to_feature_agent.decode(raw)
        except wire.DecodeError as error:
            logger.warning("ignoring a malformed message to the feature agent: %s", error)
            return
        if isinstance(message, wire.FetchInto):
            if not self._refusal:
                self._jobs.put((peer, message))
            return
        if (message.version, message.incarnation) != (wire.VERSION, self._incarnation):
            self._answer(peer, wire.AgentRefused(self._rank, "this agent belongs to another life of the instance"))
        elif self._refusal:
            self._answer(peer, wire.AgentRefused(self._rank, self._refusal))
        else:
            self._answer(peer, wire.AgentReady(self._rank, self._slab.nbytes, self._integrity.method))

    # --- fetch threads --------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        self._memory.enter_thread()
        while (job := self._jobs.get()) is not None:
            peer, request = job
            transfer = _Transfer(request.seq, lambda answer, peer=peer: self._answer(peer, answer))  # type: ignore[misc]
            try:
                self._fetch(request, transfer)
            except CorruptFeatureError as error:
                logger.error("%s; it is not used", error)
                transfer.fail("corrupt", str(error))
            except StoreError as error:
                transfer.fail("unavailable", str(error))
            except Exception as error:  # one bad feature must not end the thread: the next would never be answered
                logger.exception("feature %s was not fetched", request.key)
                transfer.fail("unavailable", str(error))

    def _fetch(self, request: wire.FetchInto, transfer: _Transfer) -> None:
        handed_over = False
        try:
            self._wait_for_loads(request.offset, request.offset + request.capacity)
            handed_over = True
            size = self._tier.fetch_into(
                object_name(request.key), self._slab.address(request.offset), request.capacity, transfer.settled
            )
        finally:
            if not handed_over:
                transfer.settled()
        if size is None:
            transfer.fail("missing", "the second tier does not have it")
            return
        if size > request.capacity:
            transfer.fail("size", f"{size} bytes do not fit {request.capacity}", size - TRAILER_BYTES)
            return
        shape = self._integrity.verify(request.key, self._slab.view(request.offset, size), writer=request.writer)
        transfer.answer(wire.Fetched(request.seq, size - TRAILER_BYTES, list(shape.shape), shape.dtype))

    def _wait_for_loads(self, start: int, end: int) -> None:
        """The model may still be reading what a transport is about to overwrite."""
        with self._reads_lock:
            waits = [self._reads.pop(at)[1] for at, (stop, _) in list(self._reads.items()) if at < end and start < stop]
        for wait in waits:
            wait()

    def _answer(self, peer: bytes, answer: _Answer) -> None:
        self._answers.put((peer, answer))
        self._ring()

    def _ring(self) -> None:
        with self._ring_lock:
            self._wake.ring()
