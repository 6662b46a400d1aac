"""A device that exists only to be used wrongly: an NPU's rules on CPU threads. For tests.

`FakeDevice` is a `DeviceMemory` over host memory. Each thread that has entered has a stream, which is a thread that
executes what was queued, in order, `latency_s` after the one before: a write is visible to a transport, or to another
stream, only when its stream got there. Waiting for nothing therefore reads old bytes, as on hardware. `FakeFabric` and
`FakePort` are the transport of such devices, as strict as Mooncake's Ascend transport (reference/ascend.md):

    thread without set_device          refused          address not a multiple of 2 MB       register refused
    more than 256 regions              refused          memory not registered                put and fetch refused
    another process on the same device refused ("not support connect with self device") unless the fabric allows it

A broken rule raises `RuleBrokenError` and stays in `FakeDevice.broken`, whoever swallows the exception.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable

import torch

from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT, DeviceBlock, DeviceMemoryError, whole_words

_POISON = 0xA5
_STUCK_S = 20.0


class RuleBrokenError(DeviceMemoryError):
    """The caller did what an NPU refuses or punishes."""


class SameDeviceError(DeviceMemoryError):
    """Two processes of one NPU cannot connect before CANN 9.1."""


class _Stream:
    """Executes in order, one `latency_s` after the other, in a thread of its own."""

    def __init__(self, latency_s: Callable[[], float]) -> None:
        self._latency_s = latency_s
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def enqueue(self, operation: Callable[[], None]) -> None:
        self._queue.put(operation)

    def event(self) -> threading.Event:
        reached = threading.Event()
        self._queue.put(reached.set)
        return reached

    def _run(self) -> None:
        while True:
            operation = self._queue.get()
            time.sleep(self._latency_s())
            operation()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _reached(event: threading.Event) -> None:
    if not event.wait(_STUCK_S):
        raise DeviceMemoryError(f"a stream did not get there within {_STUCK_S:g} s")


class FakeDevice:
    """`DeviceMemory` with rules. `place` tells devices apart: two `FakeDevice`s of one place are two processes on it.

    Attributes:
        latency_s: how late each queued operation runs; may be changed at any time.
        broken: every rule that was broken, in order.
    """

    host_visible = False
    alignment = NPU_ALIGNMENT

    def __init__(self, place: str = "host0/npu0", *, latency_s: float = 0.0, sums: bool = True) -> None:
        self.name = f"fake:{place}"
        self.place = place
        self.latency_s = latency_s
        self.broken: list[str] = []
        self._sums = sums
        self._bound = threading.local()
        self._blocks: list[DeviceBlock] = []

    def enter_thread(self) -> None:
        if not hasattr(self._bound, "stream"):
            self._bound.stream = _Stream(lambda: self.latency_s)

    def allocate(self, nbytes: int, alignment: int | None = None) -> DeviceBlock:
        self._stream("allocate")
        step = self.alignment if alignment is None else alignment
        raw = torch.full((nbytes + 2 * self.alignment,), _POISON, dtype=torch.uint8)
        start = -raw.data_ptr() % self.alignment
        if step % self.alignment:
            start += step  # aligned as asked and no better: luck must not hide a missing alignment
        block = DeviceBlock(raw[start : start + nbytes], raw.data_ptr() + start, nbytes)
        self._blocks.append(block)
        return block

    def run(self, operation: Callable[[], None]) -> None:
        """Queues a computation, such as a model step that writes a feature."""
        self._stream("run").enqueue(operation)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._stream("copy")
        if not self.owns(target.data_ptr(), target.numel()):
            raise self.breaks("copy to memory that is not the device's")
        if not self.owns(source.data_ptr(), source.numel()):
            source = source.clone()  # pageable host memory is read at the call
        stream.enqueue(lambda: _copy(target, source))

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        block = self.allocate(source.numel())
        self.copy(block.data, source)
        return block.data

    def fence(self) -> Callable[[], None]:
        reached = self._stream("fence").event()

        def wait() -> None:
            self._stream("wait")
            _reached(reached)

        return wait

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        _reached(self._stream("to_host").event())
        return source.clone()

    def total(self, source: torch.Tensor) -> int:
        if not self._sums:
            raise RuntimeError("no kernel for int32 into int64")
        _reached(self._stream("total").event())
        return int(whole_words(source).sum(dtype=torch.int64).item()) % (1 << 64)

    def owns(self, address: int, nbytes: int) -> bool:
        """Whether these bytes were allocated here."""
        return any(
            block.address <= address and address + nbytes <= block.address + block.nbytes for block in self._blocks
        )

    def entered(self) -> bool:
        """Whether the calling thread has set this device."""
        return hasattr(self._bound, "stream")

    def breaks(self, rule: str) -> RuleBrokenError:
        """Notes a broken rule; the caller raises what this returns."""
        self.broken.append(rule)
        return RuleBrokenError(f"{self.name}: {rule}")

    def _stream(self, what: str) -> _Stream:
        if not self.entered():
            raise self.breaks(f"{what} in thread {threading.current_thread().name}, which has not set the device")
        stream: _Stream = self._bound.stream
        return stream


class FakeFabric:
    """Objects in the segments of all ports. `connects_with_self`: as CANN 9.1 does."""

    def __init__(self, *, connects_with_self: bool = False) -> None:
        self.connects_with_self = connects_with_self
        self.objects: dict[str, tuple[bytearray, FakePort]] = {}
        self.gate = threading.Event()  # cleared: fetches and puts hang, as with a stopped owner
        self.gate.set()


class FakePort:
    """One process's client of the fabric, on one device. Touches memory at once, whatever streams have queued."""

    def __init__(self, fabric: FakeFabric, device: FakeDevice) -> None:
        self._fabric = fabric
        self._device = device
        self._regions: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        self._check_thread("register")
        if address % NPU_ALIGNMENT:
            raise self._device.breaks(f"register {address:#x}: not a multiple of 2 MB")
        if not self._device.owns(address, nbytes):
            raise self._device.breaks(f"register {address:#x}: not the device's memory")
        if len(self._regions) >= MAX_REGIONS:
            raise self._device.breaks(f"more than {MAX_REGIONS} registered regions")
        self._regions.append((address, address + nbytes))

    def put(self, key: str, address: int, nbytes: int) -> bool:
        """Like Mooncake's put, keeps the old value of a key that is there."""
        self._check_range("put", address, nbytes)
        self._fabric.gate.wait()
        if key in self._fabric.objects:
            return False
        self._fabric.objects[key] = (bytearray(ctypes.string_at(address, nbytes)), self)
        return True

    def fetch(self, key: str, address: int, capacity: int) -> int | None:
        """Bytes written; None when there is no such object; above `capacity` nothing was written."""
        self._check_range("fetch", address, capacity)
        self._fabric.gate.wait()
        found = self._fabric.objects.get(key)
        if found is None:
            return None
        data, owner = found
        if owner is not self and owner._device.place == self._device.place and not self._fabric.connects_with_self:
            raise SameDeviceError(f"not support connect with self device {self._device.place}")
        if len(data) <= capacity:
            ctypes.memmove(address, bytes(data), len(data))
        return len(data)

    def _check_thread(self, what: str) -> None:
        if not self._device.entered():
            raise self._device.breaks(f"{what} in a thread that has not set the device")

    def _check_range(self, what: str, address: int, nbytes: int) -> None:
        self._check_thread(what)
        if not any(start <= address and address + nbytes <= end for start, end in self._regions):
            raise self._device.breaks(f"{what} of memory that is not registered")
