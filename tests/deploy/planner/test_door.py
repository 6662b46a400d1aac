"""What the proxy's door does shows in virtual time: whose turn it is, who has room, what stages go by."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from deploy.planner.fleet import Fleet
from deploy.planner.simulate import simulate
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.sim.profile import Line
from epd_serve.slo import Slo
from epd_serve.traffic import Request
from proxy.admission.queue import Stage
from tests.deploy.planner.rounds import PROFILE, STAGE, request, served

IMAGE = 100
"""Tokens of each, which an encoder takes a tenth of a second for."""
QUICK = replace(
    PROFILE,
    stages={1: replace(STAGE, prefill=Line(0.0, 0.0001))},
    front=Line(0.01),
    handover=Line(0.002),
    kv=Line(0.002),
)
"""With images the encoders have nearly all of the work."""


def pictures(seed: int, count: int, encoders: int) -> list[Request]:
    """Poisson arrivals of 1 to 16 images, as many as so many encoders can just encode."""
    chance, at_s, made = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += chance.expovariate(encoders / (8.5 * 0.1))
        made.append(request(number, at_s, items=(IMAGE,) * chance.randint(1, 16)))
    return made


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_requests_are_in_time_by_their_deadlines_and_none_waits_for_ever(seed: int) -> None:
    traffic, slo = pictures(seed, 400, 2), Slo(3000, 1000)
    runs = {
        order: served("2E-2P-2D", *traffic, profile=QUICK, slo=slo, order=order)
        for order in ("fcfs", "sjf", "deadline")
    }
    attained = {order: run.attained(0) for order, run in runs.items()}
    longest_s = {order: max(one.ttft_s for one in run.served) for order, run in runs.items()}
    assert attained["deadline"] >= attained["fcfs"] + 0.15
    assert longest_s["deadline"] <= 1.5 * longest_s["fcfs"]
    assert longest_s["sjf"] > 3 * longest_s["fcfs"], "it starves the long ones"


def test_whoever_waits_waits_at_the_door_and_no_encoder_idles_meanwhile() -> None:
    traffic, backlog = pictures(1, 200, 1), list[int]()

    def look(fleet: Fleet) -> None:
        lines, encoders = fleet.door.queue.lines[Stage.ENCODE], [fleet.instances[name] for name in ("E0", "E1")]
        backlog.append(sum(map(len, lines.values())))
        most = max(len(one.items) for one in traffic) * IMAGE
        for one, credit in zip(encoders, fleet.credits(Role.E), strict=True):
            assert credit.before_s(IMAGE, 1000.0) <= 0.05 + 2 * most / 1000.0, "its credit, what it took, and its part"
            assert one.stage.steps or one.unseen or not lines or fleet.door.queue.encoding >= 32

    doubled = [replace(one, at_s=one.at_s / 4) for one in traffic]
    run = simulate(parse("2E-2P-2D"), QUICK, doubled, slos=(Slo(3000, 1000),), tick=(0.03, look))
    assert max(backlog) > 20 and backlog[-1] == 0
    assert all(one.last_s < float("inf") for one in run.served)


def test_a_short_prompt_is_not_behind_a_long_one_while_another_prefill_is_free() -> None:
    """The long one comes first and keeps one P busy for 4 s; the other P has all of the short ones."""
    long = request(0, 0.0, items=(), text=2000)
    short = [request(n, 0.2 * n, items=(), text=20) for n in range(1, 15)]
    first, *others = served("2P-D", long, *short, profile=replace(QUICK, stages={1: STAGE})).served
    assert all(one.ttft_s < 0.2 for one in others), "0.04 s alone"
    assert {one.instances[0] for one in others} != {first.instances[0]}


def test_at_a_stage_who_is_due_first_goes_first() -> None:
    """PD takes prompts as they come while nobody knows how fast it is; which it computes first says the order."""
    prompts = [request(n, 0.001 * n, items=(), text=text) for n, text in enumerate((1000, 1500, 400, 1000))]
    for order, expected in (("fcfs", ["r0", "r1", "r2", "r3"]), ("sjf", ["r0", "r2", "r3", "r1"])):
        run = served("PD", *prompts, profile=replace(QUICK, stages={1: STAGE}), order=order)
        assert [one.id for one in sorted(run.served, key=lambda one: one.first_s)] == expected
