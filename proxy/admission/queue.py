"""Who may go to the stages, and when: one queue per modality in front of them. Pure: time and capacity come in.

    admit -> LOADING --enqueue(encode)--> TO_ENCODE --grant--> ENCODING --enqueue--> TO_SERVE --grant--> SERVED
                \\-------------------------enqueue----------------------------------^
    ENCODING, LOADING --go ahead--> SERVED, ahead --encoded--> SERVED
    ENCODING, SERVED --give back--> LOADING        from every place: leave -> GONE, exactly once
    TO_ENCODE, TO_SERVE --step back--> where it came from

Text and media share the instances that prefill and decode, and only those, so only there the two compete. Each ticket
has a time at which it is *due*: its arrival, later for media (`media_yields_s`) and by what the client asks
(`priority`). Whoever is due first goes first. As nobody who comes later than that time is due earlier, nobody starves:
that is the aging. Where the head of the queues does not fit yet, nobody smaller overtakes it. Beyond that each modality
has a share that the other cannot take while both are about, so that neither waits for the other to end.

A media ticket keeps its encoder's place until it is served and encoded: features that nobody fetches would crowd the
MM Store. It may go ahead to the stages while its items are encoded, where nobody waits for them and there is room; its
prompt counts from the moment at which it could be prefilled, so that nobody waits for those who wait for an encoder.
"""

from __future__ import annotations

import itertools

from proxy.admission.pace import Pace
from proxy.admission.ticket import Capacity, Kind, Place, QueueFull, Ticket, TicketQueue, order_of
from proxy.config.limits import AdmissionLimits

RECENT_S = 30.0
"""A modality that has shown itself within this time keeps its share."""


class AdmissionQueue:
    """The queues, and what is with the stages. Call `grants` after everything that may have made room.

    Attributes:
        arrived: how many requests of each kind have been let in.
    """

    def __init__(self, settings: AdmissionLimits) -> None:
        self._settings = settings
        self._numbers = itertools.count()
        self._to_encode = TicketQueue()
        self._to_serve = {kind: TicketQueue() for kind in Kind}
        self.arrived = dict.fromkeys(Kind, 0)
        self._waiting = dict.fromkeys(Kind, 0)  # with no place at any stage yet
        self._active_at = dict.fromkeys(Kind, float("-inf"))
        self._encoding = 0
        self._sequences = dict.fromkeys(Kind, 0)
        self._tokens = dict.fromkeys(Kind, 0.0)
        self._prefilling = dict.fromkeys(Kind, 0)
        self._served = dict.fromkeys(Kind, 0)
        self._encode_pace = Pace()
        self._serve_pace = Pace()
        self._queued = 0  # in any of the queues
        self._waited = False

    # What is there.

    def waiting(self, kind: Kind) -> int:
        """Requests that have no place at any stage yet."""
        return self._waiting[kind]

    def served(self, kind: Kind) -> int:
        return self._served[kind]

    @property
    def encoding(self) -> int:
        """Requests with a place at the encoders."""
        return self._encoding

    def somebody_waits(self) -> bool:
        return self._queued > 0

    def due_at(self, kind: Kind, arrived: float, priority: int) -> float:
        """When a request would be due. `priority` as in vLLM: lower is sooner; one unit is `priority_step_s`."""
        if self._settings.single_queue:
            return arrived
        limit = self._settings.priority_limit
        priority_s = max(-limit, min(limit, priority)) * self._settings.priority_step_s
        return arrived + priority_s + (self._settings.media_yields_s if kind is Kind.MEDIA else 0.0)

    def predicted_wait_s(self, kind: Kind, due: float, now: float, *, at_least: bool = False) -> float | None:
        """How long a newcomer would wait, or would at least (`Pace.wait_s`); 0 where nobody is ahead, None while nobody
        can tell."""
        if not self.somebody_waits():
            return 0.0
        newest = (due, 1 << 62)
        ahead = sum(queue.ahead_of(newest) for queue in self._to_serve.values())
        waits = [self._serve_pace.wait_s(ahead, now, at_least=at_least)]
        if kind is Kind.MEDIA:
            waits.append(self._encode_pace.wait_s(self._to_encode.ahead_of(newest), now, at_least=at_least))
        predicted = [wait for wait in waits if wait is not None]
        return sum(predicted) if len(predicted) == len(waits) else None

    # A request's life.

    def admit(self, kind: Kind, now: float, *, priority: int = 0, sequences: int = 1) -> Ticket:
        """Let a request in.

        Raises:
            QueueFull: its queue is as long as it may be.
        """
        limit = self._settings.text_queue if kind is Kind.TEXT else self._settings.media_queue
        due = self.due_at(kind, now, priority)
        if self._waiting[kind] >= limit:
            raise QueueFull(kind, self._waiting[kind], self.predicted_wait_s(kind, due, now))
        self._waiting[kind] += 1
        self.arrived[kind] += 1
        self._active_at[kind] = now
        return Ticket(kind, now, due, next(self._numbers), max(1, sequences))

    def goes_at_once(self, ticket: Ticket, now: float, capacity: Capacity, *, encode: bool = False) -> bool:
        """Let it go where nobody is in any queue and there is room, which costs less than queueing. False: it has to
        queue."""
        if self.somebody_waits():
            return False
        if encode:
            if self._encoding >= max(1, capacity.encodes):
                return False
        elif not (self._within_share(ticket, now, capacity) and self._fits(ticket, capacity)):
            return False
        ticket.queued_at = now
        self._go(ticket, now, encode=encode)
        return True

    def goes_ahead(self, ticket: Ticket, now: float, capacity: Capacity) -> bool:
        """Serve it before its items are encoded, if nobody waits to be served and there is room. It never queues for
        that."""
        somebody_waits = any(queue.tickets for queue in self._to_serve.values())
        if somebody_waits or ticket.place not in (Place.LOADING, Place.ENCODING):
            return False
        if not (self._within_share(ticket, now, capacity) and self._fits(ticket, capacity)):
            return False
        ticket.queued_at = now
        ticket.ahead = True
        self._go(ticket, now, encode=False)
        return True

    def leave_encoders(self, ticket: Ticket) -> None:
        """It has nothing to encode any more, and keeps none but a place with the stages. Any number of times."""
        if ticket.place is Place.SERVED:
            self._encoded(ticket)
        else:
            self.give_back(ticket)

    def encoded(self, ticket: Ticket) -> None:
        """What it went ahead of has been done. Any number of times."""
        if ticket.ahead:
            ticket.ahead = False
            self._encoded(ticket)
            self._weigh(ticket)

    def enqueue(self, ticket: Ticket, now: float, *, encode: bool = False, tokens: float | None = None) -> None:
        """Join the queue for the encoders, or the one for prefill and decode."""
        assert ticket.place in (Place.LOADING, Place.ENCODING), f"a {ticket.place} ticket joins no queue"
        if tokens is not None:
            ticket.tokens = max(0.0, tokens)
        ticket.place = Place.TO_ENCODE if encode else Place.TO_SERVE
        ticket.queued_at = now
        self._queue_of(ticket).add(ticket)
        self._queued += 1
        self._keep_time(now)

    def grants(self, now: float, capacity: Capacity) -> list[Ticket]:
        """Those whose turn has come; they are ENCODING or SERVED now."""
        granted = []
        self._keep_time(now)
        while (ticket := self._next(now, capacity)) is not None:
            self._grant(ticket, now)
            granted.append(ticket)
        self._keep_time(now)
        return granted

    def give_back(self, ticket: Ticket) -> None:
        """It holds a place and does not use it now: whoever it waits for may need one. Any number of times."""
        if ticket.place is Place.SERVED:
            self._served_no_more(ticket)
        elif ticket.place is not Place.ENCODING:
            return
        self._encoded(ticket)
        self._waiting[ticket.kind] += 1
        ticket.place = Place.LOADING

    def prefilled(self, ticket: Ticket) -> None:
        """Its prompt weighs no longer on the prefilling instances. Any number of times."""
        if ticket.ahead:
            ticket.ahead = False
            self._encoded(ticket)
        if ticket.prefilling:
            ticket.prefilling = False
            self._tokens[ticket.kind] -= ticket.tokens
            self._prefilling[ticket.kind] -= 1
            if not self._prefilling[ticket.kind]:
                self._tokens[ticket.kind] = 0.0  # sums of floats drift

    def step_back(self, ticket: Ticket) -> None:
        """It waits for its turn no more, and so must not get one. Any number of times."""
        if ticket.is_queued:
            self._dequeue(ticket)
            ticket.place = Place.ENCODING if ticket.encoding else Place.LOADING

    def leave(self, ticket: Ticket, now: float) -> None:
        """The request has ended, however it did. Any number of times."""
        if ticket.place is Place.GONE:
            return
        self.step_back(ticket)
        if ticket.place is Place.SERVED:
            self._served_no_more(ticket)
            self._active_at[ticket.kind] = now
        elif not ticket.encoding:
            self._waiting[ticket.kind] -= 1
        self._encoded(ticket)
        ticket.place = Place.GONE
        self._keep_time(now)

    def _queue_of(self, ticket: Ticket) -> TicketQueue:
        if ticket.place is Place.TO_ENCODE:
            return self._to_encode
        return self._to_serve[Kind.TEXT if self._settings.single_queue else ticket.kind]

    def _next(self, now: float, capacity: Capacity) -> Ticket | None:
        if self._to_encode.tickets and self._encoding < max(1, capacity.encodes):
            return self._to_encode.tickets[0]
        heads = [queue.tickets[0] for queue in self._to_serve.values() if queue.tickets]
        heads = [head for head in heads if self._within_share(head, now, capacity)]
        first = min(heads, key=order_of, default=None)
        return first if first is not None and self._fits(first, capacity) else None

    def _fits(self, ticket: Ticket, capacity: Capacity) -> bool:
        """There is room for it. One that is alone always fits, however large it is."""
        sequences, tokens = sum(self._sequences.values()), sum(self._tokens.values())
        return (not sequences or sequences + ticket.sequences <= capacity.sequences) and (
            not any(self._prefilling.values()) or tokens + ticket.tokens <= capacity.prefill_tokens
        )

    def _within_share(self, ticket: Ticket, now: float, capacity: Capacity) -> bool:
        """It leaves the other modality its share, if that one is about."""
        kind, other = ticket.kind, ticket.kind.other
        if self._settings.single_queue:
            return True
        about = self._served[other] or self._to_serve[other].tickets or now - self._active_at[other] < RECENT_S
        if not about:
            return True
        share = 1.0 - (self._settings.text_share if other is Kind.TEXT else self._settings.media_share)
        sequences, tokens = self._sequences[kind], self._tokens[kind]
        return (not sequences or sequences + ticket.sequences <= share * capacity.sequences) and (
            not self._prefilling[kind] or tokens + ticket.tokens <= share * capacity.prefill_tokens
        )

    def _dequeue(self, ticket: Ticket) -> None:
        self._queue_of(ticket).remove(ticket)
        self._queued -= 1

    def _grant(self, ticket: Ticket, now: float) -> None:
        self._dequeue(ticket)
        self._go(ticket, now, encode=ticket.place is Place.TO_ENCODE)

    def _go(self, ticket: Ticket, now: float, *, encode: bool) -> None:
        if not ticket.encoding:
            self._waiting[ticket.kind] -= 1
        if encode:
            ticket.place = Place.ENCODING
            ticket.encoding = True
            self._encoding += 1
            if now > ticket.queued_at:
                self._encode_pace.granted()
            return
        ticket.place = Place.SERVED
        ticket.granted_at = now
        self._sequences[ticket.kind] += ticket.sequences
        self._served[ticket.kind] += 1
        if not ticket.ahead:
            self._encoded(ticket)
            self._weigh(ticket)
        if now > ticket.queued_at:
            self._serve_pace.granted()

    def _weigh(self, ticket: Ticket) -> None:
        ticket.prefilling = True
        self._tokens[ticket.kind] += ticket.tokens
        self._prefilling[ticket.kind] += 1

    def _served_no_more(self, ticket: Ticket) -> None:
        self.prefilled(ticket)
        self._sequences[ticket.kind] -= ticket.sequences
        self._served[ticket.kind] -= 1

    def _encoded(self, ticket: Ticket) -> None:
        if ticket.encoding:
            ticket.encoding = False
            self._encoding -= 1

    def _keep_time(self, now: float) -> None:
        waits = self._queued > 0
        if waits or self._waited:  # time without a backlog says nothing
            to_encode = len(self._to_encode.tickets)
            self._encode_pace.tick(now, backlog=to_encode > 0)
            self._serve_pace.tick(now, backlog=self._queued > to_encode)
        self._waited = waits
