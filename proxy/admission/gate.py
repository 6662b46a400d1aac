"""The gate in front of the stages: `proxy/admission/queue.py` with a clock and the status table, and waiters for whom
it is a wait with an end; what of a request it goes by; and coming to an end without cutting anybody off.

Lives in the proxy's event loop. Owns the waits, their deadlines and what a refusal says. In a pause it lets nobody
through, and no time passes in its lines.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from msgspec import field

from epd_serve.errors import OverloadedError, RequestError
from proxy.admission.queue import AdmissionQueue, Kind, Stage, Ticket
from proxy.config.limits import KeyLimits
from proxy.config.settings import ProxySettings
from proxy.errors import DrainingError
from proxy.metrics import Metrics
from proxy.records.record import Record
from proxy.registry.table import InstanceTable
from proxy.request.client import DeadlineUnreachable
from proxy.request.parse import Endpoint, ParsedRequest
from proxy.routing.credits import Need, Speeds, encoders_with_room, heads_with_room

RELOOK_S = 0.02
"""While somebody waits: what instances can have done since they reported wakes nobody, nor do other processes, and
nobody waits for ever."""

SPEEDS_S = 0.25
"""For so long it is not worked out anew which instances there are, and how fast."""


class Gate:
    """One per process.

    Attributes:
        waiters: who stands in a line. True: its turn has come, False: that took too long.
    """

    def __init__(self, settings: ProxySettings, table: InstanceTable, metrics: Metrics) -> None:
        self._settings, self._table = settings.admission, table
        self.pause, self.max_wait_s = table.pause, settings.admission.max_wait_s
        self.queue = queue = AdmissionQueue(
            settings.admission, self.pause.now, self._rooms, self._speeds, processes=settings.processes
        )
        queue.room_made = self.pump
        self.refused = metrics.refused
        self.waiters: dict[Ticket, asyncio.Future[bool]] = {}
        self._relook: asyncio.TimerHandle | None = None
        self._pumping = self._none_has_room = False
        self._credits_of = partial(table.credits, unreported=settings.admission.sequences_per_instance)
        self._known_at = 0.0
        self._known = Speeds(1.0, 1.0)
        self.waited_s = {}
        for kind in Kind:
            metrics.queue_waiting.labels(kind.value).set_function(partial(queue.waiting, kind))
            metrics.queue_served.labels(kind.value).set_function(partial(queue.served, kind))
            for stage in Stage:
                self.waited_s[kind, stage] = metrics.queue_seconds.labels(kind.value, stage.value)
        for stage in Stage:
            metrics.queue_work_seconds.labels(stage.value).set_function(partial(queue.work_s.__getitem__, stage))
        self.late = {stage: metrics.queue_late.labels(stage.value) for stage in Stage}
        self.over_share = {stage: metrics.queue_over_share.labels(stage.value) for stage in Stage}
        metrics.queue_encoding.set_function(lambda: queue.encoding)

    def pump(self) -> None:
        """Let through whoever may go now: something was given back, or reported."""
        self._none_has_room = False
        self._let_through()

    def stands(self, ticket: Ticket, turn: asyncio.Future[bool]) -> None:
        """Somebody has joined a line."""
        self.waiters[ticket] = turn
        if not self._none_has_room:
            self._let_through()

    def _let_through(self) -> None:
        queue = self.queue
        if self._pumping or not queue.anybody:
            return
        self._pumping = True  # those who go make room, or none, which comes here again
        try:
            if not self.pause.left_s:
                for ticket in queue.grants():
                    _tell(self.waiters[ticket], True)
                self._none_has_room = True
        finally:
            self._pumping = False
        if self._relook is None and queue.anybody:
            self._relook = asyncio.get_running_loop().call_later(RELOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._relook = None
        since = self.pause.now() - self.max_wait_s
        for ticket, turn in self.waiters.items():
            if ticket.queued_at <= since and not (ticket.encoding or ticket.served_at):
                _tell(turn, False)
        self.pump()

    def _rooms(self, stage: Stage, need: Need, enough: int) -> int:
        rooms = encoders_with_room if stage is Stage.ENCODE else heads_with_room
        return rooms(self._credits_of, need, self._settings, self._speeds(), enough)

    def _speeds(self) -> Speeds:
        now = time.monotonic()
        if now > self._known_at + SPEEDS_S:
            self._known = Speeds.measured(self._credits_of, self._settings)
            self._known_at = now
        return self._known


class Pass(Ticket, kw_only=True):
    """A ticket whose request waits for its turns. It is let in, and leaves, with the context that it is.

    Attributes:
        record: of the request, where its waits are noted.
        until: loop time, which is that of `time.monotonic`, at which the client wants its whole answer.
        cut: ends an attempt that went ahead; None while there is none.
    """

    gate: Gate
    record: Record
    until: float | None = None
    cut: Callable[[], None] | None = None
    one_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __enter__(self) -> Self:
        """Raises OverloadedError: too many wait, or it would wait too long. DeadlineUnreachable: beyond `until`."""
        wait_s = self.queue.predicted_wait_s(self, at_least=True) or 0.0
        if self.until is not None:
            soonest_s = wait_s + min(self.queue.begun_s[self.kind], default=0.0)
            if time.monotonic() + soonest_s > self.until:
                self._refused("deadline", predicted_s=soonest_s)
                raise DeadlineUnreachable(
                    f"an answer would begin in {soonest_s:.1f} s at best, later than the deadline of the request"
                )
        if wait_s > self.gate.max_wait_s:
            raise self._overloaded("wait", f"a request with {self.kind} would wait {wait_s:.0f} s or more now")
        if self.queue.is_full(self.kind):
            raise self._overloaded(
                "queue_full", f"{self.queue.waiting(self.kind)} requests with {self.kind} wait already"
            )
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def stage_priority(self) -> int:
        """Its `priority` for vLLM, where lower is sooner: when it is due, in ms since the epoch, so that the stages age
        requests as the lines here do, and several proxies agree."""
        return round((time.time() + self.due() - self.queue.now()) * 1000)

    async def to_encoders(self) -> None:
        """Wait until encoders take it, unless it has a place. Several may at the same time. Raises as `to_stages`."""
        async with self.one_turn:
            if not (self.encoding or self.served):
                await self._turn(Stage.ENCODE)

    async def to_stages(self) -> None:
        """Wait until the instances that prefill and decode take it, unless it has a place there.

        Raises:
            OverloadedError: after `max_wait_s`, if nothing was done for it yet.
        """
        if not self.served:
            await self._turn(Stage.SERVE)

    def goes_ahead(self) -> bool:
        """Take a place with the stages while its items are being encoded, if that can be had at once."""
        return not self.gate.pause.left_s and self.goes_at_once(ahead=True)

    @contextmanager
    def cut_by(self, cut: Callable[[], None]) -> Iterator[None]:
        """The time of an attempt that went ahead. `cut` is called where it has to end: items were given up or refused,
        or its place was given back."""
        self.cut = cut
        try:
            yield
        finally:
            self.cut = None

    def encoded(self, *, well: bool = True) -> None:
        """Its items are encoded, or some of them not."""
        super().encoded()
        if not well and self.cut is not None:
            self.cut()

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

    async def _turn(self, stage: Stage) -> None:
        gate, begun = self.gate, time.monotonic()
        if (paused := bool(gate.pause.left_s)) or not self.goes_at_once(stage):
            self.enqueue(stage)
            over_share = self.account in self.queue.over_share(stage)
            if over_share:
                gate.over_share[stage].inc()
            self.record.note(
                "waits",
                line=stage.value,
                paused=paused,
                before_s=self.before_s,
                slo_s=self.slo_s,
                service_s=self.service_s,
                slack_s=self.stand.late_at - self.queue.now() if self.stand.late_at < math.inf else None,
                over_share=over_share,
                **self._others(),
            )
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            try:
                gate.stands(self, turn)
                if not await turn:
                    raise self._overloaded(
                        "wait", f"a request with {self.kind} has waited {gate.max_wait_s:g} s in vain"
                    )
                if self.stand.late_at < self.queue.now():
                    gate.late[stage].inc()
            finally:
                del gate.waiters[self]
                self.step_back()  # what else the request began may take a while to end
                self.record.took("queued", begun, line=stage.value, passed=self.passed)
        gate.waited_s[self.kind, stage].observe(time.monotonic() - begun)

    def _overloaded(self, reason: str, message: str) -> OverloadedError:
        likely_s = self.queue.predicted_wait_s(self)
        self._refused(reason, predicted_s=likely_s)
        # Spread: clients that are refused together must not come back together.
        spread_s = (likely_s or 1.0) * random.uniform(1.0, 1.25)
        return OverloadedError(f"{message}; try again later", retry_after_s=spread_s)

    def _refused(self, reason: str, **details: float | None) -> None:
        self.gate.refused.labels(reason).inc()
        self.record.note("refused", reason=reason, **self._others(), **details)

    def _others(self) -> dict[str, object]:
        """Who else is about, for its record."""
        kind, queue = self.kind, self.queue
        return {"kind": kind.value, "waiting": queue.waiting(kind), "with_stages": queue.served(kind)}


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
