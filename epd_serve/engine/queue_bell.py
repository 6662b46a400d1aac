"""Lets vLLM's processes wait for each other's messages asleep, where stages share cores (CPU).

vLLM's queues between EngineCore and workers (`MessageQueue`, distributed/device_communicators/shm_broadcast.py) wait in
a `SpinCondition`: a loop around `sched_yield` for a second after each message, then a ZMQ subscription. With a core per
process the loop saves microseconds; where stages share cores it takes the time that the next stage computes in. The
subscription cannot take its place, `busy_loop_s` of 0 or not: its publisher has a high-water mark of 1 and drops the
second of two messages within about a millisecond, which every step sends. The reader then sleeps until vLLM looks again
(5 s later in 0.32, never in 0.23).

So the condition is replaced by one of the same four methods around a `Bell`. Messages stay where they are, in vLLM's
ring in shared memory.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from pathlib import Path
from typing import Any

from epd_serve.wake import Bell

logger = logging.getLogger(__name__)

_LONGEST_S = 5.0  # then the reader looks into the ring all the same, as vLLM 0.32's does
_PARAMETERS = {"is_reader", "context", "notify_address"}
_METHODS = {"record_read", "cancel", "wait", "notify"}


class BellCondition:
    """Stands in for vLLM's `SpinCondition`: the writer of a queue rings, its readers sleep.

    Args:
        notify_address: `ipc://PATH`, vLLM's name for this queue's notifications; nothing else is bound there.
    """

    local_notify_socket = read_cancel_socket = write_cancel_socket = None  # those of vLLM's, which it closes

    def __init__(self, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float = 0.0) -> None:
        path = Path(notify_address.removeprefix("ipc://"))
        self._bell = Bell(path)
        if not is_reader:
            weakref.finalize(self, _remove, path)

    def record_read(self) -> None:
        """Nothing depends on when the last message was read."""

    def cancel(self) -> None:
        """Wake the reader to shut down: vLLM has set its flag, at which it looks next."""
        self._bell.ring()

    def notify(self) -> None:
        self._bell.ring()

    def wait(self, timeout_ms: int | None = None) -> None:
        self._bell.wait(_LONGEST_S if timeout_ms is None else min(timeout_ms / 1e3, _LONGEST_S))


def wait_asleep() -> None:
    """Every queue that this process makes or opens from now on has a bell. Both ends of a queue need it."""
    from vllm.distributed.device_communicators import shm_broadcast

    vllms = getattr(shm_broadcast, "SpinCondition", None)
    if vllms is BellCondition:
        return
    if vllms is None or not _is_known(vllms):
        logger.warning("this vLLM waits differently between steps; idle stages may take cores from busy ones")
        return
    shm_broadcast.SpinCondition = BellCondition


def _is_known(condition: type) -> bool:
    methods = {name for name, _ in inspect.getmembers(condition, inspect.isfunction) if not name.startswith("_")}
    return methods == _METHODS and set(inspect.signature(condition).parameters) >= _PARAMETERS


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # its folder may be gone
        path.unlink(missing_ok=True)
