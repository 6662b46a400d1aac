"""Mooncake Store over Ascend between fake devices, as strict as its transport. For tests.

The calls and codes are those of `mooncake.store` (0.3.13.post1, with `ascend_direct_transport.cpp` behind it). Refused,
and noted in `FakeDevice.broken`, is what that transport refuses:

    a call of a thread that has not set the device
    a registration of host memory that the device did not allocate, or that overlaps what is registered
    a put or get of memory that is not registered
    a client without the process's Transfer Engine, where a second one would be begun
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.fake_npu.device import FakeDevice, RuleBrokenError

REFUSED, NOT_THERE = -600, -704


class FakeMaster:
    """What all clients store, by key, and the clients' modules."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def module(self, device: FakeDevice) -> Any:
        """`mooncake.store` of a process on that device."""
        return SimpleNamespace(
            MooncakeDistributedStore=lambda: FakeStore(self, device), ReplicateConfig=lambda: SimpleNamespace()
        )


class FakeStore:
    """`MooncakeDistributedStore`."""

    def __init__(self, master: FakeMaster, device: FakeDevice) -> None:
        self._values, self._device = master.values, device
        self.regions: list[tuple[int, int]] = []  # (address, end)

    def setup(self, host: str, metadata: str, segment: int, buffer: int, protocol: str, *rest: Any) -> int:
        assert (metadata, protocol) == ("P2PHANDSHAKE", "ascend")
        if not self._entered("setup"):
            return REFUSED
        if rest[-1] is None or rest[-1] is not self._device.engine:
            return self._breaks("a second engine in one process")
        return 0

    def get_hostname(self) -> str:
        return self._device.name

    def register_buffer(self, address: int, nbytes: int) -> int:
        if not self._entered("register a buffer"):
            return REFUSED
        if not self._device.owns_host(address, nbytes):
            return self._breaks(f"register {nbytes} bytes at {address:#x}: not the device's memory")
        if any(address < end and start < address + nbytes for start, end in self.regions):
            return self._breaks(f"register {address:#x}: overlaps what is registered")
        self.regions.append((address, address + nbytes))
        return 0

    def unregister_buffer(self, address: int) -> int:
        if not self._entered("unregister a buffer"):
            return REFUSED
        kept = [region for region in self.regions if region[0] != address]
        gone, self.regions = len(kept) < len(self.regions), kept
        return 0 if gone else self._breaks(f"unregister {address:#x}, which is not registered")

    def get_size(self, key: str) -> int:
        return len(self._values[key]) if self._entered("ask") and key in self._values else NOT_THERE

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], _: Any
    ) -> list[int]:
        parts = list(zip(addresses[0], sizes[0], strict=True))
        if not self._reaches(parts):
            return [REFUSED]
        self._values.setdefault(keys[0], b"".join(ctypes.string_at(*part) for part in parts))
        return [0]

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        parts = list(zip(addresses[0], sizes[0], strict=True))
        if not self._reaches(parts):
            return [REFUSED]
        return [self._read(keys[0], 0, parts)]

    def get_into_ranges(self, addresses: Any, keys: Any, _: Any, starts: Any, sizes: Any) -> list[list[list[int]]]:
        part = (addresses[0], sizes[0][0][0])
        if not self._reaches([part]):
            return [[[REFUSED]]]
        return [[[self._read(keys[0][0], starts[0][0][0], [part])]]]

    def remove(self, key: str, force: bool) -> int:
        assert force
        return 0 if self._entered("remove") and self._values.pop(key, None) is not None else NOT_THERE

    def close(self) -> None:
        self._entered("close")

    def _read(self, key: str, start: int, parts: Sequence[tuple[int, int]]) -> int:
        if key not in self._values:
            return NOT_THERE
        for address, nbytes in parts:
            ctypes.memmove(address, self._values[key][start : start + nbytes], nbytes)
            start += nbytes
        return start

    def _reaches(self, parts: Sequence[tuple[int, int]]) -> bool:
        if not self._entered("transfer"):
            return False
        for address, nbytes in parts:
            if not any(begin <= address and address + nbytes <= end for begin, end in self.regions):
                self._breaks(f"transfer of {nbytes} bytes at {address:#x}, which are not registered")
                return False
        return True

    def _entered(self, what: str) -> bool:
        try:
            self._device.check_entered(what)
        except RuleBrokenError:
            return False  # it is noted
        return True

    def _breaks(self, rule: str) -> int:
        self._device.breaks(rule)
        return REFUSED
