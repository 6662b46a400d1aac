"""The gate in front of the stages: `proxy/admission/queue.py` with a clock, and waiters for whom it is a wait with an
end; what of a request it goes by; and coming to an end without cutting anybody off.

Lives in the proxy's event loop. Owns the waits, their deadlines and what a refusal says. What may be with the stages at
once is `proxy/admission/capacity.py`'s business. In a pause it lets nobody through, and no time passes in its lines.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from msgspec import field

from epd_serve.errors import OverloadedError, RequestError
from proxy.admission.queue import AdmissionQueue, Capacity, Kind, Ticket
from proxy.config.limits import AdmissionLimits, KeyLimits
from proxy.errors import DrainingError
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.table import Pause
from proxy.request.client import DeadlineUnreachable
from proxy.request.parse import Endpoint, ParsedRequest

RELOOK_S = 0.1
"""While somebody waits: capacity follows from reports, which wake nobody, and nobody waits for ever."""

ENCODE, SERVE = "encode", "serve"
"""The lines, as metrics and records name them."""


class Gate:
    """One per process.

    Args:
        capacity: what may be with the stages now.
        pause: lets nobody through while it lasts; its clock is that of the lines.
    """

    def __init__(
        self, settings: AdmissionLimits, capacity: Callable[[], Capacity], metrics: Metrics, pause: Pause
    ) -> None:
        self.queue = AdmissionQueue(settings, pause.now, capacity)
        self.queue.room_made = self.pump
        self.pause = pause
        self.queue_s = {
            (kind, line): metrics.queue_seconds.labels(kind.value, line) for kind in Kind for line in (ENCODE, SERVE)
        }
        self._refused = metrics.refused
        self.waiters: dict[Ticket, asyncio.Future[bool]] = {}  # True: its turn has come, False: that took too long
        self._max_wait_s = settings.max_wait_s
        self._relook: asyncio.TimerHandle | None = None
        metrics.queue_encoding.set_function(lambda: self.queue.encoding)
        for kind in Kind:
            metrics.queue_waiting.labels(kind.value).set_function(partial(self.queue.waiting, kind))
            metrics.queue_served.labels(kind.value).set_function(partial(self.queue.served, kind))
        for of in Capacity.__slots__:
            metrics.capacity.labels(of).set_function(lambda of=of: getattr(capacity(), of))  # type: ignore[misc]

    def admitted(
        self, kind: Kind, record: Record, *, priority: int = 0, sequences: int = 1, until: float | None = None
    ) -> Pass:
        """Let a request in for the time of the context that the pass is.

        Args:
            record: of the request, where its waits are noted.
            until: loop time, which is that of `time.monotonic`, at which the client wants its whole answer.

        Raises:
            OverloadedError: too many wait, or it would wait too long. DeadlineUnreachable: longer than `until`.
        """
        queue = self.queue
        due = queue.due(kind, priority)
        wait_s = queue.predicted_wait_s(kind, due, at_least=True) or 0.0
        best_s = min(queue.begun_s[kind], default=0.0)
        if until is not None and time.monotonic() + wait_s + best_s > until:
            self._note_refusal("deadline", kind, record, predicted_wait_s=wait_s, best_s=best_s)
            raise DeadlineUnreachable(
                f"an answer would begin in {wait_s + best_s:.1f} s at best, later than the deadline of the request"
            )
        if wait_s > self._max_wait_s:
            likely_s = queue.predicted_wait_s(kind, due)
            message = f"a request with {kind} would wait about {likely_s or wait_s:.0f} s now"
            raise self._overloaded("wait", kind, due, record, message, predicted_wait_s=wait_s)
        if queue.is_full(kind):
            message = f"{queue.waiting(kind)} requests with {kind} wait already"
            raise self._overloaded("queue_full", kind, due, record, message)
        return Pass(queue, kind, due, sequences, gate=self, record=record)

    async def turn(self, ticket: Ticket, record: Record, line: str) -> None:
        """Wait in line for its turn. Raises OverloadedError after `max_wait_s`, if nothing was done for it yet."""
        record.note("waits", line=line, paused=bool(self.pause.left_s), **self._others(ticket.kind))
        ticket.enqueue(encode=line == ENCODE)
        turn = self.waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.pump()
            if not await turn:
                message = f"a request with {ticket.kind} has waited {self._max_wait_s:g} s in vain"
                raise self._overloaded("wait", ticket.kind, ticket.due, record, message)
        finally:
            del self.waiters[ticket]
            ticket.step_back()  # what else the request began may take a while to end

    def pump(self) -> None:
        """Let through whoever may go now."""
        if not any(self.queue.lines):
            return
        if not self.pause.left_s:
            for ticket in self.queue.grants():
                _tell(self.waiters[ticket], True)
        if self._relook is None and any(self.queue.lines):
            self._relook = asyncio.get_running_loop().call_later(RELOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._relook = None
        since = self.pause.now() - self._max_wait_s
        for ticket, turn in self.waiters.items():
            if ticket.queued_at <= since and not (ticket.encoding or ticket.served_at):
                _tell(turn, False)
        self.pump()

    def _overloaded(
        self, reason: str, kind: Kind, due: float, record: Record, message: str, **details: float
    ) -> OverloadedError:
        self._note_refusal(reason, kind, record, **details)
        # Spread: clients that are refused together must not come back together.
        retry_after_s = (self.queue.predicted_wait_s(kind, due) or 1.0) * random.uniform(1.0, 1.25)
        return OverloadedError(f"{message}; try again later", retry_after_s=retry_after_s)

    def _note_refusal(self, reason: str, kind: Kind, record: Record, **details: float) -> None:
        self._refused.labels(reason).inc()
        record.note("refused", reason=reason, **self._others(kind), **details)

    def _others(self, kind: Kind) -> dict[str, object]:
        """Who else is about, for records."""
        return {"kind": kind.value, "waiting": self.queue.waiting(kind), "with_stages": self.queue.served(kind)}


class Pass(Ticket, kw_only=True):
    """A ticket whose request waits for its turns, until the context that it is ends.

    Attributes:
        record: of the request, where its waits are noted.
        cut: ends an attempt that went ahead, where its place is given back; None while there is none.
    """

    gate: Gate
    record: Record
    cut: Callable[[], None] | None = None
    one_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def stage_priority(self) -> int:
        """Its `priority` for vLLM, where lower is sooner: when it is due, in ms since the epoch, so that the stages age
        requests as the lines here do, and several proxies agree."""
        return round((time.time() + self.due - self.queue.now()) * 1000)

    async def to_encoders(self) -> None:
        """Wait until encoders take it, unless it has a place. Several may at the same time."""
        async with self.one_turn:
            if not (self.encoding or self.served):
                await self._turn(ENCODE)

    async def to_stages(self) -> None:
        """Wait until the instances that prefill and decode take it, unless it has a place there."""
        if not self.served:
            await self._turn(SERVE)

    async def _turn(self, line: str) -> None:
        begun = time.monotonic()
        if self.gate.pause.left_s or not self.goes_at_once(encode=line == ENCODE):
            try:
                await self.gate.turn(self, self.record, line)
            finally:
                self.record.took("queued", begun, line=line)
        self.gate.queue_s[self.kind, line].observe(time.monotonic() - begun)

    def goes_ahead(self) -> bool:
        """Take a place with the stages while its items are being encoded, if that can be had at once."""
        return not self.gate.pause.left_s and self.goes_at_once(ahead=True)

    def give_back(self) -> None:
        """Give a place back, at the encoders or with the stages: something has to be encoded first, or others are
        having it encoded, or it is to wait apart, and whoever is waited for may need this very place."""
        super().give_back()
        if self.cut is not None:
            self.cut()

    def stand_back(self) -> None:
        """Another one is to encode what it waits for, and may need a place first: those who wait to be served hold
        places at the encoders, so it gives its own with the stages back if it went ahead."""
        if self.ahead:
            self.give_back()


def _tell(turn: asyncio.Future[bool], comes: bool) -> None:
    if not turn.done():
        turn.set_result(comes)


class Drain:
    """Counts the exchanges of one proxy, each of which enters it, and knows whether it is coming to an end.

    serving --announce--> leaving (not ready, still accepts) --begin--> draining (refuses) --> idle
    """

    def __init__(self) -> None:
        self.announced = False
        self.began = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def announce(self) -> None:
        """Say that the end is near: not ready any more, while requests are accepted as ever. Any number of times."""
        self.announced = True

    def begin(self) -> None:
        """Accept nothing more. Any number of times; there is no way back."""
        self.announced = self.began = True

    def __enter__(self) -> None:
        """An exchange with a client begins.

        Raises:
            DrainingError: this proxy is coming to an end.
        """
        if self.began:
            raise DrainingError("this server is coming to an end; try again, or elsewhere")
        self.running += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no exchange is under way; whoever waits sets the deadline."""
        await self._idle.wait()


def kind_of(request: ParsedRequest) -> Kind:
    return Kind.MEDIA if request.media else Kind.TEXT


def priority_of(request: ParsedRequest, limits: KeyLimits) -> int:
    """The client's `priority`, as vLLM means it: lower is sooner, 0 is usual. A better one than `limits` allow counts
    as the best that they do, as one beyond `admission.priority_limit` does.

    Raises:
        RequestError: it is no integer.
    """
    value = request.body.get("priority")
    value = 0 if value is None else value
    if type(value) is not int or abs(value) >= 1 << 63:
        raise RequestError("priority must be an integer; lower means sooner.", param="priority")
    return value if limits.best_priority is None else max(value, limits.best_priority)


def sequences_of(request: ParsedRequest, most: int) -> int:
    """Answers that are decoded side by side: `n` for each prompt.

    Raises:
        RequestError: a list of prompts asks for more than `most`, `max_sequences` of the settings.
    """
    n = request.body.get("n")
    answers = n if isinstance(n, int) else 1
    prompts = request.body["prompt"] if request.endpoint is Endpoint.COMPLETIONS else None
    if not isinstance(prompts, list) or len(prompts) == 1 or isinstance(prompts[0], int):
        return answers
    sequences = answers * len(prompts)
    if sequences > most:
        raise RequestError(
            f"prompt has {len(prompts)} prompts: with n {answers} for each {sequences} answers, at most {most} can be "
            "asked for at once; send several requests.",
            param="prompt",
        )
    return sequences
