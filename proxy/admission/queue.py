"""Who may go to the stages, and when: one line per modality in front of them. Pure: clock and capacity are given.

A ticket holds what its request takes of the stages, and stands in one line at most. What it may hold:

- a place at the encoders, from its turn until it is encoded and served: features that nobody fetches would crowd the
  MM Store;
- a place with the stages that prefill and decode, from its turn until its end;
- tokens to be prefilled, while its prompt can be computed and has not been.

Either place can be given back before, since whoever it waits for may need one. A media request may go *ahead*: take a
place with the stages while its items are encoded, where nobody waits for one and there is room. Its tokens count from
the moment at which they could be prefilled, so that nobody waits for those who wait for an encoder.

Text and media share the instances that prefill and decode, and only those, so only there the two compete. Each ticket
has a time at which it is *due*: its arrival, later for media (`media_yields_s`) and by what the client asks
(`priority`). Whoever is due first goes first (`ORDER`). As nobody who comes later than that time is due earlier, nobody
starves: that is the aging. Where the head of the lines does not fit yet (`AdmissionQueue.has_room`), nobody smaller
overtakes it. Beyond that each modality has a share that the other cannot take while both are about, so that neither
waits for the other to end.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from msgspec import Struct

from proxy.config.limits import AdmissionLimits

RECENT_S = 30.0
"""A modality that has shown itself within this time keeps its share."""

HALF_LIFE_S = 10.0
LEAST_GRANTS = 3.0
"""So many have to have been let through, lately, before anything is predicted."""

REMEMBERED = 32
"""Requests from which it is known how quickly, at best, an answer begins."""

ORDER = attrgetter("due", "number")
"""Whose turn is first."""


class Kind(StrEnum):
    TEXT = "text"
    MEDIA = "media"

    @property
    def other(self) -> Kind:
        return Kind.MEDIA if self is Kind.TEXT else Kind.TEXT


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be with the stages at once, over all instances.

    Attributes:
        encodes: requests at the encoders. sequences: prefilling or decoding. prefill_tokens: of prompts not prefilled.
    """

    encodes: float
    sequences: float
    prefill_tokens: float


class Ticket(Struct, eq=False):
    """One request, which counts from `enter` to `leave`. What it is told twice counts once.

    Attributes:
        due: when it is to go (`AdmissionQueue.due`); `number` tells equals apart.
        sequences: how many it decodes at once. tokens: of its prompt, estimated; not to change while it holds any.
        encoding: it has a place at the encoders. served: with the stages. prefilling: its tokens count.
        ahead: it is served while its items are still being encoded, so nothing of it can be prefilled yet.
        line: in which it waits for its turn, since `queued_at`.
        served_at: when its turn to be served came, or last came; 0 before.
    """

    queue: AdmissionQueue
    kind: Kind
    due: float
    sequences: int = 1
    tokens: int = 1
    number: int = 0
    encoding: bool = False
    served: bool = False
    prefilling: bool = False
    ahead: bool = False
    line: list[Ticket] | None = None
    queued_at: float = 0.0
    served_at: float = 0.0

    def enter(self) -> None:
        """It is let in. To be called once, as `leave`."""
        self.number = next(self.queue.numbers)
        self.queue.arrived[self.kind] += 1
        self.queue.active_at[self.kind] = self.queue.now()
        self.queue.use[self.kind].waiting += 1

    def goes_at_once(self, *, encode: bool = False, ahead: bool = False) -> bool:
        """Take a place at the encoders or with the stages where nobody waits and there is room, which costs less than
        queueing. False: it has to queue.

        Args:
            ahead: of its encoding, if nobody waits to be served; it never queues for that.
        """
        lines = self.queue.lines[1:] if ahead else self.queue.lines
        if self.served or self.line is not None or any(lines) or not self.queue.has_room(self, encode=encode):
            return False
        self.go(encode=encode, ahead=ahead)
        return True

    def enqueue(self, *, encode: bool = False) -> None:
        """Join the line for the encoders, or the one for prefill and decode."""
        assert not self.served and self.line is None, "it waits for nothing yet"
        self.line = self.queue.lines[0] if encode else self.queue.line_of(self.kind)
        self.queued_at = self.queue.now()
        insort(self.line, self, key=ORDER)
        self.queue.keep_time()

    def step_back(self) -> None:
        """Wait for its turn no more."""
        if self.line is not None:
            del self.line[bisect_left(self.line, ORDER(self), key=ORDER)]
            self.line = None
            self.queue.keep_time()

    def go(self, *, encode: bool, ahead: bool = False) -> None:
        """Its turn has come."""
        if encode:
            self._hold(encoding=True)
        else:
            self.served_at = self.queue.now()
            self._hold(encoding=ahead and self.encoding, served=True, prefilling=not ahead, ahead=ahead)

    def encoded(self) -> None:
        """What it went ahead of has been done."""
        if self.ahead:
            self._free(served=True, prefilling=True)

    def leave_encoders(self) -> None:
        """It has nothing to encode any more."""
        self._free(served=self.served, prefilling=self.prefilling, ahead=self.ahead)

    def give_back(self) -> None:
        """It holds a place and does not use it now: whoever it waits for may need one."""
        self._free()

    def prefilled(self) -> None:
        """Its prompt is computed, or nobody can tell when it is: it weighs no longer."""
        if self.prefilling or self.ahead:
            self.queue.begun_s[self.kind].append(self.queue.now() - self.served_at)
            self._free(served=True)

    def leave(self) -> None:
        """The request has ended, however it did."""
        self.step_back()
        if self.served:
            self.queue.active_at[self.kind] = self.queue.now()
        self.give_back()
        self.queue.use[self.kind].waiting -= 1

    def _free(self, **held: bool) -> None:
        self._hold(**held)
        self.queue.room_made()

    def _hold(
        self, *, encoding: bool = False, served: bool = False, prefilling: bool = False, ahead: bool = False
    ) -> None:
        """From now on it holds these and nothing else."""
        use = self.queue.use[self.kind]
        use.waiting += (self.encoding or self.served) - (encoding or served)
        use.encoding += encoding - self.encoding
        use.served += served - self.served
        use.sequences += (served - self.served) * self.sequences
        use.tokens += (prefilling - self.prefilling) * self.tokens
        self.encoding, self.served, self.prefilling, self.ahead = encoding, served, prefilling, ahead


class Use(Struct):
    """What tickets hold together. `waiting`: how many have no place at any stage."""

    waiting: int = 0
    encoding: int = 0
    served: int = 0
    sequences: int = 0
    tokens: int = 0

    def leaves_room(self, ticket: Ticket, capacity: Capacity, share: float = 1.0) -> bool:
        """Within this share of the capacity. One that is alone always fits, however large it is."""
        return (not self.sequences or self.sequences + ticket.sequences <= share * capacity.sequences) and (
            not self.tokens or self.tokens + ticket.tokens <= share * capacity.prefill_tokens
        )


class Pace:
    """How fast a line moves, what predicted waits rest on: grants per second of backlog, of late. Time without a
    backlog says nothing: the line was waiting, not moving."""

    def __init__(self) -> None:
        self._grants = 0.0
        self._backlog_s = 0.0
        self._since: float | None = None  # when a backlog was last taken into account; None without one

    def tick(self, now: float, *, backlog: bool) -> None:
        """Note that from `now` on there is a backlog, or none."""
        if self._since is not None and now > self._since:
            passed_s = now - self._since
            decay = 0.5 ** (passed_s / HALF_LIFE_S)
            self._grants *= decay
            self._backlog_s = self._backlog_s * decay + passed_s
        self._since = now if backlog else None

    def granted(self) -> None:
        """One that had to wait in the line has gone."""
        self._grants += 1.0

    def wait_s(self, ahead: int, now: float, *, at_least: bool = False) -> float | None:
        """How long it takes until `ahead` have gone; None while nobody can tell.

        Args:
            at_least: at the fastest pace at which it may well be no more than chance that so few have gone: twice the
                standard deviation of their count above it. At the beginning of a backlog there are few.
        """
        if not ahead:
            return 0.0
        self.tick(now, backlog=self._since is not None)
        if self._grants < LEAST_GRANTS or self._backlog_s <= 0:
            return None
        grants = self._grants + (2 * math.sqrt(self._grants) + 1 if at_least else 0.0)
        return ahead * self._backlog_s / grants


class AdmissionQueue:
    """The lines, and what is with the stages.

    Args:
        now: the clock, in seconds. capacity: what may be with the stages now.

    Attributes:
        lines: for the encoders, then for prefill and decode: one of each kind, or one of both. Each in `ORDER`.
        arrived: how many requests of each kind have been let in. active_at: when a kind last showed itself.
        begun_s: how long after their turn the last answers of each kind began.
        room_made: called where somebody else may go now (`grants`).
    """

    def __init__(self, settings: AdmissionLimits, now: Callable[[], float], capacity: Callable[[], Capacity]) -> None:
        self._settings = settings
        self.now = now
        self.capacity = capacity
        self.numbers = itertools.count()
        self.lines: list[list[Ticket]] = [[], []] if settings.single_queue else [[], [], []]
        self.arrived = dict.fromkeys(Kind, 0)
        self.active_at = dict.fromkeys(Kind, float("-inf"))
        self.begun_s = {kind: deque[float](maxlen=REMEMBERED) for kind in Kind}
        self.use = {kind: Use() for kind in Kind}
        self.room_made: Callable[[], None] = lambda: None
        self._encode_pace, self._serve_pace = Pace(), Pace()

    def waiting(self, kind: Kind) -> int:
        """Requests that have no place at any stage."""
        return self.use[kind].waiting

    def served(self, kind: Kind) -> int:
        return self.use[kind].served

    @property
    def encoding(self) -> int:
        """Requests with a place at the encoders."""
        return self.use[Kind.MEDIA].encoding

    def line_of(self, kind: Kind) -> list[Ticket]:
        """The one for prefill and decode."""
        return self.lines[1 if kind is Kind.TEXT else -1]

    def is_full(self, kind: Kind) -> bool:
        """Whether as many of this kind wait as may."""
        settings = self._settings
        return self.waiting(kind) >= (settings.text_queue if kind is Kind.TEXT else settings.media_queue)

    def due(self, kind: Kind, priority: int) -> float:
        """When a request that comes now is due. `priority` as in vLLM: lower is sooner, a unit is `priority_step_s`."""
        settings, now = self._settings, self.now()
        if settings.single_queue:
            return now
        priority = max(-settings.priority_limit, min(settings.priority_limit, priority))
        return now + priority * settings.priority_step_s + settings.media_yields_s * (kind is Kind.MEDIA)

    def predicted_wait_s(self, ticket: Ticket, *, at_least: bool = False) -> float | None:
        """How long a ticket would wait if it came now, or would at least (`Pace.wait_s`); 0 where nobody is ahead, None
        while nobody can tell."""
        if not any(self.lines):
            return 0.0
        to_encode, *to_serve = (bisect_left(line, (ticket.due, math.inf), key=ORDER) for line in self.lines)
        serve_s = self._serve_pace.wait_s(sum(to_serve), self.now(), at_least=at_least)
        if ticket.kind is Kind.TEXT or serve_s is None:
            return serve_s
        encode_s = self._encode_pace.wait_s(to_encode, self.now(), at_least=at_least)
        return None if encode_s is None else serve_s + encode_s

    def grants(self) -> list[Ticket]:
        """Those whose turn has come; they have their places now."""
        granted = []
        while (ticket := self._next()) is not None:
            encode = ticket.line is self.lines[0]
            ticket.step_back()
            if self.now() > ticket.queued_at:
                (self._encode_pace if encode else self._serve_pace).granted()
            ticket.go(encode=encode)
            granted.append(ticket)
        return granted

    def keep_time(self) -> None:
        """A line has changed."""
        now = self.now()
        self._encode_pace.tick(now, backlog=bool(self.lines[0]))
        self._serve_pace.tick(now, backlog=any(self.lines[1:]))

    def has_room(self, ticket: Ticket, *, encode: bool = False) -> bool:
        """Whether a ticket may have a place, whoever waits."""
        if encode:
            return self.encoding < max(1, self.capacity().encodes)
        return self._within_all(ticket) and self._within_share(ticket)

    def _next(self) -> Ticket | None:
        if (to_encode := self.lines[0]) and self.has_room(to_encode[0], encode=True):
            return to_encode[0]
        for head in sorted((line[0] for line in self.lines[1:] if line), key=ORDER):
            if self._within_share(head):
                return head if self._within_all(head) else None  # nobody smaller overtakes it
        return None

    def _within_all(self, ticket: Ticket) -> bool:
        text, media = self.use.values()
        both = Use(sequences=text.sequences + media.sequences, tokens=text.tokens + media.tokens)
        return both.leaves_room(ticket, self.capacity())

    def _within_share(self, ticket: Ticket) -> bool:
        """It leaves the other modality its share, if that one is about."""
        other, settings = ticket.kind.other, self._settings
        about = self.use[other].served or self.line_of(other) or self.now() - self.active_at[other] < RECENT_S
        if settings.single_queue or not about:
            return True
        share = 1.0 - (settings.text_share if other is Kind.TEXT else settings.media_share)
        return self.use[ticket.kind].leaves_room(ticket, self.capacity(), share)
