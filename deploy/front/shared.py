"""What the front doors of a launch have in common, and what outlives each of them and whoever looks after them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from deploy.host.ports import BACKLOG
from deploy.host.state import State
from epd_serve.errors import ConfigError
from epd_serve.instances import IncarnationId
from proxy.workers.shared_counters import Cell

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings
    from proxy.workers.shared_counters import SharedCounters, SharedLedger

SLOTS = "slots"
"""The section of the state."""

RATE_S = 1.0
"""For so long is counted how many requests come."""


@dataclass(frozen=True)
class Shared:
    """Made once, by the process whose children they are.

    Attributes:
        listening: what all of them accept from; connections wait there while none is ready.
        feed: bound to the path of a socket, where they hear of the instances.
        memory: descriptor of the counters, which have a row for each of them and one for a follower.
    """

    listening: socket.socket
    feed: socket.socket
    memory: int
    workers: int

    @classmethod
    def of(cls, listening: socket.socket, feed: socket.socket, workers: int) -> Shared:
        """With counters of its own; `listening` and `feed` are bound.

        Raises:
            ConfigError: no room for the counters.
        """
        from proxy.workers.shared_counters import COUNTS, SharedCounters, shared_memory

        listening.listen(BACKLOG)
        feed.listen(BACKLOG)
        return cls(listening, feed, shared_memory(SharedCounters.size_bytes(workers + 1, COUNTS)), workers)

    def refuse(self) -> None:
        """Connections are refused from now on, also where others hold the socket, too."""
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Where nobody uses it any more. `feed` is closed by who serves it."""
        self.listening.close()
        os.close(self.memory)

    def counters(self) -> SharedCounters:
        from proxy.workers.shared_counters import COUNTS, SharedCounters

        return SharedCounters(mmap.mmap(self.memory, 0), self.workers + 1, COUNTS)


class Slots:
    """Which slot of the counters each life of an instance is counted in, from one life of this process to the next."""

    def __init__(self, state: State, ledger: SharedLedger, slots: int) -> None:
        self._state = state
        self._ledger = ledger
        self._slots = slots
        self._taken = msgspec.msgpack.decode(state.read(SLOTS) or b"\x80", type=dict[str, int])
        for name, slot in self._taken.items():
            self._ledger.place(_id_of(name), slot)

    def __call__(self, incarnation_id: IncarnationId) -> int:
        """Of a new one: a slot that nobody has, or had a past life of whom nothing is held any more.

        Raises:
            ConfigError: all are held.
        """
        name = "\0".join(incarnation_id)
        if name not in self._taken:
            if len(self._taken) == self._slots:
                self._give_back(incarnation_id)
            free = set(range(self._slots)).difference(self._taken.values())
            if not free:
                raise ConfigError(f"no room for the counts of {incarnation_id[0]}: {self._slots} others are held")
            self._taken[name] = min(free)
            self._ledger.place(incarnation_id, self._taken[name])
            self._state.write(SLOTS, msgspec.msgpack.encode(self._taken))
        return self._taken[name]

    def _give_back(self, newest: IncarnationId) -> None:
        """Those of past lives of each instance that are held no more."""
        present = {_id_of(name)[0]: name for name in self._taken} | {newest[0]: ""}  # the latest of each
        for name in [name for name in self._taken if name not in present.values()]:
            if not self._ledger.total(_id_of(name)).held:
                del self._taken[name]


def _id_of(name: str) -> IncarnationId:
    id, incarnation = name.split("\0")
    return id, incarnation


async def pausable_s(settings: ProxySettings, counters: SharedCounters) -> float:
    """For how long requests may wait, if they come as they do now, before a queue is full and one is refused.

    Args:
        settings: of all front doors together.
    """
    begun, before = time.monotonic(), [counters.total(kind) for kind in (Cell.TEXTS, Cell.MEDIA)]
    await asyncio.sleep(RATE_S)
    seconds = time.monotonic() - begun
    text_per_s, media_per_s = (
        max(0, counters.total(kind) - then) / seconds
        for kind, then in zip((Cell.TEXTS, Cell.MEDIA), before, strict=True)
    )
    limits = settings.admission
    free = max(0, settings.max_in_flight - counters.total(Cell.REQUESTS))
    rooms = (
        (limits.text_queue, text_per_s),
        (limits.media_queue, media_per_s),
        (free, text_per_s + media_per_s),
    )
    return min(room / per_s if per_s else math.inf for room, per_s in rooms)
