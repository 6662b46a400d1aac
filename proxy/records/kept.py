"""Requests that have ended, kept in a bounded memory: the newest, and of older ones those that failed or were slow.

Each is packed into bytes, which say exactly what they take and cost the garbage collector nothing. Half of the room is
for the newest. What leaves that half goes to the failed ones, if it is one, or to the slow ones, if it is slower than
the fastest of them; those have a quarter each. Slow ones are forgotten after an hour, or one bad minute would be all
that is remembered.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from proxy.config.limits import RecordLimits
from proxy.records.record import Record

SLOW_FOR_S = 3600.0
OWN_BYTES = 300
"""What an entry takes beside its packed record."""

SERIOUS = (408, 422, 429)
"""Statuses below 500 that say more of this server than of the request."""

Ones = TypeVar("Ones", "deque[Kept]", "list[Kept]")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Kept(Struct, frozen=True, order=True):
    """One that has ended. `ended`: seconds since the epoch. `number`: in order of ending, which tells equals apart."""

    total_s: float
    number: int
    ended: float
    id: str
    client_id: str
    tenant: str
    failed: bool
    packed: bytes
    size_bytes: int

    def record(self) -> Record:
        return _decoder.decode(self.packed)


class KeptRecords:
    """Of one process."""

    def __init__(self, limits: RecordLimits) -> None:
        quarter, quarter_bytes = limits.requests // 4, limits.size_bytes // 4
        self._newest = _Share(limits.requests - 2 * quarter, limits.size_bytes // 2, deque[Kept]())
        self._failed = _Share(quarter, quarter_bytes, deque[Kept]())
        self._slow = _Share(quarter, quarter_bytes, list[Kept]())  # a heap: the fastest first
        self._none_ended_before = math.inf  # of the slow ones: until then none is to be forgotten
        self._numbers = itertools.count()
        self._none = not limits.requests or not limits.size_bytes

    def __len__(self) -> int:
        return sum(len(share.ones) for share in (self._newest, self._failed, self._slow))

    @property
    def size_bytes(self) -> int:
        return self._newest.size_bytes + self._failed.size_bytes + self._slow.size_bytes

    def __iter__(self) -> Iterator[Kept]:
        """In no order."""
        return itertools.chain(self._newest.ones, self._failed.ones, self._slow.ones)

    def add(self, record: Record) -> None:
        """It has ended."""
        if self._none:
            return
        packed = _encoder.encode(record)
        one = Kept(
            record.total_s,
            next(self._numbers),
            record.began + record.total_s,
            record.id,
            record.client_id,
            record.tenant,
            is_failed(record),
            packed,
            len(packed) + OWN_BYTES,
        )
        newest, failed = self._newest, self._failed
        newest.ones.append(one)
        newest.size_bytes += one.size_bytes
        while newest.is_over():
            old = newest.ones.popleft()
            newest.size_bytes -= old.size_bytes
            if not old.failed:
                self._keep_slow(old, one.ended)
                continue
            failed.ones.append(old)
            failed.size_bytes += old.size_bytes
            while failed.is_over():
                failed.size_bytes -= failed.ones.popleft().size_bytes

    def _keep_slow(self, one: Kept, now: float) -> None:
        slow = self._slow
        heap = slow.ones
        if slow.is_over(one) and heap and one.total_s <= heap[0].total_s and heap[0].ended > now - SLOW_FOR_S:
            return
        heapq.heappush(heap, one)
        slow.size_bytes += one.size_bytes
        self._none_ended_before = min(self._none_ended_before, one.ended)
        if slow.is_over():
            if self._none_ended_before <= now - SLOW_FOR_S:
                self._forget_slow(now - SLOW_FOR_S)
            while slow.is_over():
                slow.size_bytes -= heapq.heappop(slow.ones).size_bytes

    def _forget_slow(self, until: float) -> None:
        """Those that ended by then."""
        slow = self._slow
        slow.ones = [one for one in slow.ones if one.ended > until]
        slow.size_bytes = sum(one.size_bytes for one in slow.ones)
        heapq.heapify(slow.ones)
        self._none_ended_before = min((one.ended for one in slow.ones), default=math.inf)


@dataclass(slots=True)
class _Share(Generic[Ones]):
    """One part of the room, and what is in it."""

    most: int
    most_bytes: int
    ones: Ones
    size_bytes: int = 0

    def is_over(self, more: Kept | None = None) -> bool:
        """Whether there is too much in it, or would be with one more."""
        count, size_bytes = len(self.ones), self.size_bytes
        if more is not None:
            count, size_bytes = count + 1, size_bytes + more.size_bytes
        return count > self.most or size_bytes > self.most_bytes


def is_failed(record: Record) -> bool:
    """Whether it says that something is wrong here: an error of ours, a refusal, an answer cut off, a retry."""
    return record.status >= 500 or record.status in SERIOUS or record.outcome == "broken" or record.retried
