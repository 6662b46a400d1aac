"""Who may go to the stages, and when: one line in front of the encoders, one in front of prefill and decode. Pure:
clock, room and speeds are given, so the simulator asks the very same (`deploy/planner/fleet.py`).

A ticket stands in one line at most. What it may hold:

- a place at the encoders, from its turn until it is encoded and served: features that nobody fetches would crowd the
  MM Store;
- a place with the stages that prefill and decode, from its turn until its end.

Either place can be given back before, since whoever it waits for may need one. A media request may go *ahead*: take a
place with the stages while its items are encoded, where nobody waits for one and there is room.

Whose turn it is says the order (`proxy/admission/order.py`), but whoever is over its share of the stages goes after all
others (`proxy/admission/shares.py`). Whether an instance has room for it says its credit (`proxy/routing/credits.py`).
Where the first one has no room, others that have may overtake it, a bounded number of times; and long ones leave the
last instance to short ones, as long as these come. A place is given with the turn, and what it takes of an instance is
counted there a moment later, when its plan is made: until then it counts here (`Ticket.leased`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from proxy.admission.order import ORDERS, Line, Stand
from proxy.admission.pace import HALF_LIFE_S, Pace
from proxy.admission.shares import Shares
from proxy.config.limits import AdmissionLimits
from proxy.registry.instance_state import Lease, Work
from proxy.routing.credits import Need, Service, Speeds

REMEMBERED = 32
"""Requests from which it is known how quickly, at best, an answer begins."""

LOOKS = 8
"""So many of a line are asked whether they have room, the first ones."""

MOST_PASSED = 16
"""So many may overtake one that has no room."""

SEEN_S = 1.0
"""For so long an account that has asked is about."""

LONG_S = 0.5
"""One that keeps an instance for longer leaves some to short ones: a video takes nobody's image the last encoder."""

SPARE, NOBODY_S, LAST_S = 1.25, 0.01, 1.0
"""As many as short ones have used lately, times the first; none where that was less than the second, a second, or where
the last of them went longer ago than the third: no instance idles for longer than that."""


class Kind(StrEnum):
    TEXT = "text"
    MEDIA = "media"


class Stage(StrEnum):
    """What is waited for: encoders, or who prefills and decodes. Metrics and records name the lines so."""

    ENCODE = "encode"
    SERVE = "serve"


class Ticket(Struct, eq=False):
    """One request, which counts from `enter` to `leave`. What it is told twice counts once.

    Attributes:
        account: whose share it takes of, by `weight`.
        arrived: moment of the queue's clock. slo_s: from then to its first token.
        sooner_s: by how much it goes before others that are equal, as its client asks; below 0 after them.
        need: what it takes of the stages. service: seconds of that; both estimated (`sized`).
        encoding: it has a place at the encoders. served: with the stages.
        ahead: it is served while its items are still being encoded, so nothing of it can be prefilled yet.
        owes: of which stages it has had its turn, and what it takes of an instance is not counted there yet.
        lease: of who prefills it, where it went ahead.
        line: in which it waits for its turn, since `queued_at`, at `stand`. passed: by how many it was overtaken there.
        served_at: when its turn to be served came, or last came; 0 before.
    """

    queue: AdmissionQueue
    kind: Kind
    account: str = ""
    weight: float = 1.0
    arrived: float = 0.0
    slo_s: float = math.inf
    sooner_s: float = 0.0
    need: Need = Need()
    service: Service = Service()
    service_s: float = 0.0
    before_s: float = 0.0
    number: int = 0
    encoding: bool = False
    served: bool = False
    ahead: bool = False
    owes: frozenset[Stage] = frozenset()
    line: Stage | None = None
    stand: Stand = Stand(0.0, math.inf, math.inf, 0)
    passed: int = 0
    queued_at: float = 0.0
    served_at: float = 0.0
    lease: Lease | None = None

    def enter(self) -> None:
        """It is let in. To be called once, as `leave`."""
        self.number = next(self.queue.numbers)
        self.queue.arrived[self.kind] += 1
        self.queue.saw(self.account)
        self.queue.use[self.kind].waiting += 1

    def sized(self, need: Need) -> None:
        """Now it is known what it needs."""
        self.need, self.service = need, self.queue.speeds().service(need)

    def goes_at_once(self, stage: Stage = Stage.SERVE, *, ahead: bool = False) -> bool:
        """Take a place where nobody waits for one and there is room, which costs less than queueing. False: it has to
        queue.

        Args:
            ahead: of its encoding; it never queues for that.
        """
        if self.served or self.line is not None or self.queue.lines[stage] or not self.queue.has_room(self, stage):
            return False
        self.go(stage, ahead=ahead)
        return True

    def enqueue(self, stage: Stage = Stage.SERVE) -> None:
        """Join the line of this stage."""
        assert not self.served and self.line is None, "it waits for nothing yet"
        self._stands(stage)
        self.line, self.queued_at, self.passed = stage, self.queue.now(), 0
        self.queue.lines[stage].setdefault(self.account, Line()).add(self)
        self.queue.work_s[stage] += self.work_s(stage)
        self.queue.keep_time()

    def step_back(self) -> None:
        """Wait for its turn no more."""
        if (stage := self.line) is not None:
            lines = self.queue.lines[stage]
            lines[self.account].remove(self)
            if not lines[self.account]:
                del lines[self.account]
            self.queue.work_s[stage] = self.queue.work_s[stage] - self.work_s(stage) if lines else 0.0
            self.line = None
            self.queue.keep_time()

    def go(self, stage: Stage, *, ahead: bool = False) -> None:
        """Its turn has come."""
        queue, now = self.queue, self.queue.now()
        if not self.is_long(stage):
            queue.short[stage].add(self.work_s(stage), now)
        if queue.anybody:  # else it is held against nobody
            waiting = itertools.chain.from_iterable(queue.lines.values())
            queue.shares.charge(self.account, self.work_s(stage), self.weight, waiting)
        if stage is Stage.ENCODE:
            self._hold(encoding=True)
        else:
            self.served_at = now
            self._hold(encoding=ahead and self.encoding, served=True, ahead=ahead)
        self.owes |= {stage}
        queue.owed[stage] += 1

    def leased(self, stage: Stage, lease: Lease | None = None) -> None:
        """What it takes of this stage is counted where it went, or will not be. `lease`: of who prefills it."""
        if lease is not None:
            self.lease = lease
        if stage in self.owes:
            self.owes -= {stage}
            self.queue.owed[stage] -= 1
            self.queue.room_made()

    def work_s(self, stage: Stage) -> float:
        """Of one instance's time."""
        return self.service.encode_work_s if stage is Stage.ENCODE else self.service.prefill_work_s

    def is_long(self, stage: Stage) -> bool:
        """Whether it keeps one instance for long: an item, or a part of an image, cannot be cut."""
        service = self.service
        return (service.longest_item_s if stage is Stage.ENCODE else service.prefill_work_s) > LONG_S

    def due(self) -> float:
        """For the stages, where least is soonest, on the queue's clock: as it would stand in line, and of a late one as
        of one that has just come."""
        now = self.queue.now()
        if self.line is None:
            self._stands(Stage.SERVE)
        return self.stand.rank if self.stand.late_at >= now else now + self.slo_s

    def encoded(self) -> None:
        """What it went ahead of has been done."""
        if self.ahead:
            if self.lease is not None:
                self.lease.over(Work.AHEAD)
            self._free(served=True)

    def leave_encoders(self) -> None:
        """It has nothing to encode any more."""
        self._free(served=self.served, ahead=self.ahead)

    def give_back(self) -> None:
        """It holds a place and does not use it now: whoever it waits for may need one."""
        self._free()

    def prefilled(self) -> None:
        """Its prompt is computed, or nobody can tell when it is."""
        if self.served_at:
            self.queue.begun_s[self.kind].append(self.queue.now() - self.served_at)
            self.served_at = 0.0

    def leave(self) -> None:
        """The request has ended, however it did."""
        self.step_back()
        self.give_back()
        self.queue.use[self.kind].waiting -= 1

    def _stands(self, stage: Stage) -> None:
        queue = self.queue
        self.before_s = queue.work_s[stage] / queue.speeds().of(encode=stage is Stage.ENCODE)
        self.service_s = max(self.service.prefill_s, min(queue.begun_s[self.kind], default=0.0))
        if stage is Stage.ENCODE:
            self.service_s += self.service.encode_s + queue.settings.encode_s
        self.stand = queue.order(self, self.number)

    def _free(self, **held: bool) -> None:
        self._hold(**held)
        if not self.encoding:
            self.leased(Stage.ENCODE)
        if not self.served:
            self.leased(Stage.SERVE)
        self.queue.room_made()

    def _hold(self, *, encoding: bool = False, served: bool = False, ahead: bool = False) -> None:
        """From now on it holds these and nothing else."""
        use = self.queue.use[self.kind]
        use.waiting += (self.encoding or self.served) - (encoding or served)
        use.encoding += encoding - self.encoding
        use.served += served - self.served
        self.encoding, self.served, self.ahead = encoding, served, ahead


class Use(Struct):
    """How many tickets of a kind are where. `waiting`: have no place at any stage."""

    waiting: int = 0
    encoding: int = 0
    served: int = 0


class Recent:
    """How much there was a second, of late.

    Attributes:
        at: when there was some last.
    """

    def __init__(self) -> None:
        self._sum, self.at = 0.0, -math.inf

    def add(self, amount: float, now: float) -> None:
        self._sum, self.at = self.per_s(now) * HALF_LIFE_S / math.log(2) + amount, now

    def per_s(self, now: float) -> float:
        return float(self._sum * 0.5 ** ((now - self.at) / HALF_LIFE_S)) * math.log(2) / HALF_LIFE_S


class AdmissionQueue:
    """The lines, and what is with the stages.

    Args:
        now: the clock, in seconds.
        rooms: how many instances of a stage may be given something that needs so much, of as many as are enough.
        speeds: of the instances.
        processes: that share the encoders' places evenly.

    Attributes:
        lines: by stage and account, those that wait. work_s: of all of a line, in seconds of an instance.
        owed: how many have had their turn and are not counted at an instance yet.
        arrived: how many requests of each kind have been let in.
        begun_s: how long after their turn the last answers of each kind began.
        shares: what accounts have had. seen: when each asked last, of those that did within `SEEN_S`.
        short: seconds of instances that those took which are not long.
        room_made: called where somebody else may go now (`grants`).
    """

    def __init__(
        self,
        settings: AdmissionLimits,
        now: Callable[[], float],
        rooms: Callable[[Stage, Need, int], int],
        speeds: Callable[[], Speeds],
        *,
        processes: int = 1,
    ) -> None:
        self.settings, self._processes = settings, processes
        self.now, self.rooms, self.speeds = now, rooms, speeds
        self.order = ORDERS[settings.order]
        self.numbers = itertools.count()
        self.lines: dict[Stage, dict[str, Line[Ticket]]] = {stage: {} for stage in Stage}
        self.work_s = dict.fromkeys(Stage, 0.0)
        self.owed = dict.fromkeys(Stage, 0)
        self.arrived = dict.fromkeys(Kind, 0)
        self.begun_s = {kind: deque[float](maxlen=REMEMBERED) for kind in Kind}
        self.use = {kind: Use() for kind in Kind}
        self.shares = Shares()
        self.seen: dict[str, float] = {}
        self.short = {stage: Recent() for stage in Stage}
        self.room_made: Callable[[], None] = lambda: None
        self._paces = {stage: Pace() for stage in Stage}

    def waiting(self, kind: Kind) -> int:
        """Requests that have no place at any stage."""
        return self.use[kind].waiting

    def served(self, kind: Kind) -> int:
        return self.use[kind].served

    @property
    def encoding(self) -> int:
        """Requests with a place at the encoders."""
        return self.use[Kind.MEDIA].encoding

    @property
    def anybody(self) -> bool:
        """Whether somebody waits for a turn."""
        return any(self.lines.values())

    def is_full(self, kind: Kind) -> bool:
        """Whether as many of this kind wait as may."""
        settings = self.settings
        return self.waiting(kind) >= (settings.text_queue if kind is Kind.TEXT else settings.media_queue)

    def sooner_s(self, priority: int) -> float:
        """What a client's `priority` is worth: as in vLLM lower is sooner, a unit is `priority_step_s`."""
        most = self.settings.priority_limit
        return -max(-most, min(most, priority)) * self.settings.priority_step_s

    def predicted_wait_s(self, ticket: Ticket, *, at_least: bool = False) -> float | None:
        """How long a ticket would wait if it came now, or would at least (`Pace.wait_s`); 0 where nobody is ahead, None
        while nobody can tell."""
        if not self.anybody:
            return 0.0
        now, rank = self.now(), self.order(ticket, ticket.number).rank
        waits_s = 0.0
        for stage in Stage if ticket.kind is Kind.MEDIA else (Stage.SERVE,):
            ahead = sum(line.before(rank, now) for line in self.lines[stage].values())
            wait_s = self._paces[stage].wait_s(ahead, now, at_least=at_least)
            if wait_s is None:
                return None
            waits_s += wait_s
        return waits_s

    def grants(self) -> Iterator[Ticket]:
        """Those whose turn has come, one after the other; they have their places now."""
        for stage in Stage:
            while (ticket := self._next(stage)) is not None:
                ticket.step_back()
                ticket.sized(ticket.need)  # by what is known now
                if self.now() > ticket.queued_at:
                    self._paces[stage].granted()
                ticket.go(stage)
                yield ticket

    def look(self) -> dict[str, dict[str, float]]:
        """Of each line how many wait, are late, and are over their share; and the work of all of them in seconds of one
        instance."""
        now, seen = self.now(), {}
        for stage, lines in self.lines.items():
            seen[stage.value] = {
                "waiting": sum(map(len, lines.values())),
                "late": sum(line.late(now) for line in lines.values()),
                "over_share": sum(len(lines[account]) for account in self.over_share(stage) & lines.keys()),
                "work_s": round(self.work_s[stage], 3),
            }
        return seen

    def keep_time(self) -> None:
        """A line has changed."""
        now = self.now()
        for stage, pace in self._paces.items():
            pace.tick(now, backlog=bool(self.lines[stage]))

    def has_room(self, ticket: Ticket, stage: Stage, over: Collection[str] = (), *, any_instance: bool = False) -> bool:
        """Whether a ticket may have a place, whoever waits.

        Args:
            over: accounts that are over their share. any_instance: also one that is left to short ones.
        """
        if stage is Stage.ENCODE:
            places = self.settings.encodes_per_instance * self.speeds().encoders / self._processes
            if self.encoding >= max(1, math.ceil(places)):
                return False
        kept = self._kept(stage) if ticket.is_long(stage) and not any_instance else 0
        enough, need = 1 + self.owed[stage] + kept, ticket.need
        if ticket.line is not None and (ticket.stand.late_at < self.now() or ticket.account in over):
            need = replace(need, yields=True)
        return self.rooms(stage, need, enough) == enough

    def over_share(self, stage: Stage) -> frozenset[str]:
        """Accounts that are over their share, among those that wait or have just asked."""
        if len(self.seen) < 2:
            return frozenset()
        self._forget()
        return self.shares.over(self.lines[stage].keys() | self.seen.keys())

    def saw(self, account: str) -> None:
        """It has asked now."""
        self.seen.pop(account, None)
        self.seen[account] = self.now()
        self._forget()

    def _forget(self) -> None:
        """Accounts that have not asked for a while; the last that asked is the last in `seen`."""
        since = self.now() - SEEN_S
        while self.seen and next(iter(self.seen.values())) <= since:
            del self.seen[next(iter(self.seen))]

    def _kept(self, stage: Stage) -> int:
        """Instances that are left to short ones: half of them at most, and one where prompts share steps anyway."""
        short, now, instances = self.short[stage], self.now(), self.speeds().of(encode=stage is Stage.ENCODE)
        used = short.per_s(now)
        if used < NOBODY_S or now > short.at + LAST_S or instances < 2:
            return 0
        return 1 if stage is Stage.SERVE else min(math.ceil(SPARE * used), instances // 2)

    def _next(self, stage: Stage, *, short: bool = False) -> Ticket | None:
        """`short`: of these, since long ones leave them what is free; so it is not overtaking."""
        passed: list[Ticket] = []
        over = self.over_share(stage)
        for ticket in itertools.islice(self._in_order(stage, over, short=short), LOOKS):
            if self.has_room(ticket, stage, over):
                for other in passed:
                    other.passed += 1
                return ticket
            if ticket.is_long(stage) and self.has_room(ticket, stage, over, any_instance=True):
                return self._next(stage, short=True)
            if ticket.passed >= MOST_PASSED:
                return None
            passed.append(ticket)
        return None

    def _in_order(self, stage: Stage, over: Collection[str], *, short: bool = False) -> Iterator[Ticket]:
        lines, now = self.lines[stage], self.now()

        def those_of(line: Line[Ticket]) -> Iterator[tuple[tuple[int, float, int], Ticket]]:
            return (one for one in line.in_order(now) if not (short and one[1].is_long(stage)))

        if len(lines) == 1:
            return (ticket for line in lines.values() for _, ticket in those_of(line))
        keyed = [
            ((account in over, *key), ticket)
            for account, line in lines.items()
            for key, ticket in itertools.islice(those_of(line), LOOKS)
        ]
        return (ticket for _, ticket in heapq.nsmallest(LOOKS, keyed, key=lambda one: one[0]))
