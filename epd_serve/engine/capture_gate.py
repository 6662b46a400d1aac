"""Keeps our threads off the device while their process may be capturing graphs.

A capture fails when another thread of its process makes a call that could wait for the device, copies or page-locks
memory (capture mode "global", which vLLM and vllm-ascend use). vLLM captures in `compile_or_warm_up_model`, after it
has registered the KV cache with us. So the gate of a worker is closed from `init_device` to the end of that call, and
whatever thread of ours uses the device passes the gate first. The model's thread does not: it is the one that captures.

A process without a worker of ours, and one that only has our threads, never closes it.
"""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

DEADLINE_S = 3600.0
"""Longer than any start of a stage: loading, compiling and capturing."""


class CaptureGate:
    """Open at first. Thread-safe. It opens by itself `deadline_s` after it was closed, so nobody waits for ever."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._open = threading.Event()
        self._open.set()
        self._until = 0.0

    def close(self) -> None:
        self._until = time.monotonic() + self._deadline_s
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def passed(self, wait_s: float = 0.0) -> bool:
        """Whether the device may be used, now or within `wait_s`."""
        if not self._open.wait(wait_s) and time.monotonic() >= self._until:
            logger.error(
                "vLLM has not warmed its model up within %g s of the worker's start: KV links open nevertheless, and a "
                "graph that is still being captured may fail",
                self._deadline_s,
            )
            self._open.set()
        return self._open.is_set()


capture_gate = CaptureGate()
"""This process's."""
