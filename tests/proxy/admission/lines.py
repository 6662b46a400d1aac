"""A queue for tests: in front of places that the test counts, by a clock that it sets."""

from __future__ import annotations

from proxy.admission.queue import AdmissionQueue, Kind, Stage, Ticket
from proxy.config.limits import AdmissionLimits
from proxy.routing.credits import Need, Speeds

LIMITS = AdmissionLimits(priority_step_s=2.0, priority_limit=3, encode_s=0.5, encodes_per_instance=2)
RATE = 1000.0


class Queue:
    """A queue in front of one line of places at each stage: `room` says for how large a request there is how many."""

    def __init__(self, limits: AdmissionLimits = LIMITS, *, places: int = 1, encoders: int = 1, heads: int = 1) -> None:
        self.now, self.places, self.encoders = 0.0, places, encoders
        self.refuses: set[float] = set()  # prompts for which there is no room
        self.taken: dict[Stage, set[Ticket]] = {stage: set() for stage in Stage}
        self.speeds = Speeds(RATE, RATE, encoders, heads)
        self.all = AdmissionQueue(limits, lambda: self.now, self._rooms, lambda: self.speeds)

    def _rooms(self, stage: Stage, need: Need, enough: int) -> int:
        if stage is Stage.SERVE and need.tokens in self.refuses:
            return 0
        most = self.encoders if stage is Stage.ENCODE else self.places
        return min(enough, most - len(self.taken[stage]))

    def enters(
        self,
        kind: Kind = Kind.TEXT,
        *,
        slo_s: float = 1000.0,
        tokens: float = 1.0,
        items: tuple[float, ...] = (),
        account: str = "",
        weight: float = 1.0,
        priority: int = 0,
    ) -> Ticket:
        ticket = Ticket(self.all, kind, account, weight, self.now, slo_s, self.all.sooner_s(priority))
        ticket.enter()
        ticket.sized(Need(tokens, items or ((1.0,) if kind is Kind.MEDIA else ())))
        return ticket

    def stands(self, kind: Kind = Kind.TEXT, stage: Stage = Stage.SERVE, **more: object) -> Ticket:
        ticket = self.enters(kind, **more)  # type: ignore[arg-type]
        ticket.enqueue(stage)
        return ticket

    def grants(self, now: float | None = None) -> list[Ticket]:
        """Those whose turn has come; what they take of instances is counted there before the next one goes."""
        self.now = self.now if now is None else now
        gone = []
        for ticket in self.all.grants():
            self.leased(ticket)
            gone.append(ticket)
        return gone

    def leased(self, ticket: Ticket) -> None:
        for stage in tuple(ticket.owes):
            self.taken[stage].add(ticket)
            ticket.leased(stage)

    def ends(self, ticket: Ticket) -> None:
        for taken in self.taken.values():
            taken.discard(ticket)
        ticket.leave()

    def one_by_one(self, first: Ticket | None = None) -> list[Ticket]:
        """All that wait, each after the end of the one before it."""
        order: list[Ticket] = []
        running = first
        while self.all.anybody:
            if running is not None:
                self.ends(running)
            [running] = self.grants()
            order.append(running)
        if running is not None:
            self.ends(running)
        return order
