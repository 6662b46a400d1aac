"""Worker side of the slab: a thread that copies features from the arena to this rank's device, and the views of them.

The slab is taken on the model's thread, when the model is loaded and before vLLM measures what is left for KV. The
copier begins when graphs have been captured: page-locking and copies of another thread would break a capture. It has a
stream of its own, and two fences hold it and the model apart (`npu_ops.memory`, rule 3):

    what it copies         `SlabCopied` follows a fence behind the copy; the scheduler lets no request through before
    what it overwrites     the model's thread records a fence at the beginning of each step in which vLLM frees
                           features, when all that may read them is queued; a copy waits for that of the last such step,
                           and so does an encoder that is to write here (`pusher.py`): the order is a copy of no bytes

Each rank page-locks the arena where CUDA can, once. The pages are the same for all ranks and in memory anyway; what a
copy without that costs is a core for as long as it takes. On an NPU copies pass through two page-locked buffers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.ec.step import FeatureSlot
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.transport import LinkError
from epd_serve.engine.vital_thread import VitalThread
from epd_serve.sockets import connect, open_socket
from epd_serve.wake import ON_TIME_NS, WakeLine, end_waits_late
from npu_ops.memory import DeviceBlock, DeviceMemory, DeviceMemoryError
from store.arena import Arena

logger = logging.getLogger(__name__)

_GATE_S = 0.25
_STEP_S = 600.0
"""How long a step that was scheduled may take to begin: those before it compute."""


EndpointOf = Callable[[DeviceBlock], MooncakeEndpoint]
"""Registers memory with a Transfer Engine, in a thread that has entered its device. Raises LinkError."""


class SlabCopier:
    """One per worker of who prefills.

    Args:
        address: of the scheduler's socket.
        arena: whose features are copied.
        endpoint: makes a slab one that encoders write to; None where none does.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        memory: DeviceMemory,
        arena: Arena,
        gate: CaptureGate = capture_gate,
        endpoint: EndpointOf | None = None,
    ) -> None:
        self._address, self._rank, self._endpoint_of = address, rank, endpoint
        self._memory, self._arena, self._gate = memory, arena, gate
        self._block: DeviceBlock | None = None
        self._begun = threading.Condition()  # guards the next two
        self._freed_in = 0  # the last step in which vLLM freed features
        self._read: Callable[[], None] | None = None  # waits for what was queued before it
        self._wake = WakeLine()
        self._closing = False
        self._thread = VitalThread("epd-feature-copier", self._run)

    # --- the model's thread -----------------------------------------------------------------------------------------

    def open(self, nbytes: int) -> int:
        """Takes the slab, and begins. Returns the bytes taken: 0 where the device has not so many."""
        try:
            self._block = self._memory.allocate(nbytes)
        except DeviceMemoryError as error:
            logger.warning("no slab: features are copied in the steps that read them: %s", error)
            return 0
        if self._memory.host_visible:
            self._block.data.zero_()  # pages come with the first write: a feature's copy would take ten times as long
        self._thread.start()
        return nbytes

    def begin_step(self, freed_in: int) -> None:
        """A step begins in which vLLM frees features: all that may read them has been queued by this thread."""
        with self._begun:
            self._freed_in, self._read = freed_in, self._memory.fence()
            self._begun.notify_all()

    def view(self, slot: FeatureSlot) -> torch.Tensor:
        """What lies there, uncopied. Its request was let through, so it is there."""
        assert self._block is not None and slot.slab_at is not None
        return slot.shaped(self._block.data[slot.slab_at : slot.slab_at + slot.meta.nbytes])

    def close(self) -> None:
        """The copy under way ends first."""
        self._closing = True
        with self._begun:
            self._begun.notify_all()
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    # --- the copier's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        end_waits_late(ON_TIME_NS)  # begun amid those of gloo (`worker_threads`)
        while not self._gate.passed(_GATE_S):
            if self._closing:
                return
        self._memory.enter_thread()
        host = torch.from_numpy(self._arena.memory())
        undo = self._memory.register_host(host)
        try:
            self._serve(host)
        finally:
            undo()

    def _serve(self, host: torch.Tensor) -> None:
        assert self._block is not None
        with open_socket(zmq.DEALER) as socket:
            connect(socket, self._address)
            session, base = self._endpoint(self._block)
            socket.send(wire.encode(wire.SlabOpened(self._rank, self._block.nbytes, session, base)))
            poller = zmq.Poller()
            for waited_for in (socket, self._wake.listener):
                poller.register(waited_for, zmq.POLLIN)
            while not self._closing:
                poller.poll()
                while not self._closing and socket.poll(0):
                    order = wire.to_slab_worker.decode(socket.recv())
                    if self._copy(host, order):
                        socket.send(wire.encode(wire.SlabCopied(order.job, self._rank)))

    def _endpoint(self, block: DeviceBlock) -> tuple[str, int]:
        if self._endpoint_of is None:
            return "", 0
        try:
            self._engine = self._endpoint_of(block)  # kept: it lives as long as the worker
        except LinkError as error:
            logger.warning("features come from the store alone: %s", error)
            return "", 0
        return self._engine.session, self._engine.bases[0]

    def _copy(self, host: torch.Tensor, order: wire.SlabCopy) -> bool:
        """Returns when the bytes are on the device. False: this worker ends."""
        assert self._block is not None
        if not self._unread(order.freed_in):
            return False
        if not order.nbytes:
            return True
        target = self._block.data[order.slab_at : order.slab_at + order.nbytes]
        self._memory.upload(target, host[order.arena_at : order.arena_at + order.nbytes])
        self._memory.fence()()
        return True

    def _unread(self, freed_in: int) -> bool:
        """Waits until the device has done what was queued before this step."""
        if not freed_in:
            return True
        with self._begun:
            self._begun.wait_for(lambda: self._closing or self._freed_in >= freed_in, _STEP_S)
            if self._closing:
                return False
            read = self._read
            assert read is not None and self._freed_in >= freed_in, f"step {freed_in} has not begun in {_STEP_S:g} s"
        read()
        return True
