"""A fleet that changes under traffic: what drains finishes, what waits is served in order, devices are counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.planner.fleet import Fleet, VirtualInstance
from deploy.planner.simulate import Served, Simulated, simulate
from epd_serve.layout_parser import parse
from epd_serve.placement import InstancePlan
from epd_serve.roles import Role
from epd_serve.sim.profile import Line
from epd_serve.traffic import Request
from tests.deploy.planner.rounds import PROFILE, SLO, drawn, request, served

ENCODE, PREFILL = 0.1, 0.22
FIRST = 0.5 + ENCODE + PREFILL
"""Seconds to the first token of a request with an item where one instance does all."""


def changing(
    layout: str, requests: Sequence[Request], *changes: tuple[float, Callable[[Fleet], None]], **profile: Line
) -> Simulated:
    """Served while the fleet is changed at these times, in seconds, to the next twentieth."""
    left = list(changes)

    def tick(fleet: Fleet) -> None:
        while left and left[0][0] <= fleet.clock.now_s + 1e-9:
            left.pop(0)[1](fleet)

    own = replace(PROFILE, **profile)
    return simulate(parse(layout), own, requests, slos=(SLO,), tick=(0.05, tick))


def plan(role: Role, number: int, device: int) -> InstancePlan:
    return InstancePlan(f"{role.value}{number}", role, 1, (device,))


class Driver:
    """Changes a fleet by chance, and counts on its own what `device_s` has to be.

    Args:
        moves: one a tick: what, and on which of those with whom it can be done. After the last one nothing else goes,
            and an EPD serves whatever waits.
    """

    def __init__(self, moves: Sequence[tuple[str, int]]) -> None:
        self.moves, self.device = list(moves), 100
        self.fleet: Fleet | None = None
        self.devices: list[tuple[float, int]] = []  # from when on so many were held

    def __call__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        if self.moves:
            what, which = self.moves.pop(0)
            getattr(self, what)(fleet, which)
            if not self.moves:
                self.add_one(fleet, Role.EPD)
        self.note(fleet)

    def note(self, fleet: Fleet) -> None:
        held = {device for one in fleet.held.values() for device in one.devices}
        self.devices.append((fleet.clock.now_s, len(held)))

    def new(self, fleet: Fleet, role: Role, device: int) -> InstancePlan:
        """With a name that is free, maybe again."""
        names = {f"{role.value}{number}": number for number in range(99)}
        return plan(role, next(number for name, number in names.items() if name not in fleet.held), device)

    def add_one(self, fleet: Fleet, role: Role) -> None:
        self.device += 1
        fleet.add(self.new(fleet, role, self.device))

    def add(self, fleet: Fleet, which: int) -> None:
        self.add_one(fleet, list(Role)[which % len(Role)])

    def start(self, fleet: Fleet, which: int) -> None:
        """Up 1.5 s later, on a device that may be another one's."""
        new = self.new(fleet, (Role.E, Role.P, Role.D, Role.PD)[which % 4], which % 6)
        fleet.hold(new)
        fleet.clock.after(1.5, lambda: fleet.add(new))

    def drain(self, fleet: Fleet, which: int) -> None:
        if there := list(fleet.instances):
            fleet.drain(there[which % len(there)])

    def take_back(self, fleet: Fleet, which: int) -> None:
        if draining := [one for one in fleet.instances.values() if one.draining]:
            one = draining[which % len(draining)].plan
            fleet.take(one.id, one.role)

    def flip(self, fleet: Fleet, which: int) -> None:
        """One that can be flipped now."""
        switches = [one.plan for one in fleet.instances.values() if one.plan.role in (Role.P, Role.D)]
        if quiet := [one for one in switches if fleet.quiet(one.id)]:
            one = quiet[which % len(quiet)]
            fleet.take(one.id, Role.D if one.role is Role.P else Role.P)

    def remove(self, fleet: Fleet, which: int) -> None:
        """All that drain and are empty."""
        for one in list(fleet.instances.values()):
            if one.draining and fleet.empty(one.plan.id):
                assert_nothing_left(one)
                fleet.remove(one.plan.id)


def assert_nothing_left(one: VirtualInstance) -> None:
    scheduler = one.stage.scheduler
    assert not (scheduler.waiting or scheduler.running or scheduler.held or one.front or one.unseen)
    assert scheduler.free_blocks == scheduler.blocks


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(("TP1x2", "E-P-D", "2E-2P-2D", "(E-P)-2D", "E-PD-EPD")),
    seed=st.integers(0, 1 << 30),
    moves=st.lists(
        st.tuples(
            st.sampled_from(("add", "start", "drain", "drain", "take_back", "flip", "flip", "remove", "remove")),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=14,
    ),
)
def test_each_request_ends_once_however_the_fleet_changes(layout: str, seed: int, moves: list[tuple[str, int]]) -> None:
    requests = [
        replace(
            one,
            items=tuple(replace(item, key=f"k{item.tokens % 9}") for item in one.items),
            session=f"s{number % 5}",
            cached_tokens=one.prompt_tokens // 2,
        )
        for number, one in enumerate(drawn(seed, 25, 3.0))
    ]
    driver, ended = Driver(moves), Counter[str]()
    begun_s = requests[0].at_s

    def until(one: Served) -> bool:
        ended[one.id] += 1
        return False

    profile = replace(PROFILE, kv=Line(0.3), front_busy=Line(0.1), host_devices=2)
    run = simulate(parse(layout), profile, requests, slos=(SLO,), until=until, tick=(0.7, driver))
    assert ended == {one.id: 1 for one in requests}
    fleet = driver.fleet
    assert fleet is not None
    for one in fleet.ever:
        assert_nothing_left(one)
        assert one.removed_s < math.inf or fleet.empty(one.plan.id)

    counts = fleet.counts["text"], fleet.counts["media"]
    assert [one.came for one in counts] == [one.ended for one in counts]
    assert sum(one.ended for one in counts) == len(requests)
    assert sum(one.output_tokens for one in counts) == sum(one.output_tokens for one in requests)
    assert sum(one.item_tokens for one in counts) == sum(one.item_tokens for one in requests)
    assert sum(one.attained[0] for one in counts) / len(requests) == pytest.approx(run.attained(0))
    assert all(0 <= share <= 1 + 1e-9 for by_kind in run.busy.values() for share in by_kind.values())

    held = [(begun_s, parse(layout).device_count), *driver.devices]
    ends = [*(at_s for at_s, _ in held[1:]), begun_s + run.span_s]
    expected_s = sum(count * max(0.0, min(end, ends[-1]) - at) for (at, count), end in zip(held, ends, strict=True))
    assert run.device_s == pytest.approx(expected_s)


@pytest.mark.parametrize("layout", ["TP1x2", "(E-P)-D", "2E-P-2D"])
def test_ticks_that_change_nothing_change_nothing(layout: str) -> None:
    requests, seen = drawn(3, 30, 3.0), list[float]()
    run = simulate(
        parse(layout), PROFILE, requests, slos=(SLO,), tick=(2.0, lambda fleet: seen.append(fleet.clock.now_s))
    )
    assert run == served(layout, *requests)
    assert run.device_s == pytest.approx(parse(layout).device_count * run.span_s)
    assert seen == [requests[0].at_s + 2.0 * n for n in range(1, len(seen) + 1)]
    assert len(seen) == int(run.span_s / 2.0), "none after the last request has ended"


def test_what_drains_finishes_what_it_has_and_gets_nothing_new() -> None:
    gone_s = list[float]()

    def remove(fleet: Fleet) -> None:
        if "EPD0" in fleet.instances and fleet.empty("EPD0"):
            fleet.remove("EPD0")
            gone_s.append(fleet.clock.now_s)

    looks = [(at / 20, remove) for at in range(24, 400)]
    requests = request(0, 0.0, tokens=200), *(request(n, 1.2 + n / 10) for n in range(1, 5))
    run = changing("TP1x2", requests, (0.3, lambda fleet: fleet.drain("EPD0")), *looks)
    first, *others = run.served
    assert first == served("TP1x2", requests[0]).served[0]
    assert all(one.instances == ("EPD1",) for one in others)
    assert first.last_s < gone_s[0] < first.last_s + 0.06
    assert run.busy["EPD0"]["encode"] == pytest.approx(ENCODE / gone_s[0]), "of the time in which it was there"


def test_a_p_is_quiet_once_its_kv_has_left_and_is_a_d_then() -> None:
    def flip(fleet: Fleet) -> None:
        assert fleet.empty("P0") is fleet.quiet("P0") is (fleet.clock.now_s > 0.5 + PREFILL + 3.0)
        if fleet.quiet("P0"):
            fleet.take("P0", Role.D)
            fleet.drain("D0")

    text = request(1, 0.0, items=(), text=110), request(2, 4.0, items=(), text=110)
    looks = [(at, flip) for at in (0.3, 0.6, 1.0, 3.7, 3.75)]
    _, late = changing("2P-D", text, (0.05, lambda fleet: fleet.drain("P0")), *looks, kv=Line(3.0)).served
    assert late.instances == ("P1", "P0"), "P0 decodes"


def test_a_d_becomes_a_p_with_answers_on_it_and_finishes_them() -> None:
    """As a deployment flips it. Until it is empty it can serve, but not be removed."""

    def flip(fleet: Fleet) -> None:
        fleet.take("D0", Role.P)
        assert fleet.quiet("D0") and not fleet.empty("D0")
        with pytest.raises(AssertionError, match="D0 has requests"):
            fleet.remove("D0")
        fleet.drain("P0")

    text = request(1, 0.0, items=(), tokens=200), request(2, 1.0, items=())
    first, second = changing("P-2D", text, (0.8, flip)).served
    assert first.instances == ("P0", "D0") and first.tokens == 200
    assert second.instances == ("D0", "D1") and second.last_s < first.last_s


def test_a_p_encodes_itself_once_the_encoders_are_gone() -> None:
    early, late = changing("E-P-D", [request(1, 0.0), request(2, 2.0)], (0.55, lambda fleet: fleet.drain("E0"))).served
    assert early.ttft_s == pytest.approx(FIRST + 0.04), "its item was being encoded, and is not encoded again"
    assert (late.path, late.instances) == ("P-D", ("P0", "D0"))
    assert late.ttft_s == pytest.approx(FIRST)


def test_what_comes_while_there_is_no_path_waits_in_order() -> None:
    """Those that had been placed have their D, which finishes them."""
    requests = [request(n, n / 10, items=(), text=2048) for n in range(8)]  # a step each
    drain, add = (lambda fleet: fleet.drain("D0")), (lambda fleet: fleet.add(plan(Role.D, 1, 7)))
    run = changing("P-D", requests, (0.35, drain), (6.0, add))
    placed, waited = run.served[:4], run.served[4:]
    assert all(one.instances == ("P0", "D0") for one in placed)
    assert all(one.instances == ("P0", "D1") for one in waited)
    first_s = [one.first_s for one in waited]
    assert first_s == sorted(set(first_s)) and first_s[0] > max(6.0, *(one.first_s for one in placed))


def test_a_run_ends_although_nobody_makes_a_path_again() -> None:
    first, never = changing("TP1", [request(1, 0.0), request(2, 3.0)], (2.0, lambda fleet: fleet.drain("EPD0"))).served
    assert first.ttft_s == pytest.approx(FIRST)
    assert never.first_s == math.inf and never.instances == ()


def test_devices_count_from_the_start_of_an_instance_until_the_last_on_them_is_gone() -> None:
    new = plan(Role.D, 1, 5)
    requests = [request(1, 0.0), request(2, 20.0)]
    alone = served("(E-P)-D", *requests)
    assert alone.device_s == pytest.approx(2 * alone.span_s), "E and P share one"
    run = changing(
        "(E-P)-D",
        requests,
        (2.0, lambda fleet: fleet.hold(new)),
        (5.0, lambda fleet: fleet.add(new)),
        (6.0, lambda fleet: fleet.drain("E0")),
        (6.5, lambda fleet: fleet.remove("E0")),
        (7.0, lambda fleet: fleet.drain("D1")),
        (9.0, lambda fleet: fleet.remove("D1")),
        (10.0, lambda fleet: fleet.hold(new)),
        (11.0, lambda fleet: fleet.remove("D1")),
    )
    assert run.device_s == pytest.approx(2 * run.span_s + 7.0 + 1.0), "the second start failed"
