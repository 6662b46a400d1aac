"""Fences: "what was queued on this device so far is done", recorded by one thread and waited for by another.

A fence is recorded on the stream that is current in the thread that records it: in the model's thread that is the
stream the model runs on, in a thread of ours its own (`DeviceMemory.enter_thread`).

Waiting is asking again and again (`wait_until`), on every device. `event.synchronize` has no bound, and on an NPU it
waits first for all that any thread has yet to launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

DEADLINE_S = 60.0
"""How long work that was queued may take. No step of a model does; a device that takes longer is taken for broken."""

_TIGHT_POLLS = 20  # a layer that is about to end, a small copy
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 100e-6


class DeviceHungError(RuntimeError):
    """The device did not get to a fence in time. What was queued may still run: no memory that it uses is free."""


class TimedFence(Protocol):
    """A fence that also tells when the device got there."""

    def wait(self) -> None:
        """Returns once the device got there. In any thread that has entered the device. Raises DeviceHungError."""

    def seconds_since(self, earlier: TimedFence) -> float | None:
        """Device time from `earlier`, a fence of the same device; None while either is not reached. Never waits."""


class ReachedFence:
    """Of a device that works in the calling thread: reached when recorded."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Nothing is queued."""

    def seconds_since(self, earlier: TimedFence) -> float | None:
        assert isinstance(earlier, ReachedFence)
        return self._at_s - earlier._at_s


class EventFence:
    """An event on the current stream of this thread. `module`: `torch.cuda` or `torch.npu`."""

    def __init__(self, module: Any) -> None:
        self._event = module.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        wait_until(self._event.query)

    def seconds_since(self, earlier: TimedFence) -> float | None:
        assert isinstance(earlier, EventFence)
        if not (earlier._event.query() and self._event.query()):
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def wait_until(
    reached: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Asks tightly at first, then with pauses of at most 100 µs: who waits for a layer takes no core from the threads
    that launch kernels.

    Raises:
        DeviceHungError: not reached within `DEADLINE_S`.
    """
    for _ in range(_TIGHT_POLLS):
        if reached():
            return
    deadline, pause_s = clock() + DEADLINE_S, _FIRST_PAUSE_S
    while not reached():
        if clock() > deadline:
            raise DeviceHungError(f"the device has not done in {DEADLINE_S:g} s what was queued on it")
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
