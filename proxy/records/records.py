"""All records of one process: from a request's arrival to its end, and what can be asked of them."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from proxy.config.limits import Planned, RecordLimits, Slo
from proxy.records.answer_end import answer_end
from proxy.records.kept import Kept, KeptRecords
from proxy.records.minute import SLO, UNPLANNED, Counts, LastMinute, together
from proxy.records.record import Record
from proxy.records.report import report, summary

NEWEST, SLOWEST, FAILED = ORDERS = ("newest", "slowest", "failed")
MOST = 200
MOST_OF_A_NAME = 16
"""Requests that one client gave one name: all of each is told."""

Sink = Callable[[Record], object]
"""Takes a record that has ended, in the event loop: within 5 µs, or it hands it to a thread."""


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


class Records:
    """Of one process, in its event loop.

    Args:
        failed: called with what a sink has failed of.
        slo: what streamed answers are to keep to. planned: what was expected of them.

    Attributes:
        ended: who takes records that have ended, in this order. One that fails costs the others nothing.
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
        self._minute = LastMinute(time.monotonic(), slo, planned)
        self._failed = failed
        self.ended: list[Sink] = [self._minute.add, self._kept.add]

    def begin(self, record: Record) -> None:
        """It has arrived."""
        self._running[record.id] = record

    def arrived(self, record: Record, kind: str) -> None:
        """It asks stages for something, `text` or `media`, and has not been refused yet."""
        record.kind = kind
        self._minute.arrived(kind, time.monotonic())

    def prompt_known(self, record: Record, items: int, item_tokens: float, prompt_tokens: float) -> None:
        """How much it asks for is known: tokens of its items, and of its prompt with them."""
        self._minute.prompt_known(record.kind, items, item_tokens, prompt_tokens, time.monotonic())

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
        counts = self._counts(question.window_s) if question.window_s else None
        if question.id:
            return merged(question, [RecordsAnswer([report(record) for record in self._called(question)], counts)])
        if question.limit <= 0:
            return RecordsAnswer(counts=counts)
        return RecordsAnswer([summary(record) for record in self._listed(question)], counts)

    def _counts(self, window_s: float) -> Counts:
        counts = self._minute.counts(time.monotonic(), window_s)
        counts.running = len(self._running)
        counts.waiting = sum(not (one.attempts or one.encode) for one in self._running.values())
        return counts

    def _called(self, question: Question) -> list[Record]:
        name = question.id
        running = [self._as_of_now(one) for one in self._running_of(question) if name in (one.id, one.client_id)]
        ended = [one for one in self._kept_of(question) if name in (one.id, one.client_id)]
        return running[:MOST_OF_A_NAME] + [one.record() for one in heapq.nlargest(MOST_OF_A_NAME, ended, key=_number)]

    def _listed(self, question: Question) -> list[Record]:
        most, kept = min(question.limit, MOST), self._kept_of(question)
        if question.order == SLOWEST:
            return [one.record() for one in heapq.nlargest(most, kept)]
        if question.order == FAILED:
            failed = (one for one in kept if one.failed)
            return [one.record() for one in heapq.nlargest(most, failed, key=_number)]
        running = [self._as_of_now(one) for one in self._running_of(question)]
        ended = [one.record() for one in heapq.nlargest(most, kept, key=_number)]
        return sorted(running + ended, key=lambda one: one.began, reverse=True)[:most]

    def _running_of(self, question: Question) -> Iterable[Record]:
        return (one for one in self._running.values() if question.tenant in ("", one.tenant))

    def _kept_of(self, question: Question) -> Iterable[Kept]:
        return (one for one in self._kept if question.tenant in ("", one.tenant))

    def _as_of_now(self, record: Record) -> Record:
        record.total_s = time.monotonic() - record.clock
        return record


def _number(one: Kept) -> int:
    return one.number
