"""Policies: what each of them picks, and what holds for all: nobody starves, imbalance is bounded, chance is given."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.routing.policy import (
    ALIKE,
    POLICIES,
    UNMEASURED_RATE,
    Candidate,
    Placement,
    burden,
    first_token,
    least_loaded,
    left_of,
    most_cached,
    preferred,
    rates,
    sharing_s,
    with_neighbours,
)

NAMES = sorted(POLICIES)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        id=st.sampled_from([f"P{index}" for index in range(12)]),
        incarnation=st.just("1"),
        load=st.floats(0, 1e6),
        last_pick=st.integers(0, 1000),
        rate=st.sampled_from([0.0, 10.0, 1e4]),
        neighbours_s=st.lists(st.sampled_from([0.0, 0.5, math.inf]), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.id,
)
ASKS = st.builds(Placement, st.floats(1, 1e5), st.integers(0, 2**32 - 1))


def pick(name: str, candidates: Sequence[Candidate], cost: float = 1.0, draw: int = 0) -> str:
    return POLICIES[name](candidates, Placement(cost, draw)).id


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(CANDIDATES, ASKS)
def test_a_policy_picks_one_of_the_candidates_and_the_same_one_again(
    name: str, candidates: list[Candidate], placement: Placement
) -> None:
    chosen = POLICIES[name](candidates, placement)
    assert any(chosen is candidate for candidate in candidates)
    assert POLICIES[name](candidates, placement) is chosen


def test_the_least_loaded_is_picked_and_ties_are_broken_in_turn() -> None:
    a, b, c = Candidate("A", "1", 5, 1), Candidate("B", "1", 2, 9), Candidate("C", "1", 2, 3)
    assert least_loaded([a, b]) is b and least_loaded([a, b, c]) is c


def test_round_robin_ignores_loads() -> None:
    assert pick("round-robin", [Candidate("A", "1", 0, 5), Candidate("B", "1", 99, 4)]) == "B"


def test_power_of_two_takes_the_less_loaded_of_two_and_draws_every_pair() -> None:
    candidates = [Candidate(f"P{index}", "1", index) for index in range(4)]
    picks = [pick("power-of-two", candidates, draw=draw) for draw in range(12)]
    # Of the 12 ordered pairs 6 have P0 in them, 4 of the others P1, and P3 never wins.
    assert [picks.count(f"P{index}") for index in range(4)] == [6, 4, 2, 0]


def test_the_first_token_goes_where_it_is_predicted_first_and_unknown_speeds_are_the_usual_one() -> None:
    slow, fast, new = Candidate("S", "1", 100, rate=10), Candidate("F", "1", 300, rate=100), Candidate("N", "1", 0)
    assert pick("first-token", [slow, fast], cost=10) == "F"
    assert pick("first-token", [slow, fast, new], cost=10) == "N"
    assert pick("first-token", [replace(slow, rate=0), replace(fast, rate=0)], cost=10) == "S"


def test_equal_instances_take_turns_although_their_measured_speeds_differ_a_little() -> None:
    first, second = Candidate("A", "1", 0, 7, rate=900), Candidate("B", "1", 0, 8, rate=1500)
    assert pick("first-token", [first, second]) == "A"
    assert pick("first-token", [replace(first, last_pick=9), second]) == "B"
    assert rates([first, second], ALIKE) == [1200, 1200]
    assert rates([first, second]) == [900, 1500], "where nothing else moves the measurement"
    assert rates([Candidate("A", "1", 0)]) == [UNMEASURED_RATE]


def test_of_equals_the_one_with_the_idle_device_is_picked() -> None:
    beside_encode = Candidate("A", "1", 0, 0, neighbours_s=(0.2,))
    beside_nothing = Candidate("B", "1", 0, 9, neighbours_s=(0.0,))
    assert pick("first-token", [beside_encode, beside_nothing]) == "B"
    assert pick("first-token", [beside_encode, replace(beside_nothing, load=5000)]) == "A", "busier than both"


@pytest.mark.parametrize(
    ("pending_s", "work_s", "neighbours_s", "costs_s"),
    [
        (0.0, 1.0, (), 0.0),
        (0.0, 1.0, (0.0,), 0.0),
        (0.0, 1.0, (0.25,), 0.5),  # the neighbour's quarter comes first, and is delayed by as much
        (0.0, 1.0, (math.inf,), 2.0),  # turns to the end, and a second less for whoever decodes
        (2.0, 1.0, (1.0,), 1.0),  # what was pending before has delayed the neighbour already
        (0.0, 1.0, (0.25, math.inf), 2.5),
    ],
)
def test_sharing_a_device_costs_the_turns_of_both(
    pending_s: float, work_s: float, neighbours_s: tuple[float, ...], costs_s: float
) -> None:
    assert sharing_s(pending_s, work_s, neighbours_s) == pytest.approx(costs_s)
    loads = [Candidate("A", "1", pending_s * 10, rate=10.0, neighbours_s=neighbours_s)]
    assert with_neighbours(loads, work_s * 10)[0].load == pytest.approx((pending_s + costs_s) * 10)


@settings(max_examples=40)
@given(CANDIDATES, st.data())
def test_avoided_and_suspended_instances_come_last(candidates: list[Candidate], data: st.DataObject) -> None:
    candidates = [replace(candidate, suspended=data.draw(st.booleans())) for candidate in candidates]
    avoid = {candidate.incarnation_id for candidate in candidates if data.draw(st.booleans())}
    fit = preferred(candidates, avoid)
    assert fit and {burden(one, avoid) for one in fit} == {min(burden(one, avoid) for one in candidates)}
    assert preferred([]) == []
    other_incarnation = replace(candidates[0], incarnation="2", suspended=False)
    assert burden(other_incarnation, {candidates[0].incarnation_id}) == 0


class Instances:
    """Instances whose loads a policy sees late: as of the last report, and what was placed since.

    A report is made every `stale` placements; work that ends in between is `unseen` until then.
    """

    def __init__(self, count: int, stale: int, chance: random.Random) -> None:
        self.load = [0.0] * count
        self.seen = [0.0] * count
        self.picked = [0] * count
        self.unseen = 0.0
        self._last_pick = [0] * count
        self._stale = stale
        self._chance = chance

    def pick(self, policy: str, cost: float) -> int:
        candidates = [
            Candidate(f"P{index}", "1", load, last, rate=100.0)
            for index, (load, last) in enumerate(zip(self.seen, self._last_pick, strict=True))
        ]
        return int(POLICIES[policy](candidates, Placement(cost, self._chance.getrandbits(32))).id[1:])

    def place(self, index: int, cost: float) -> None:
        self.picked[index] += 1
        self._last_pick[index] = sum(self.picked)
        self.load[index] += cost
        self.seen[index] += cost
        if sum(self.picked) % self._stale == 0:
            self.seen, self.unseen = list(self.load), 0.0

    def end(self, index: int, work: float) -> None:
        """Something gets done, which no proxy learns before the next report."""
        ended = min(self.load[index], work)
        self.load[index] -= ended
        self.unseen += ended


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 2**32))
def test_nobody_starves_while_work_piles_up(name: str, count: int, stale: int, seed: int) -> None:
    chance = random.Random(seed)
    instances = Instances(count, stale, chance)
    for _ in range(30 * count):
        cost = chance.choice([1.0, 2.0])
        instances.place(instances.pick(name, cost), cost)
    assert min(instances.picked) > 0


@pytest.mark.parametrize("name", ["first-token", "least-loaded", "round-robin"])
@settings(max_examples=10)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 2**32))
def test_nobody_starves_while_work_ends_at_once(name: str, count: int, stale: int, seed: int) -> None:
    instances = Instances(count, stale, random.Random(seed))
    for _ in range(2 * count * stale):
        index = instances.pick(name, 1.0)
        instances.place(index, 1.0)
        instances.end(index, 1.0)
    assert min(instances.picked) > 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(
    st.integers(2, 6),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60),
    st.data(),
)
def test_stale_reports_cost_no_more_imbalance_than_what_ended_unseen(
    name: str, count: int, stale: int, endings: list[tuple[int, int]], data: st.DataObject
) -> None:
    instances = Instances(count, stale, random.Random(data.draw(st.integers(0, 2**32))))
    for who, work in endings:
        index = instances.pick(name, 1.0)
        load, mine = instances.load, instances.load[index]
        others = load[:index] + load[index + 1 :]
        near_least = mine <= min(load) + instances.unseen + 1e-9
        if name in ("first-token", "least-loaded"):
            assert near_least
        elif name == "power-of-two":
            assert mine <= max(others) + instances.unseen + 1e-9, "never the one with the most"
        else:
            assert instances.picked[index] == min(instances.picked), "it looks at no load, but takes turns"
        instances.place(index, 1.0)
        instances.end(who % count, float(work))


def test_a_cached_prefix_is_worth_the_seconds_that_it_takes_to_compute() -> None:
    def chosen(load: float) -> str:
        holder = Candidate("P0", "1", load, rate=1000.0, cached=900.0)
        return first_token([holder, Candidate("P1", "1", 0.0, rate=1000.0)], Placement(1000.0)).id

    assert (chosen(0.0), chosen(899.0), chosen(901.0)) == ("P0", "P0", "P1")
    assert left_of(10.0, Candidate("P0", "1", 0.0, cached=50.0)) == 1.0, "its last token is computed always"


def test_who_decodes_is_whoever_has_most_of_the_prompt_within_the_bound() -> None:
    def chosen(load: float, cached: float = 500.0) -> str:
        loads = (load, 4.0, 5.0, 4.0)
        some = [Candidate(f"D{at}", "1", load, at, cached=cached * (at == 0)) for at, load in enumerate(loads)]
        return most_cached(some, Placement()).id

    assert chosen(4.0) == chosen(6.0) == "D0"
    assert chosen(9.0) == "D1", "a hot spot is none the better for its cache"
    assert chosen(5.0, cached=0.0) == "D1"
