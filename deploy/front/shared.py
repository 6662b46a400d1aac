"""What the front doors of a launch have in common, and what outlives each of them and whoever looks after them."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.host.ports import BACKLOG

if TYPE_CHECKING:
    from proxy.workers.shared_counters import SharedCounters


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
        from proxy.workers.shared_counters import SharedCounters, shared_memory
        from proxy.workers.shared_ledger import COUNTS

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
        from proxy.workers.shared_counters import SharedCounters
        from proxy.workers.shared_ledger import COUNTS

        return SharedCounters(mmap.mmap(self.memory, 0), self.workers + 1, COUNTS)
