"""What `torch.npu` does about cores, with its rules, on no device at all. For tests.

A broken rule raises `RuleBrokenError` of this module and stays in `FakeCores.broken`, whoever swallows the exception.
"""

from __future__ import annotations

from typing import Any


class RuleBrokenError(RuntimeError):
    """The caller did what an NPU refuses or ignores."""


class FakeCores:
    """Stands in for the module `torch.npu` in one process.

    Attributes:
        cube, vector: cores of each device; 0 where the runtime does not know.
        broken: every rule that was broken, in order.
        limits: limit by device, as set.
        obeys: how many cores fewer than asked for a limit leaves (a runtime that rounds).
    """

    def __init__(self, cube: int = 24, vector: int = 48, devices: int = 1) -> None:
        self.cube = cube
        self.vector = vector
        self.broken: list[str] = []
        self.limits: dict[int, dict[str, int]] = {}
        self.obeys = 0
        self._devices = devices
        self._current: int | None = None
        self._worked = False
        self._limited = False
        self.set_device: Any = self._set_device  # a name of the module, which may be replaced

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else int(str(device).partition(":")[2] or 0)
        if not 0 <= index < self._devices:
            raise self._breaks(f"set_device({device}) of {self._devices} devices")
        self._current = index

    def current_device(self) -> int:
        if self._current is None:
            raise self._breaks("current_device without set_device")
        return self._current

    def work(self) -> None:
        """Any operation on the device."""
        if self._current is None:
            raise self._breaks("an operation without set_device")
        self._worked = True

    def set_device_limit(self, device: int, cube_num: int = -1, vector_num: int = -1) -> None:
        self._check(device)
        if self._limited:
            raise self._breaks("set_device_limit, twice")  # torch_npu: "You can only set this interface once."
        self._limited = True
        if self._worked:
            raise self._breaks("set_device_limit after an operation")
        for count, there in ((cube_num, self.cube), (vector_num, self.vector)):
            if count != -1 and not 1 <= count <= there:
                raise self._breaks(f"set_device_limit to {count} of {there} cores")
        whole = {"cube_core_num": self.cube, "vector_core_num": self.vector}
        counts = {"cube_core_num": cube_num, "vector_core_num": vector_num}
        self.limits[device] = {
            kind: whole[kind] if count == -1 else count - self.obeys for kind, count in counts.items()
        }

    def get_device_limit(self, device: int) -> dict[str, int]:
        self._check(device)
        return dict(self.limits.get(device, {"cube_core_num": self.cube, "vector_core_num": self.vector}))

    def _check(self, device: Any) -> None:
        if isinstance(device, bool) or not isinstance(device, int):
            raise TypeError(f"device must be an int, but got {type(device).__name__}")
        if device != self._current:
            raise self._breaks(f"limits of device {device}, which is not the one that was set")

    def _breaks(self, rule: str) -> RuleBrokenError:
        self.broken.append(rule)
        return RuleBrokenError(rule)
