"""From the model's thread to the writer: features that wait to be stored, bounded by the device memory they keep.

vLLM may drop a feature from its encoder cache while it waits here; from then on the queue is what keeps its memory,
which was given to nobody else (`epd_serve.stage_memory`). Features of one batch may be views of one tensor, which lives
as long as any of them: memory is counted by the tensor that is kept, once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_QUEUED = 256
STALL_S = 3.0  # of no progress at all; whoever waits for a feature has taken to recomputing by then


@dataclass(frozen=True)
class Job:
    key: str
    feature: torch.Tensor | None  # None: the store has it, as far as is known
    written: Callable[[], None]  # wait until the device has written it
    again: bool = False


class WriteQueue:
    """First in, first out. A job counts until the writer is done with it.

    Args:
        bound_bytes: of memory that may be kept; one tensor that is larger is taken when nothing else is there.
        stall_s: how long the model's thread may wait for room while the writer gets nothing done.
    """

    def __init__(self, bound_bytes: int, *, stall_s: float = STALL_S) -> None:
        self._bound_bytes, self._stall_s = bound_bytes, stall_s
        self._changed = threading.Condition()  # guards all below
        self._jobs: deque[Job] = deque()
        self._underway: list[str] = []  # keys in the queue or in the writer's hands
        self._kept: Counter[int] = Counter()  # jobs by the address of the tensor that they keep
        self._kept_bytes = 0
        self._progress = time.monotonic()  # when the writer was last done with a job, or began the first
        self._closed = False

    def put(self, job: Job) -> bool:
        """False: there was no room in time; the caller says what becomes of the feature."""
        with self._changed:
            while not self._closed and not self._has_room(job):
                left_s = self._progress + self._stall_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            if self._closed:
                return False
            if not self._underway:
                self._progress = time.monotonic()
            self._underway.append(job.key)
            self._jobs.append(job)
            if job.feature is not None:
                address, nbytes = _kept_by(job.feature)
                self._kept_bytes += nbytes if not self._kept[address] else 0
                self._kept[address] += 1
            self._changed.notify_all()
            return True

    def get(self) -> Job | None:
        """The next job, which `done` ends; None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None

    def done(self, job: Job) -> None:
        with self._changed:
            self._underway.remove(job.key)
            if job.feature is not None:
                address, nbytes = _kept_by(job.feature)
                self._kept[address] -= 1
                if not self._kept[address]:
                    del self._kept[address]
                    self._kept_bytes -= nbytes
            self._progress = time.monotonic()
            self._changed.notify_all()

    def keys(self) -> list[str]:
        """Of what is on its way into the store."""
        with self._changed:
            return list(self._underway)

    def close(self) -> None:
        """What is queued can still be had; nothing is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, job: Job) -> bool:
        if len(self._underway) >= MAX_QUEUED:
            return False
        if job.feature is None or not self._kept:
            return True
        address, nbytes = _kept_by(job.feature)
        return address in self._kept or self._kept_bytes + nbytes <= self._bound_bytes


def _kept_by(feature: torch.Tensor) -> tuple[int, int]:
    """Address and size of the memory that a tensor keeps; one without such memory is the writer's to refuse."""
    if feature.layout is not torch.strided:
        return id(feature), 0
    storage = feature.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
