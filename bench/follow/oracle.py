"""A simulated deployment whose layouts are known in advance: an oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.follow.simulated import SimulatedFollower
from deploy.planner.fleet import Fleet
from epd_serve.layout_parser import parse

Turn = tuple[float, str]
"""From that second on the layout is wanted."""


@dataclass
class Scheduled(SimulatedFollower):
    """Has layouts at times that are known in advance."""

    schedule: Sequence[Turn] = ()

    def _decide(self, fleet: Fleet) -> None:
        due = [layout for at_s, layout in self.schedule if at_s <= fleet.clock.now_s]
        if due and parse(due[-1]) != self.layout:
            self.wants(parse(due[-1]))
