"""What waits for one link, between the threads that put and the one that takes: packets as slices, and ends.

The order is `epd_serve.kv.link_queue`'s. Slices of a packet are put one behind the other with one deadline, so they
leave in order, and what is more urgent goes between them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from epd_serve.engine.kv.link_jobs import DoneJob, PacketJob, SliceJob
from epd_serve.kv.link_queue import LinkQueue
from epd_serve.kv.slices import cut, packet_bytes
from epd_serve.wire import TransferKey


class Outbox:
    """A `LinkQueue` with a lock. `seconds`: how long the link moves so many bytes."""

    def __init__(self, slice_bytes: int, seconds: Callable[[int], float]) -> None:
        self._slice_bytes = slice_bytes
        self._lock = threading.Lock()
        self._queue: LinkQueue[SliceJob | DoneJob] = LinkQueue(seconds)

    def put(self, job: PacketJob, deadline: float) -> None:
        slices = cut(job.packet, job.block_bytes, self._slice_bytes)
        job.slices_left = len(slices)
        with self._lock:
            for part in slices:
                members = {key for key, _ in part.parts}
                outs = tuple(out for out in job.outs if out.key in members)
                self._queue.put(SliceJob(job, part, outs), deadline, packet_bytes(part, job.block_bytes), members)

    def end(self, job: DoneJob) -> None:
        with self._lock:
            self._queue.put_end(job.out.key, job)

    def hasten(self, key: TransferKey, deadline: float) -> None:
        with self._lock:
            self._queue.hasten(key, deadline)

    def drop(self, key: TransferKey) -> None:
        with self._lock:
            self._queue.drop(key)

    def backlog_bytes(self, deadline: float = math.inf) -> int:
        """Bytes that go before a packet with this deadline."""
        with self._lock:
            return self._queue.backlog_bytes(deadline)

    def take(self, now: float, quiet_until: float) -> SliceJob | DoneJob | float | None:
        """See `LinkQueue.take`."""
        with self._lock:
            return self._queue.take(now, quiet_until)

    def empty(self) -> bool:
        with self._lock:
            return not self._queue.members()
