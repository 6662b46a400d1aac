"""All records of one process, from a request's arrival to its end, and what can be asked of them.

Those that have ended are kept in a bounded memory: the newest, and of older ones those that failed or were slow. Each
is packed into bytes, which say exactly what they take and cost the garbage collector nothing. Half of the room is for
the newest. What leaves that half goes to the failed ones, if it is one, or to the slow ones, if it is slower than the
fastest of them; those have a quarter each. Slow ones are forgotten after an hour, or one bad minute would be all that
is remembered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, nlargest
from typing import Any

import msgspec
from msgspec import Struct

from proxy.config.limits import Planned, RecordLimits, Slo
from proxy.records.answer_end import answer_end
from proxy.records.counts import SLO, UNPLANNED, Counts, RequestCounts, failed_here, together
from proxy.records.record import Record
from proxy.records.report import report, summary

NEWEST, SLOWEST, FAILED = ORDERS = ("newest", "slowest", "failed")
MOST = 200
MOST_OF_A_NAME = 16
"""Requests that one client gave one name: all of each is told."""

SLOW_FOR_S, LOOK_S = 3600.0, 60.0
"""Slow ones are forgotten after so long, and looked through for that so often."""

OWN_BYTES = 300
"""What an entry takes beside its packed record."""

Sink = Callable[[Record], object]
"""Takes a record that has ended, in the event loop: within 5 µs, or it hands it to a thread."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Question(Struct, frozen=True):
    """What is asked of every front door.

    Attributes:
        id: of a request, ours or its client's: all of it. Without one a list, in this `order`, of at most `limit`.
        window_s: the counts of so many last seconds, a minute at most; 0: none.
        tenant: whose requests alone are told, or "" for all; counts are of all.
    """

    id: str = ""
    order: str = NEWEST
    limit: int = 0
    window_s: float = 0.0
    tenant: str = ""

    def is_about(self, one: Record | Kept) -> bool:
        return self.tenant in ("", one.tenant) and self.id in ("", one.id, one.client_id)


class RecordsAnswer(Struct, frozen=True):
    """What one front door answers, or all of them together.

    Attributes:
        requests: best first, as `proxy/records/report.py` writes them.
    """

    requests: list[dict[str, Any]] = []
    counts: Counts | None = None


def unanswered(question: Question, workers: int) -> RecordsAnswer:
    """Stands for so many workers that have not answered."""
    return RecordsAnswer(counts=Counts(serving=workers) if question.window_s else None)


def merged(question: Question, several: Iterable[RecordsAnswer]) -> RecordsAnswer:
    """The answers of several front doors as one. Of requests that one client gave the same name the newest is first."""
    every = list(several)
    requests = [request for one in every for request in one.requests]
    requests.sort(key=lambda one: one["total_s"] if question.order == SLOWEST else one["began"], reverse=True)
    counts = [one.counts for one in every if one.counts is not None]
    return RecordsAnswer(requests[: question.limit or MOST], together(counts) if counts else None)


class Kept(Struct, frozen=True, order=True):
    """A request that has ended. `ended`: moment of the process's clock. The slower one ranks higher."""

    total_s: float
    ended: float
    failed: bool
    id: str
    client_id: str
    tenant: str
    packed: bytes
    size_bytes: int

    def record(self) -> Record:
        return _decoder.decode(self.packed)


class KeptRecords:
    """Of one process."""

    def __init__(self, limits: RecordLimits) -> None:
        quarter, quarter_bytes = limits.requests // 4, limits.size_bytes // 4
        first = deque.append, deque.popleft
        self._newest = _Share(limits.requests - 2 * quarter, limits.size_bytes // 2, deque(), *first)
        self._failed = _Share(quarter, quarter_bytes, deque(), *first)
        self._slow = _Share(quarter, quarter_bytes, [], heappush, heappop)
        self._look_at = 0.0  # through the slow ones
        self._none = not limits.requests or not limits.size_bytes

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def size_bytes(self) -> int:
        return self._newest.size_bytes + self._failed.size_bytes + self._slow.size_bytes

    def __iter__(self) -> Iterator[Kept]:
        """In no order."""
        for share in (self._newest, self._failed, self._slow):
            yield from share.ones

    def add(self, record: Record) -> None:
        """It has ended."""
        if self._none:
            return
        ended = record.clock + record.total_s
        failed, packed = failed_here(record) or record.retried, _encoder.encode(record)
        names = record.id, record.client_id, record.tenant
        kept = Kept(record.total_s, ended, failed, *names, packed, len(packed) + OWN_BYTES)
        if ended >= self._look_at:
            self._look_at = ended + LOOK_S
            self._slow.forget(ended - SLOW_FOR_S)
        for old in self._newest.add(kept):
            if old.failed:
                self._failed.add(old)
            elif old.ended > ended - SLOW_FOR_S:
                self._slow.add(old)


class _Share:
    """One part of the room, and `ones` in it. `put` and `take`: how one comes there, and the next to leave goes."""

    def __init__(
        self,
        most: int,
        most_bytes: int,
        ones: Any,
        put: Callable[[Any, Kept], object],
        take: Callable[[Any], Kept],
    ) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._put, self._take = put, take
        self.ones = ones
        self.size_bytes = 0

    def add(self, kept: Kept) -> list[Kept]:
        """Returns those for which there is no room any more."""
        self._put(self.ones, kept)
        self.size_bytes += kept.size_bytes
        gone = []
        while len(self.ones) > self._most or self.size_bytes > self._most_bytes:
            gone.append(self._take(self.ones))
            self.size_bytes -= gone[-1].size_bytes
        return gone

    def forget(self, until: float) -> None:
        """Those that ended by then."""
        self.ones = [kept for kept in self.ones if kept.ended > until]
        heapify(self.ones)
        self.size_bytes = sum(kept.size_bytes for kept in self.ones)


class Records:
    """Of one process, in its event loop.

    Args:
        failed: called with what a sink has failed of.
        slo: what streamed answers are to keep to. planned: what was expected of them.

    Attributes:
        counts: what they add up to, which the process's metrics collect.
        ended: who takes records that have ended, in this order. One that fails costs the others nothing.
        lines: tells who waits in front of the stages (`Counts.lines`).
    """

    def __init__(
        self,
        limits: RecordLimits,
        failed: Callable[[Exception], object],
        slo: Slo = SLO,
        planned: Planned = UNPLANNED,
    ) -> None:
        self._running: dict[str, Record] = {}
        self._kept = KeptRecords(limits)
        self._failed = failed
        self.counts = RequestCounts(time.monotonic(), slo, planned)
        self.ended: list[Sink] = [self.counts.ended, self._kept.add]
        self.lines: Callable[[], dict[str, dict[str, float]]] = dict

    def begin(self, record: Record) -> None:
        """It has arrived."""
        self._running[record.id] = record

    def arrived(self, record: Record, kind: str) -> None:
        """It asks stages for something, `text` or `media`, and has not been refused yet."""
        record.kind = kind
        self.counts.asked(kind, time.monotonic(), requests=1)

    def prompt_known(self, record: Record, items: int, item_tokens: float, prompt_tokens: float) -> None:
        """How much it asks for is known: tokens of its items, and of its prompt with them."""
        sizes = {"items": items, "item_tokens": item_tokens, "prompt_tokens": prompt_tokens}
        self.counts.asked(record.kind, time.monotonic(), known_prompts=1, **sizes)

    def end(self, record: Record, last: bytes) -> None:
        """It has ended, with its outcome; an answer with these bytes."""
        del self._running[record.id]
        record.total_s = time.monotonic() - record.clock
        if record.status == 200 and last:
            ending = answer_end(last)
            record.finish = ending.finish
            record.prompt_tokens, record.completion_tokens = ending.prompt_tokens, ending.completion_tokens
            if not record.prefill:  # for a D all that P has computed is cached
                record.cached_tokens = ending.cached_tokens
        for sink in self.ended:
            try:
                sink(record)
            except Exception as error:  # noqa: BLE001 - whatever one sink fails of
                self._failed(error)

    def look(self, question: Question) -> RecordsAnswer:
        """What this process knows."""
        counts = None
        if question.window_s:
            counts = self.counts.counts(time.monotonic(), question.window_s)
            counts.running, counts.lines = len(self._running), self.lines()
            counts.waiting = sum(not (one.attempts or one.encode) for one in self._running.values())
        told = report if question.id else summary
        return merged(question, [RecordsAnswer([told(record) for record in self._found(question)], counts)])

    def _found(self, question: Question) -> list[Record]:
        most = MOST_OF_A_NAME if question.id else min(question.limit, MOST)
        running = [] if question.order != NEWEST else filter(question.is_about, self._running.values())
        found = nlargest(most, running, key=lambda one: one.clock)
        for record in found:
            record.total_s = time.monotonic() - record.clock
        kept = (one for one in self._kept if question.is_about(one) and (one.failed or question.order != FAILED))
        best = nlargest(most, kept, key=lambda one: one.total_s if question.order == SLOWEST else one.ended)
        return found + [one.record() for one in best]
