"""What joins fake devices: one registered memory per process, objects put from it and fetched into it. For tests.

As strict as Mooncake's Ascend Direct Transport, and as blind: it touches memory at once, whatever streams have queued.

    thread without set_device          refused          address not a multiple of 2 MB       register refused
    more than 256 regions              refused          memory not registered                put and fetch refused
    another process on the same device refused ("not support connect with self device") unless the fabric allows it
"""

from __future__ import annotations

import ctypes
import threading

from npu_ops.fake.device import FakeDevice
from npu_ops.memory import MAX_REGIONS, NPU_ALIGNMENT, DeviceMemoryError


class SameDeviceError(DeviceMemoryError):
    """Two processes of one NPU cannot connect before CANN 9.1."""


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
        self._device.check_entered("register")
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
        stored = self._fabric.objects.get(key)
        if stored is None:
            return None
        data, owner = stored
        if owner is not self and owner._device.place == self._device.place and not self._fabric.connects_with_self:
            raise SameDeviceError(f"not support connect with self device {self._device.place}")
        if len(data) <= capacity:
            ctypes.memmove(address, bytes(data), len(data))
        return len(data)

    def _check_range(self, what: str, address: int, nbytes: int) -> None:
        self._device.check_entered(what)
        if not any(start <= address and address + nbytes <= end for start, end in self._regions):
            raise self._device.breaks(f"{what} of memory that is not registered")
