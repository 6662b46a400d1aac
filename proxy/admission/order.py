"""Whose turn it is among those who wait for the same thing. Pure: proxies and the simulator go by the same orders.

`deadline`, the usual one, is least slack first (ModServe §4.3: shorter requests with tight SLOs first): a ticket has to
begin by its arrival + its TTFT SLO − the service that it still needs. That moment is fixed, so it ages by itself. Whose
moment has passed is a lost cause and goes after everybody who can still make it, but not for ever: after `PATIENCE`
times as long as it would have waited in order of arrival it goes before everybody.

`fcfs` is order of arrival, `sjf` the shortest service first, which starves the long ones: to compare with.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

PATIENCE = 1.4
"""How much longer than in order of arrival a lost cause may wait."""

OVERDUE, IN_TIME, LATE = range(3)
"""Who goes first."""


class Asked(Protocol):
    """What an order goes by, in seconds; moments are of one clock.

    Attributes:
        arrived: moment. slo_s: from then to its first token. service_s: of that, what it still needs itself.
        before_s: what those before it in order of arrival need. sooner_s: by how much its client or key prefers it.
    """

    @property
    def arrived(self) -> float: ...
    @property
    def slo_s(self) -> float: ...
    @property
    def service_s(self) -> float: ...
    @property
    def before_s(self) -> float: ...
    @property
    def sooner_s(self) -> float: ...


class Stand(NamedTuple):
    """Where one stands.

    Attributes:
        rank: among those in time, least first. late_at: moment from which on it is late.
        turn: moment of its turn, once it is late; least first.
        number: tells equals apart.
    """

    rank: float
    late_at: float
    turn: float
    number: int


def fcfs(one: Asked, number: int) -> Stand:
    return Stand(one.arrived - one.sooner_s, math.inf, math.inf, number)


def sjf(one: Asked, number: int) -> Stand:
    return Stand(one.service_s - one.sooner_s, math.inf, math.inf, number)


def deadline(one: Asked, number: int) -> Stand:
    begin_by = one.arrived + one.slo_s - one.service_s - one.sooner_s
    turn = one.arrived + PATIENCE * (one.before_s + one.service_s) - one.sooner_s
    return Stand(begin_by, begin_by, turn, number)


Order = Callable[[Asked, int], Stand]
ORDERS: Mapping[str, Order] = MappingProxyType({"deadline": deadline, "fcfs": fcfs, "sjf": sjf})


class Waits(Protocol):
    """What stands in a line: `stand` does not change while it does."""

    @property
    def stand(self) -> Stand: ...


W = TypeVar("W", bound=Waits)
RANK, TURN = attrgetter("stand.rank", "stand.number"), attrgetter("stand.turn", "stand.number")


class Line(Generic[W]):
    """Those who wait for the same thing, in order."""

    def __init__(self) -> None:
        self._in_time: list[W] = []  # by rank
        self._late: list[W] = []  # by turn

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def add(self, one: W) -> None:
        insort(self._in_time, one, key=RANK)

    def remove(self, one: W) -> None:
        for line, key in ((self._in_time, RANK), (self._late, TURN)):
            at = bisect_left(line, key(one), key=key)
            if at < len(line) and line[at] is one:
                del line[at]
                return
        raise AssertionError("it stands in this line")

    def in_order(self, now: float) -> Iterator[tuple[tuple[int, float, int], W]]:
        """All that wait, each after what it is sorted by. The line must not change meanwhile."""
        self._settle(now)
        overdue = bisect_right(self._late, now, key=attrgetter("stand.turn"))
        late = self._late
        for state, ones in (
            (OVERDUE, islice(late, overdue)),
            (IN_TIME, self._in_time),
            (LATE, islice(late, overdue, None)),
        ):
            for one in ones:
                stand = one.stand
                yield (state, stand.rank if state == IN_TIME else stand.turn, stand.number), one

    def before(self, rank: float, now: float) -> int:
        """How many go before one that comes now, in time, with this rank."""
        self._settle(now)
        overdue = bisect_right(self._late, now, key=attrgetter("stand.turn"))
        return overdue + bisect_right(self._in_time, rank, key=attrgetter("stand.rank"))

    def late(self, now: float) -> int:
        """How many can no longer begin in time."""
        self._settle(now)
        return len(self._late)

    def _settle(self, now: float) -> None:
        """Of those in time, whoever is late by now is late. They are in the order in which they come to be."""
        while self._in_time and self._in_time[0].stand.late_at < now:
            insort(self._late, self._in_time.pop(0), key=TURN)
