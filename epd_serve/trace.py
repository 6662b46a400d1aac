"""Phase stamps of one process, stage or proxy: JSON lines of (subject, event, monotonic seconds) for the breakdown.

CLOCK_MONOTONIC is shared by the processes of one host, so stamps of different stages can be subtracted. Subjects are
the proxy's request ids, and at the stages feature keys and transfer ids too; the proxy's stamps `media` and
`dispatched` carry the keys and the transfer id, which joins the files. An event that took time says since when, in
`t0`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

PROXY = "proxy"
STEP = "step"
"""A step of an engine, of no request alone: its subject is "", and it says what it did (`engine/status/pending.py`)."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def clock_id() -> str:
    """Names the monotonic clock of this host, which begins anew with each boot. Containers of a host share it."""
    return _BOOT.read_text(encoding="ascii")[:8]


class Trace:
    """Appends stamps to one file; lines of several processes do not mix (O_APPEND, one write per line).

    Args:
        path: the file, or "" for a trace that does nothing.
        instance: whose stamps they are.
    """

    def __init__(self, path: str, instance: str) -> None:
        self._instance = instance
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else -1

    @property
    def is_written(self) -> bool:
        """Whether stamps go anywhere."""
        return self._fd >= 0

    def stamp(self, subject: str, event: str, **more: object) -> None:
        """Record that `event` happened to `subject` now. Lost where the disk is full: it must not end who serves."""
        if self._fd >= 0:
            whose = {"t": time.monotonic(), "clock": clock_id(), "instance": self._instance}
            record = {**whose, "subject": subject, "event": event, **more}
            with contextlib.suppress(OSError):
                os.write(self._fd, json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Device(Protocol):
    """What stamps ask of a device: a part of `npu_ops.memory.DeviceMemory`, which says what each does."""

    @property
    def host_visible(self) -> bool: ...

    def enter_thread(self) -> None: ...

    def fence(self) -> Callable[[], None]: ...


class DeviceTrace:
    """Stamps of what a device is told to do, made when it has done it: a model's thread runs ahead of its device.

    At once where the device works in the calling thread. Elsewhere a thread waits for the device, from the first stamp
    to `close` on; there is none where no stamp is written.
    """

    def __init__(self, trace: Trace, device: Device) -> None:
        self._trace, self._device = trace, device
        self._told: queue.SimpleQueue[tuple[Callable[[], None], str, str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def stamp(self, subject: str, event: str, **more: object) -> None:
        """Record that `event` happened to `subject` when the device has done all that this thread has queued on it."""
        if self._device.host_visible or not self._trace.is_written:
            self._trace.stamp(subject, event, **more)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="epd-device-trace", daemon=True)
            self._thread.start()
        self._told.put((self._device.fence(), subject, event, more))

    def close(self) -> None:
        """What was told before is stamped first, unless the device hangs."""
        self._told.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _wait(self) -> None:
        while (told := self._told.get()) is not None:
            done, subject, event, more = told
            try:
                self._device.enter_thread()
                done()
                self._trace.stamp(subject, event, **more)
            except Exception:  # one stamp is missing; those after it are made all the same
                logger.exception("no stamp %s of %s", event, subject)
