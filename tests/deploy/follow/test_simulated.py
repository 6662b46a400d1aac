"""A follower in the simulator: requests end, devices suffice, and a load that turns is served better than without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.follow.traffic import Phase, requests_of
from deploy.follow.moves import counts_of
from deploy.follow.plans import Answer, Plans
from deploy.follow.simulated import SimulatedFollower
from deploy.follow.types import Limits, PlanQuestion
from deploy.planner.fleet import Fleet, Options
from deploy.planner.goodput import Interval
from deploy.planner.profile import read_device_profile
from deploy.planner.simulate import Simulated, simulate
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo

PROFILE = read_device_profile(Path(__file__).parents[3] / "bench/results/profiles/plan.json")
SLO = Slo(8000, 60)


class Watched(SimulatedFollower):
    """Each tick is held against what may never be."""

    def __call__(self, fleet: Fleet) -> None:
        super().__call__(fleet)
        used = [device for plan in fleet.held.values() for device in set(plan.devices)]
        assert len(set(used)) <= self.limits.devices
        serving = Counter(one.plan.role for one in fleet.instances.values() if not one.draining)
        assert set(serving) >= self.layout.roles, "a role has nobody left who takes requests"


def followed(layout: str, phases: list[Phase], limits: Limits, start_s: float = 4.0) -> tuple[Watched, Simulated]:
    follower = Watched(parse(layout), PROFILE, limits, start_s, SLO.tpot_ms / 1e3)
    requests = requests_of(phases, 1)
    run = simulate(parse(layout), PROFILE, requests, slos=(SLO,), tick=(1.0, follower))
    assert [one.id for one in run.served] == [one.id for one in requests]
    assert all(one.last_s < float("inf") for one in run.served)
    return follower, run


@pytest.mark.parametrize("switchable", [False, True])
def test_a_load_that_turns_is_followed(switchable: bool) -> None:
    phases = [Phase(60.0, 0.5, 2.0), Phase(60.0, 12.0, 0.1)]
    follower, run = followed("3E-4P-D", phases, Limits(8, switchable=switchable))
    stays = simulate(parse("3E-4P-D"), PROFILE, requests_of(phases, 1), slos=(SLO,))
    assert run.attained(0) > stays.attained(0) + 0.1
    whats = {one.chosen.what for one in follower.decisions if one.chosen is not None}
    assert ("flip" in whats) is switchable or "scale" in whats
    assert counts_of(follower.layout)["D"] > 1


def test_devices_are_taken_while_they_are_needed_and_given_back() -> None:
    limits = Limits(12, quiet_s=60.0)
    _, run = followed("E-P-D", [Phase(60.0, 1.0, 0.2), Phase(60.0, 1.0, 3.0), Phase(240.0, 1.0, 0.1)], limits)
    follower, _ = followed("E-P-D", [Phase(60.0, 1.0, 0.2), Phase(60.0, 1.0, 3.0), Phase(240.0, 1.0, 0.1)], limits)
    most = max(sum(one.chosen.counts.values()) for one in follower.decisions if one.chosen is not None)
    assert most >= 5 and follower.layout.device_count < most
    assert run.device_s < most * run.span_s * 0.8


@pytest.mark.parametrize("seed", [1, 2])
def test_other_groups_take_over_on_the_same_devices_and_give_them_back(seed: int) -> None:
    """Two devices, all used: TP1x2 becomes EP-D and is back, as if the planner had said so, and each request ends."""

    def planner(question: PlanQuestion, plans: Plans) -> Answer:
        layouts = ("EP-D", "2EPD") if question.mix.shares["encode"] > 0.2 else ("2EPD", "EP-D")
        return Answer(question, {layouts[0]: Interval.of([9.0]), layouts[1]: Interval.of([0.5])})

    phases = [Phase(60.0, 1.5, 0.0), Phase(90.0, 0.0, 1.2), Phase(120.0, 1.5, 0.0)]
    follower = SimulatedFollower(
        parse("2EPD"), PROFILE, Limits(2), 4.0, SLO.tpot_ms / 1e3, seed, Plans(PROFILE, SLO), planner
    )
    requests = requests_of(phases, seed)
    run = simulate(parse("2EPD"), PROFILE, requests, slos=(SLO,), tick=(1.0, follower))
    moves = [one.chosen.layout for one in follower.decisions if one.chosen is not None]
    assert moves == ["EP-D", "2EPD"]
    assert all(one.last_s < float("inf") for one in run.served)
    paths = [one.path for one in run.served]
    assert paths[0] == paths[-1] == "EPD" and "EP-D" in paths


def test_groups_that_share_a_device_come_and_go_as_wholes() -> None:
    follower, _ = followed("(E-P)-D", [Phase(60.0, 0.5, 1.5)], Limits(6))
    assert counts_of(follower.layout)["(E-P)"] > 1


def test_cores_follow_the_work_of_stages_that_divide_a_device() -> None:
    """No device is left to start anything on, and with the shares of the start pictures wait for encoders."""
    requests, layout = requests_of([Phase(200.0, 0.2, 1.5)], 1, answer_tokens=4), parse("(E-P)x4-2D")
    options = Options(core_share="E=0.2,P=0.8")
    follower = Watched(layout, PROFILE, Limits(6), 4.0, SLO.tpot_ms / 1e3)
    run = simulate(layout, PROFILE, requests, slos=(SLO,), options=options, tick=(1.0, follower))
    stays = simulate(layout, PROFILE, requests, slos=(SLO,), options=options)
    shares = [one.chosen for one in follower.decisions if one.chosen is not None and one.chosen.what == "share"]
    assert 1 <= len(shares) <= 3 and shares[0].relieves == "(E-P)/E"
    assert run.attained(0) > stays.attained(0) + 0.5
