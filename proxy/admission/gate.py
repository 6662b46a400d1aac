"""The gate in front of the stages: `proxy/admission/queue.py` with a clock, and waiters for whom it is a wait with an
end.

Lives in the proxy's event loop. Owns the waits, their deadlines and what a refusal says. What may be with the stages at
once is `proxy/admission/capacity.py`'s business. In a pause it lets nobody through, and no time passes in its queues.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from epd_serve.errors import OverloadedError
from proxy.admission.queue import AdmissionQueue
from proxy.admission.ticket import Capacity, Kind, Place, QueueFull, Ticket
from proxy.config.limits import AdmissionLimits
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.table import Pause
from proxy.request.client_deadline import DeadlineUnreachable

RELOOK_S = 0.1
"""While somebody waits: capacity follows from reports, which wake nobody."""

REMEMBERED = 32
"""Requests from which it is known how quickly, at best, an answer begins."""


class Gate:
    """One per process.

    Args:
        capacity: what may be with the stages now.
        pause: lets nobody through while it lasts; its clock is that of the queues.
    """

    def __init__(
        self, settings: AdmissionLimits, capacity: Callable[[], Capacity], metrics: Metrics, pause: Pause
    ) -> None:
        self.queue = AdmissionQueue(settings)
        self._pause = pause
        self._now = pause.now
        self._settings = settings
        self._capacity = capacity
        self._metrics = metrics
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._begin_s = {kind: deque[float](maxlen=REMEMBERED) for kind in Kind}
        self._relook: asyncio.TimerHandle | None = None
        self._show(metrics)

    def _show(self, metrics: Metrics) -> None:
        for kind in Kind:
            metrics.queue_waiting.labels(kind.value).set_function(partial(self.queue.waiting, kind))
            metrics.queue_served.labels(kind.value).set_function(partial(self.queue.served, kind))
        metrics.queue_encoding.set_function(lambda: self.queue.encoding)
        for of in ("encodes", "sequences", "prefill_tokens"):
            metrics.capacity.labels(of).set_function(partial(self._part_of_capacity, of))

    def _part_of_capacity(self, of: str) -> float:
        return float(getattr(self._capacity(), of))

    def admitted(
        self,
        kind: Kind,
        *,
        priority: int = 0,
        sequences: int = 1,
        until: float | None = None,
        record: Record | None = None,
    ) -> Pass:
        """Let a request in for the time of the context that the pass is.

        Args:
            until: loop time, which is that of `time.monotonic`, at which the client wants its whole answer.
            record: of the request, where its waits are noted.

        Raises:
            OverloadedError: too many wait, or it would wait too long. DeadlineUnreachable: longer than `until`.
        """
        now = self._now()
        record = Record("") if record is None else record
        self._refuse_hopeless(kind, self.queue.due_at(kind, now, priority), now, until, record)
        try:
            ticket = self.queue.admit(kind, now, priority=priority, sequences=sequences)
        except QueueFull as full:
            self._refuse("queue_full", kind, record)
            message = f"{full.waiting} requests with {_what(kind)} wait already; try again later"
            raise self._overloaded(message, full.retry_after_s) from None
        return Pass(self, ticket, record)

    def _leave(self, ticket: Ticket) -> None:
        self.queue.leave(ticket, self._now())
        self._pump()

    def _refuse_hopeless(self, kind: Kind, due: float, now: float, until: float | None, record: Record) -> None:
        wait_s = self.queue.predicted_wait_s(kind, due, now, at_least=True) or 0.0
        if until is not None:
            best_s = min(self._begin_s[kind], default=0.0)
            if time.monotonic() + wait_s + best_s > until:
                self._refuse("deadline", kind, record, predicted_wait_s=wait_s, best_s=best_s)
                raise DeadlineUnreachable(
                    f"an answer would begin in {wait_s + best_s:.1f} s at best, later than the deadline of the request"
                )
        if wait_s > self._settings.max_wait_s:
            self._refuse("wait", kind, record, predicted_wait_s=wait_s)
            likely_s = self.queue.predicted_wait_s(kind, due, now)
            message = f"a request with {_what(kind)} would wait about {likely_s or wait_s:.0f} s now; try again later"
            raise self._overloaded(message, likely_s)

    def _refuse(self, reason: str, kind: Kind, record: Record, **details: float) -> None:
        self._metrics.refused.labels(reason).inc()
        record.note("refused", reason=reason, **self._ahead(kind), **details)

    def _ahead(self, kind: Kind) -> dict[str, object]:
        """Who else is about, for records."""
        queue = self.queue
        return {"kind": kind.value, "waiting": queue.waiting(kind), "with_stages": queue.served(kind)}

    def _overloaded(self, message: str, retry_after_s: float | None) -> OverloadedError:
        # Spread: clients that are refused together must not come back together.
        return OverloadedError(message, retry_after_s=(retry_after_s or 1.0) * random.uniform(1.0, 1.25))

    async def _wait_turn(self, ticket: Ticket, record: Record, *, encode: bool) -> None:
        """Wait for the ticket's turn. Raises OverloadedError after `max_wait_s`, if nothing was done for it yet."""
        begun, line = time.monotonic(), "encode" if encode else "serve"
        now = self._now()
        if self._pause.left_s or not self.queue.goes_at_once(ticket, now, self._capacity(), encode=encode):
            record.note("waits", line=line, paused=bool(self._pause.left_s), **self._ahead(ticket.kind))
            self.queue.enqueue(ticket, now, encode=encode)
            try:
                await self._turn(ticket, now, record)
            finally:
                record.took("queued", begun, line=line)
        waited_s = time.monotonic() - begun
        self._metrics.queue_seconds.labels(ticket.kind.value, line).observe(waited_s)

    async def _turn(self, ticket: Ticket, begun: float, record: Record) -> None:
        turn = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._pump(begun)
            if ticket.encoding or ticket.granted_at:
                await turn
            while not turn.done():
                if (left_s := begun + self._settings.max_wait_s - self._now()) <= 0:
                    raise self._too_late(ticket, record)
                await asyncio.wait([turn], timeout=left_s)  # or longer: a pause may begin meanwhile
        finally:
            del self._waiters[ticket]
            self.queue.step_back(ticket)  # what else the request began may take a while to end

    def _too_late(self, ticket: Ticket, record: Record) -> OverloadedError:
        self._refuse("wait", ticket.kind, record)
        wait_s = self.queue.predicted_wait_s(ticket.kind, ticket.due, self._now())
        waited_s = self._settings.max_wait_s
        return self._overloaded(f"a request with {_what(ticket.kind)} has waited {waited_s:g} s in vain", wait_s)

    def _prefilled(self, ticket: Ticket) -> None:
        if ticket.prefilling or ticket.ahead:
            self._begin_s[ticket.kind].append(self._now() - ticket.granted_at)
            self.queue.prefilled(ticket)
            self._pump()

    def _pump(self, now: float | None = None) -> None:
        """Let through whoever may go now."""
        if not self.queue.somebody_waits():
            return
        if not self._pause.left_s:
            for ticket in self.queue.grants(self._now() if now is None else now, self._capacity()):
                turn = self._waiters[ticket]
                if not turn.done():
                    turn.set_result(None)
        if self._relook is None and self.queue.somebody_waits():
            self._relook = asyncio.get_running_loop().call_later(RELOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._relook = None
        self._pump()


class Pass:
    """What one admitted request holds, until the context that it is ends."""

    def __init__(self, gate: Gate, ticket: Ticket, record: Record) -> None:
        self._gate = gate
        self._ticket = ticket
        self._record = record
        self._turns = asyncio.Lock()
        self._cut: Callable[[], None] = _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate._leave(self._ticket)

    def weighs(self, tokens: float) -> None:
        """How long its prompt is, before it stands anywhere."""
        self._ticket.tokens = tokens

    async def to_encoders(self) -> None:
        """Wait until encoders take it. Any number of times, and at the same time."""
        async with self._turns:
            if self._ticket.place is Place.LOADING:
                await self._gate._wait_turn(self._ticket, self._record, encode=True)

    def give_back(self) -> None:
        """Give a place back, at the encoders or with the stages: something has to be encoded first, or others are
        having it encoded, or it is to wait apart, and whoever is waited for may need this very place."""
        self._gate.queue.give_back(self._ticket)
        self._gate._pump()
        self._cut()

    def goes_ahead(self) -> bool:
        """Take a place with the stages while its items are being encoded, if that can be had at once."""
        gate = self._gate
        return not gate._pause.left_s and gate.queue.goes_ahead(self._ticket, gate._now(), gate._capacity())

    def stands_back(self) -> None:
        """Another one is to encode what it waits for, and may need a place first: those who wait to be served hold
        places at the encoders, so it gives its own with the stages back if it went ahead."""
        if self._ticket.ahead:
            self.give_back()

    def leaves_encoders(self) -> None:
        """Others encode what it waits for now."""
        self._gate.queue.leave_encoders(self._ticket)
        self._gate._pump()

    @contextmanager
    def ahead(self, cut: Callable[[], None]) -> Iterator[None]:
        """The time of an attempt that went ahead. `cut` ends it, where its place is given back."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = _nothing

    def encoded(self) -> None:
        """Its items are encoded, or given up."""
        self._gate.queue.encoded(self._ticket)
        self._gate._pump()

    async def to_stages(self) -> None:
        """Wait until the instances that prefill and decode take it, unless it has a place there."""
        if self._ticket.place is not Place.SERVED:
            await self._gate._wait_turn(self._ticket, self._record, encode=False)

    def prefilled(self) -> None:
        """Its prompt is computed, or nobody can tell when it is. Any number of times."""
        self._gate._prefilled(self._ticket)

    @property
    def stage_priority(self) -> int:
        """Its `priority` for vLLM, where lower is sooner: when it is due, in ms since the epoch, so that the stages age
        requests as the queues here do, and several proxies agree."""
        return round((time.time() + self._ticket.due - self._gate._now()) * 1000)

    @property
    def served(self) -> bool:
        return self._ticket.place is Place.SERVED


def _nothing() -> None:
    """Nothing went ahead."""


def _what(kind: Kind) -> str:
    return "text" if kind is Kind.TEXT else "media"
