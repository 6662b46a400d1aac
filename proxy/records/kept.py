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
from typing import NamedTuple

import msgspec

from proxy.config.limits import RecordLimits
from proxy.records.record import Record

SLOW_FOR_S = 3600.0
OWN_BYTES = 300
"""What an entry takes beside its packed record."""

SERIOUS = (408, 422, 429)
"""Statuses below 500 that say more of this server than of the request."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Kept(NamedTuple):
    """One that has ended. `ended`: seconds since the epoch. `number`: in order of ending, which tells equals apart."""

    total_s: float
    number: int
    ended: float
    id: str
    client_id: str
    tenant: str
    failed: bool
    packed: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.packed) + OWN_BYTES

    def record(self) -> Record:
        return _decoder.decode(self.packed)


class KeptRecords:
    """Of one process."""

    def __init__(self, limits: RecordLimits) -> None:
        self._newest = _Share(limits.requests - 2 * (limits.requests // 4), limits.size_bytes // 2)
        self._failed = _Share(limits.requests // 4, limits.size_bytes // 4)
        self._slow = _Share(limits.requests // 4, limits.size_bytes // 4)
        self._newest_ones: deque[Kept] = deque()
        self._failed_ones: deque[Kept] = deque()
        self._slow_ones: list[Kept] = []  # a heap: the fastest first
        self._none_ended_before = math.inf  # of the slow ones: until then none is to be forgotten
        self._numbers = itertools.count()
        self._none = not limits.requests or not limits.size_bytes

    def __len__(self) -> int:
        return self._newest.count + self._failed.count + self._slow.count

    @property
    def size_bytes(self) -> int:
        return self._newest.size_bytes + self._failed.size_bytes + self._slow.size_bytes

    def __iter__(self) -> Iterator[Kept]:
        """In no order."""
        return itertools.chain(self._newest_ones, self._failed_ones, self._slow_ones)

    def add(self, record: Record) -> None:
        """It has ended."""
        if self._none:
            return
        ended = record.began + record.total_s
        packed = _encoder.encode(record)
        one = Kept(
            record.total_s,
            next(self._numbers),
            ended,
            record.id,
            record.client_id,
            record.tenant,
            is_failed(record),
            packed,
        )
        self._newest_ones.append(one)
        self._newest.add(one)
        while self._newest.is_over:
            self._newest.remove(old := self._newest_ones.popleft())
            if old.failed:
                self._keep_failed(old)
            else:
                self._keep_slow(old, ended)

    def _keep_failed(self, one: Kept) -> None:
        self._failed_ones.append(one)
        self._failed.add(one)
        while self._failed.is_over:
            self._failed.remove(self._failed_ones.popleft())

    def _keep_slow(self, one: Kept, now: float) -> None:
        heap, share = self._slow_ones, self._slow
        if share.would_be_over(one) and heap and one.total_s <= heap[0].total_s and heap[0].ended > now - SLOW_FOR_S:
            return
        heapq.heappush(heap, one)
        share.add(one)
        self._none_ended_before = min(self._none_ended_before, one.ended)
        if share.is_over:
            if self._none_ended_before <= now - SLOW_FOR_S:
                self._forget_slow(now - SLOW_FOR_S)
            while share.is_over:
                share.remove(heapq.heappop(self._slow_ones))

    def _forget_slow(self, until: float) -> None:
        """Those that ended by then."""
        for old in self._slow_ones:
            if old.ended <= until:
                self._slow.remove(old)
        self._slow_ones = [one for one in self._slow_ones if one.ended > until]
        heapq.heapify(self._slow_ones)
        self._none_ended_before = min((one.ended for one in self._slow_ones), default=math.inf)


class _Share:
    """One part of the room, and what is in it."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.count = self.size_bytes = 0

    def add(self, one: Kept) -> None:
        self.count += 1
        self.size_bytes += one.size_bytes

    def remove(self, one: Kept) -> None:
        self.count -= 1
        self.size_bytes -= one.size_bytes

    @property
    def is_over(self) -> bool:
        return self.count > self._most or self.size_bytes > self._most_bytes

    def would_be_over(self, one: Kept) -> bool:
        return self.count + 1 > self._most or self.size_bytes + one.size_bytes > self._most_bytes


def is_failed(record: Record) -> bool:
    """Whether it says that something is wrong here: an error of ours, a refusal, an answer cut off, a retry."""
    return record.status >= 500 or record.status in SERIOUS or record.outcome == "broken" or record.retried
