"""A profile of round numbers, and traffic made by hand or drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from deploy.planner.fleet import Options
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import Simulated, simulate
from epd_serve.layout_parser import parse
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request

STAGE = Profile(
    encode=Line(0.0, 0.001),
    prefill=Line(0.0, 0.002),
    decode_step_s=((1, 0.011), (2, 0.012)),
    capacity=Capacity(max_running=16, step_tokens=2048, kv_tokens=100_000, block_tokens=16, encoder_tokens=2048),
)
PROFILE = DeviceProfile(
    "round numbers",
    "none",
    {1: STAGE},
    front=Line(0.5),
    handover=Line(0.04),
    kv=Line(0.02),
    slowdown={"encode+prefill": 1.5, "encode+decode": 1.5, "prefill+decode": 1.5},
)
SLO = Slo(2000, 50)


def request(
    number: int, at_s: float, *, items: Sequence[int] = (100,), text: int = 10, tokens: int = 4, **more: Any
) -> Request:
    own = tuple(Item(one) for one in items)
    return Request(f"r{number}", at_s, text + sum(items), tokens, own, **more)


def drawn(seed: int, count: int, rate_rps: float, tokens: int = 40) -> list[Request]:
    """Poisson arrivals of texts and images of all sizes."""
    chance, at_s, made = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate_rps)
        items = [chance.randint(20, 300) for _ in range(chance.choice((0, 1, 1, 2)))]
        made.append(request(number, at_s, items=items, text=chance.randint(5, 200), tokens=chance.randint(1, tokens)))
    return made


def served(
    layout: str, *requests: Request, profile: DeviceProfile = PROFILE, slo: Slo = SLO, **options: Any
) -> Simulated:
    return simulate(parse(layout), profile, requests, slos=(slo,), options=Options(**options))
