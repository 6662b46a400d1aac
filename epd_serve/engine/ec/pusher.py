"""Worker side of an encoder: writes features from its device into the slabs of those who prefill (`slab.py`).

What the model has queued is offered (`wire.FeatureMade`). Who wants it reserves a place on every rank and says where
(`wire.Push`); a thread waits until the device has computed it, and writes it there, one-sidedly, by Mooncake's Transfer
Engine. vLLM's tensors lie anywhere, and only registered memory can be written from: so features pass through
`PUSH_BYTES` of it, slice by slice. It is taken when graphs are captured, or would be, out of what is planned for the
way into the store (`StageWiring.feature_queue_bytes`).

An offer keeps nothing: the tensor lives as long as vLLM's encoder cache, or the way into the store, has it. Every order
is answered. Bytes are not checked on their way, as those of KV are not: both ends would have to read them over the bus.

    all     there, on every rank
    none    nothing was begun: the tensor is gone, or the order is old (whoever gave it may be gone, and others have its
            addresses)
    some    a write failed: it may land in what was reserved, and nobody else uses that (`slab.py`)
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
import zmq

from epd_serve import wire
from epd_serve.engine.capture_gate import CaptureGate, capture_gate
from epd_serve.engine.ec.slab_copier import EndpointOf
from epd_serve.engine.kv.mooncake_endpoint import MooncakeEndpoint
from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.mooncake_writes import Writes
from epd_serve.engine.kv.transport import LinkError
from epd_serve.engine.vital_thread import end_stage
from epd_serve.sockets import bind, open_socket
from epd_serve.wake import ON_TIME_NS, WakeLine, end_waits_late
from epd_serve.wiring import StageWiring
from npu_ops.fences import DeviceHungError
from npu_ops.memory import DeviceBlock, DeviceMemory, DeviceMemoryError
from store.mooncake.client import ASCEND

logger = logging.getLogger(__name__)

PUSH_BYTES = 32 << 20
_GATE_S = 0.25
_WRITE_S = 3.0  # for a slice to one rank
_OLD_S = 5.0
_MAX_OFFERS = 1024


def endpoint_of(wiring: StageWiring, memory: DeviceMemory) -> EndpointOf:
    """How memory of this device is registered."""
    return lambda block: MooncakeEndpoint([block.data], wiring.host, wiring.mooncake_protocol, memory)


class FeaturePusher:
    """One per encoder, in the worker of rank 0.

    Args:
        memory: of the device that features lie on.
        write_s: how long a write may take.
    """

    def __init__(
        self,
        wiring: StageWiring,
        memory: DeviceMemory,
        endpoint: EndpointOf,
        gate: CaptureGate = capture_gate,
        *,
        write_s: float = _WRITE_S,
    ) -> None:
        self._memory, self._endpoint_of, self._gate = memory, endpoint, gate
        self._made = partial(
            wire.FeatureMade, instance=wiring.instance, incarnation=wiring.incarnation, push=wiring.push
        )
        self._writes = Writes(
            lambda: self._endpoint.engine if self._endpoint is not None else None,
            write_s,
            MooncakeReceiveSide.quarantine_s,
            lists=wiring.mooncake_protocol == ASCEND,
        )
        self._endpoint: MooncakeEndpoint | None = None  # when it is up
        self._lock = threading.Lock()  # guards what follows
        self._offers: OrderedDict[str, tuple[weakref.ref[torch.Tensor], Callable[[], None]]] = OrderedDict()
        self._wake = WakeLine()
        self._closing = False
        self._socket = open_socket(zmq.ROUTER, linger_s=0.2)
        bind(self._socket, wiring.push, wiring.key_file)
        self._thread = threading.Thread(target=self._run, name="epd-feature-pusher", daemon=True)
        self._thread.start()

    # --- the model's thread -----------------------------------------------------------------------------------------

    def offer(self, key: str, feature: torch.Tensor, written: Callable[[], None]) -> wire.FeatureMade | None:
        """What is to be announced of a feature that is queued on the device; None where nobody can be written to.

        `written` waits until the device has done it, in any thread that has entered.
        """
        if self._endpoint is None or feature.layout is not torch.strided:
            return None
        with self._lock:
            self._offers[key] = weakref.ref(feature), written
            while len(self._offers) > _MAX_OFFERS:
                self._offers.popitem(last=False)
        nbytes, dtype = feature.numel() * feature.element_size(), str(feature.dtype).removeprefix("torch.")
        return self._made(key, nbytes, list(feature.shape), dtype)

    def close(self) -> None:
        """The write under way ends first."""
        self._closing = True
        self._wake.ring()
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._socket.close()

    # --- the pusher's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._gate.passed(_GATE_S):
            if self._closing:
                return
        end_waits_late(ON_TIME_NS)  # begun amid those of gloo (`worker_threads`)
        try:
            self._memory.enter_thread()
            staging = self._memory.allocate(PUSH_BYTES)
            self._endpoint = self._endpoint_of(staging)
        except (DeviceMemoryError, LinkError) as error:
            logger.warning("features go to the store alone: %s", error)
            return
        poller = zmq.Poller()
        for waited_for in (self._socket, self._wake.listener):
            poller.register(waited_for, zmq.POLLIN)
        orders: list[tuple[float, bytes, bytes]] = []
        while not self._closing:
            if not orders:
                poller.poll()
            while self._socket.poll(0):
                peer, word = self._socket.recv_multipart()
                orders.append((time.monotonic(), peer, word))
            if orders:
                came, peer, word = orders.pop(0)
                self._socket.send_multipart([peer, wire.encode(self._answer(staging, word, came))])

    def _answer(self, staging: DeviceBlock, word: bytes, came: float) -> wire.Pushed:
        order = wire.to_encoder.decode(word)
        with self._lock:
            offered = self._offers.get(order.key)
        feature = offered[0]() if offered is not None else None
        if offered is None or feature is None or feature.numel() * feature.element_size() != order.nbytes:
            return wire.Pushed(order.job, "none", "its encoder does not have it any more")
        if time.monotonic() > came + _OLD_S:
            return wire.Pushed(order.job, "none", f"its encoder had no time for it within {_OLD_S:g} s")
        try:
            offered[1]()
            self._write(staging, feature, order)
        except DeviceHungError as error:  # nothing would leave this encoder any more
            end_stage(f"the device did not hand out feature {order.key}: {error}")
        except Exception as error:  # its consumers have the store
            logger.warning("feature %s: %s", order.key, error, exc_info=not isinstance(error, LinkError))
            return wire.Pushed(order.job, "some", str(error) or type(error).__name__)
        return wire.Pushed(order.job, "all")

    def _write(self, staging: DeviceBlock, feature: torch.Tensor, order: wire.Push) -> None:
        """Raises LinkError: some may still land."""
        memory = self._memory
        copy = memory.upload if memory.host_visible else memory.copy  # torch's copy on a CPU has a team of threads
        flat = feature.detach().contiguous().view(torch.uint8).reshape(-1)
        for start in range(0, order.nbytes, staging.nbytes):
            part = flat[start : start + staging.nbytes]
            copy(staging.data[: part.numel()], part)
            memory.fence()()
            for session, address in order.targets:
                self._writes.run(session, [(staging.address, address + start, part.numel())])
