"""Decisions of a follower: out at once, in late, never for nothing."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deploy.follow.follower import failed, lacking, moved, step
from deploy.follow.moves import TRADE_S, counts_of, regrouped
from deploy.follow.types import Decision, Limits, Memory, Move, Observation
from epd_serve.layout_parser import parse

COSTS = {"text": {"E": 0.0, "P": 0.05, "D": 0.33}, "media": {"E": 0.87, "P": 0.91, "D": 0.2}}
"""Group-seconds of a request: texts that are answered at length, and pictures that are answered in a word."""
LIMITS = Limits(devices=16, switchable=True)
WINDOW_S = 10.0
PARTS = 20
SPAN_S = 3600.0

LONG = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Hours of decisions: a smaller example would take minutes to find."""

Load = Callable[[float], Mapping[str, float]]
"""Requests a second by kind, at a time."""


class World:
    """A deployment that does at once what is decided."""

    def __init__(self, layout: str, load: Load, limits: Limits = LIMITS, seed: int = 1) -> None:
        self.layout, self.load, self.limits = parse(layout), load, limits
        self.memory, self.now_s, self.chance = Memory(), 0.0, random.Random(seed)
        self.decisions: list[Decision] = []
        self.came: list[Mapping[str, int]] = []

    @property
    def counts(self) -> Mapping[str, int]:
        return counts_of(self.layout)

    @property
    def changes(self) -> list[Decision]:
        return [one for one in self.decisions if one.chosen is not None]

    def go(self, seconds: float) -> World:
        for _ in range(round(seconds / self.limits.every_s)):
            self.now_s += self.limits.every_s
            self.came = [*self.came[-1:], self._arrivals()]
            came = {kind: sum(part[kind] for part in self.came) for kind in COSTS}
            seen = Observation(self.now_s, self.layout, WINDOW_S, came, COSTS, start_s=4.0)
            self.memory, decision = step(seen, self.memory, self.limits)
            self.decisions.append(decision)
            if decision.chosen is not None:
                assert str(parse(decision.chosen.layout)) == decision.chosen.layout
                assert counts_of(parse(decision.chosen.layout)) == decision.chosen.counts
                self.layout = parse(decision.chosen.layout)
                self.memory = moved(decision, self.memory, self.limits)
            self.check()
        return self

    def check(self) -> None:
        assert self.layout.device_count <= self.limits.devices
        for name, count in self.counts.items():
            assert self.limits.least.get(name, 1) <= count <= self.limits.most.get(name, math.inf)

    def _arrivals(self) -> Mapping[str, int]:
        """Of the time since the last decision."""
        parts = [self.load(self.now_s - self.limits.every_s * (part + 0.5) / PARTS) for part in range(PARTS)]
        means = {kind: sum(one.get(kind, 0.0) for one in parts) * self.limits.every_s / PARTS for kind in COSTS}
        return {kind: self._poisson(mean) for kind, mean in means.items()}

    def _poisson(self, mean: float) -> int:
        count, left = 0, self.chance.expovariate(1.0)
        while left < mean:
            count, left = count + 1, left + self.chance.expovariate(1.0)
        return count


def steady(**rates: float) -> Load:
    return lambda at_s: rates


def wave(period_s: float, high: Mapping[str, float], low: Mapping[str, float]) -> Load:
    return lambda at_s: high if at_s % period_s < period_s / 2 else low


def test_nothing_comes_and_after_the_quiet_time_the_least_is_left() -> None:
    world = World("3E-4P-5D", steady()).go(LIMITS.quiet_s - 10)
    assert not world.changes
    world.go(60)
    assert str(world.layout) == "E-P-D" and len(world.changes) == 1
    world.go(3600)
    assert len(world.changes) == 1


def test_more_is_there_within_a_few_windows_of_its_coming() -> None:
    world = World("E-P-D", steady(text=0.5), Limits(devices=32)).go(600)
    before = len(world.changes)
    world.load = steady(text=0.5, media=6.0)
    world.go(30)
    assert world.counts["E"] >= 6.0 * 0.87 / 0.7 and world.counts["P"] >= 6.0 * 0.91 / 0.7
    assert len(world.changes) > before


def test_where_all_is_used_it_goes_to_whom_it_helps_and_text_is_not_starved() -> None:
    world = World("6E-6P-4D", steady(text=6.0, media=40.0)).go(3600)
    assert world.layout.device_count == 16
    assert world.counts["D"] >= 6.0 * 0.33 / 0.7
    assert len(world.changes) <= 3


def test_p_and_d_become_each_other_where_that_is_enough() -> None:
    world = World("E-6P-2D", steady(media=3.0)).go(60)
    before, begun = world.counts, len(world.changes)
    world.load = steady(text=6.0)
    world.go(30)
    first = world.changes[begun].chosen
    assert first is not None and first.what == "flip" and first.counts["D"] > before["D"]
    assert sum(first.counts.values()) == sum(before.values())


def test_without_switchable_nothing_flips() -> None:
    world = World("E-6P-2D", steady(text=6.0), Limits(devices=16)).go(60)
    assert all(one.chosen and one.chosen.what == "scale" for one in world.changes)


def test_one_request_in_ten_minutes_moves_nothing() -> None:
    world = World("2E-2P-2D", lambda at_s: {"media": 0.1 if at_s % 600 < 10 else 0.0}).go(LIMITS.quiet_s + 60)
    least = len(world.changes)
    world.go(3 * 3600)
    assert len(world.changes) <= least + 1


def test_nobody_who_is_idle_loses_a_device_to_chance() -> None:
    """D is used nearly as much as it may be, so that in hours of windows some say that it is used more."""
    for seed in (0, 3):
        world = World("8E-5P-3D", steady(text=4.4, media=3.0), Limits(devices=16), seed).go(2 * SPAN_S)
        assert not [one for one in world.changes if one.chosen and one.chosen.counts["D"] > 3]


@settings(LONG, max_examples=20)
@given(
    period_s=st.sampled_from([2, 7, 20, 60, 180, 600, 1800]),
    text=st.floats(0, 20),
    media=st.floats(0, 8),
    kind=st.sampled_from(["text", "media", "both"]),
    devices=st.integers(3, 24),
    seed=st.integers(0, 99),
)
def test_square_waves_move_what_they_must_and_nothing_else(
    period_s: int, text: float, media: float, kind: str, devices: int, seed: int
) -> None:
    """Slow waves are followed, a few changes a side; of fast ones that is given up, as of all that is in vain."""
    high = {"text": text, "media": media}
    low = {one: 0.0 if kind in (one, "both") else rate for one, rate in high.items()}
    world = World("E-P-D", wave(period_s, high, low), Limits(devices=devices, switchable=seed % 2 == 0), seed)
    begun = len(world.go(900).changes)
    edges = 2 * SPAN_S / period_s
    most = 4 * edges if period_s >= 2 * TRADE_S else SPAN_S / 240
    assert len(world.go(SPAN_S).changes) - begun <= 4 + most


@settings(LONG, max_examples=10)
@given(text=st.floats(0, 30), media=st.floats(0, 12), devices=st.integers(3, 64), seed=st.integers(0, 99))
def test_a_steady_load_is_settled_once(text: float, media: float, devices: int, seed: int) -> None:
    world = World("E-P-D", steady(text=text, media=media), Limits(devices=devices, switchable=True), seed)
    world.go(1800)
    begun = len(world.changes)
    assert len(world.go(2 * SPAN_S).changes) - begun <= 2 * SPAN_S / 600


def test_what_cannot_be_reached_rests_and_is_not_chosen_again_for_a_while() -> None:
    world = World("E-P-D", steady(media=3.0))
    world.go(15)
    (first, *_) = [one.chosen for one in world.changes if one.chosen]
    world.layout = parse("E-P-D")
    world.memory = failed(first.layout, world.now_s, world.memory)
    seen = Observation(world.now_s, world.layout, WINDOW_S, {"media": 30}, COSTS)
    _, decision = step(seen, world.memory, LIMITS)
    assert decision.chosen is None or decision.chosen.layout != first.layout


def test_what_is_lacking_is_what_more_devices_would_bring() -> None:
    costs = {"media": {"E": 0.87, "P:tp2": 0.91, "D": 0.2}}
    seen = Observation(5.0, parse("E-P:tp2-D"), WINDOW_S, {"media": 40}, costs, start_s=4.0, devices=5)
    memory, decision = step(seen, Memory(), LIMITS)
    there = parse(decision.layout if decision.chosen is None else decision.chosen.layout).device_count
    lacks = lacking(seen, Memory(), LIMITS, decision)
    _, whole = step(replace(seen, devices=None), Memory(), LIMITS)
    assert whole.chosen is not None
    assert there <= 5 < parse(whole.chosen.layout).device_count == there + sum(lacks) <= 16
    assert set(lacks) == {1, 2}, "each copy's are on one node"
    assert lacking(replace(seen, devices=16), memory, LIMITS, whole) == ()
    others = Move("relayout", "EP-D", {"EP": 1, "D": 1}, "E", 2.0, 1.0, "")
    assert lacking(seen, Memory(), LIMITS, replace(decision, chosen=others)) == (), "of other groups nobody knows yet"


def test_less_than_the_least_goes_as_far_as_there_is_and_lacks_the_rest() -> None:
    limits = replace(LIMITS, least={"E": 6})
    seen = Observation(5.0, parse("E-P-D"), WINDOW_S, {"media": 0, "text": 0}, COSTS, start_s=4.0, devices=5)
    _, decision = step(seen, Memory(), limits)
    assert decision.chosen is not None and decision.chosen.counts == {"E": 3, "P": 1, "D": 1}
    assert lacking(seen, Memory(), limits, decision) == (1, 1, 1)


def test_nothing_is_given_up_while_a_front_door_is_silent() -> None:
    for heard, moves in ((1.0, True), (0.75, False), (0.25, False)):
        memory, chosen = Memory(), None
        for tick in itertools.count(1):
            seen = Observation(5.0 * tick, parse("2E-2P-2D"), WINDOW_S, {"text": 0}, COSTS, heard=heard)
            memory, decision = step(seen, memory, LIMITS)
            chosen = decision.chosen or chosen
            if tick > 100:
                break
        assert (chosen is not None) is moves, heard


def test_a_layout_keeps_its_order_while_it_grows_and_shrinks() -> None:
    layout = parse("(E-P)x2-D:tp2-D")
    assert regrouped(layout, {"(E-P)": 3, "D:tp2": 1, "D": 2}) == "(E-P)x3-D:tp2-2D"
    assert regrouped(layout, {"(E-P)": 1, "D:tp2": 1, "D": 1}) == "(E-P)-D:tp2-D"
