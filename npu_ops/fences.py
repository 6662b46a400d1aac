"""Fences: "what was queued on this device so far is done", recorded by one thread and waited for by another.

A fence is recorded on the stream that is current in the thread that records it: in the model's thread that is the
stream the model runs on, in a thread of ours its own (`DeviceMemory.enter_thread`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class TimedFence(Protocol):
    """A fence that also tells when the device got there."""

    def wait(self) -> None:
        """Returns once the device got there. In any thread that has entered the device."""

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
        # blocking: a thread that waits for a layer sleeps, it must not take a core from those that launch kernels.
        self._event = module.Event(enable_timing=True, blocking=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: TimedFence) -> float | None:
        assert isinstance(earlier, EventFence)
        if not (earlier._event.query() and self._event.query()):
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def fence(device: torch.device) -> Callable[[], None]:
    """Record a fence on the current stream of `device`; the returned function waits for it, in any thread.

    The wait sets the device for its thread first, as Ascend demands of every thread that touches an NPU. CPU ops are
    synchronous, so there is nothing to wait for.
    """
    if device.type == "cpu":
        return _nothing
    module = getattr(torch, device.type)  # torch.cuda, or torch.npu once torch_npu is imported by vllm-ascend
    event = module.Event(blocking=True)
    event.record()

    def wait() -> None:
        module.set_device(device)
        event.synchronize()

    return wait


def _nothing() -> None:
    return None
