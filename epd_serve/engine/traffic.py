"""The traffic board: where the processes of one instance say that they need the network now, and for how long.

EPD-Serve §3.3, precise scheduling: KV packets leave the link to what is more urgent. Fetches of features from the
second tier announce themselves (`engine/ec/listener.py`); a KV link looks (`quiet_until`) before it sends a packet that
can wait. `collective` is for the collective phases of tensor parallelism; nothing announces it yet, because vLLM offers
no hook around its collectives.

A small mapped file of slots, one per kind and announcing process, each a deadline on CLOCK_MONOTONIC (which the
processes of a host share). No locks between processes: a slot has one writer; a read that meets a write may see a wrong
number, which costs one packet a moment. An announcer that died is harmless, for a deadline passes by itself.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["fetch", "collective"]

KINDS: tuple[Kind, ...] = ("fetch", "collective")
LONGEST_S = 5.0
"""No announcement lasts longer: what a slot says beyond that is no time of this boot, or half a write."""

_ANNOUNCERS = 64  # per kind; processes beyond share slots, and cut each other's announcements short
_SLOT_BYTES = 8
_BYTES = len(KINDS) * _ANNOUNCERS * _SLOT_BYTES


class TrafficBoard:
    """Made by whoever opens it first; removed by the launcher, with the instance's sockets. Thread-safe.

    Args:
        path: the file, or "" for a board on which nobody ever announces anything.
        announcer: which process of the instance announces here: 0 the scheduler's, 1 + rank a worker's. For those who
            only look it means nothing.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, announcer: int = 0) -> None:
        self._announcer = announcer % _ANNOUNCERS
        self._lock = threading.Lock()  # guards _running
        self._running: dict[Kind, list[float]] = {kind: [] for kind in KINDS}  # deadlines
        self._slots = memoryview(_mapped(path)).cast("d") if path else None

    @contextmanager
    def announce(self, kind: Kind, for_s: float) -> Iterator[None]:
        """The network is wanted until this is left, or for `for_s` (`LONGEST_S` at most) if it is never left."""
        until = time.monotonic() + min(for_s, LONGEST_S)
        with self._lock:
            self._running[kind].append(until)
            self._show(kind)
        try:
            yield
        finally:
            with self._lock:
                self._running[kind].remove(until)
                self._show(kind)

    def quiet_until(self, now: float) -> float:
        """Until when (`time.monotonic()`) that which can wait should wait. Not after `now`: nobody wants the network.

        It may be left earlier: ask again when it matters.
        """
        return max((until for until in self._slots or () if until <= now + LONGEST_S), default=0.0)

    def _show(self, kind: Kind) -> None:
        if self._slots is not None:
            self._slots[KINDS.index(kind) * _ANNOUNCERS + self._announcer] = max(self._running[kind], default=0.0)


def _mapped(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _BYTES)  # whoever comes first; the same size for all, so it cuts nothing off
        return mmap.mmap(fd, _BYTES)
    finally:
        os.close(fd)
