"""Items over encoders: to their owners, within a bound on when they are done; small ones in one call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.policy import CALL_TOKENS, SAME_SPEED, SLACK, TOLERANCE, Candidate, calls, owners, spread
from proxy.routing.policy import rates as steady
from tests.soak.placement import makespan_s

KEYS = st.lists(st.text("abcdef", min_size=1, max_size=6), max_size=12, unique=True)
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


def workers(loads: Sequence[float], rates: Sequence[float] = ()) -> list[Candidate]:
    rates = rates or [0.0] * len(loads)
    return [Candidate(f"E{index}", "1", load, rate=rates[index]) for index, load in enumerate(loads)]


def loads_after(keys: Sequence[str], costs: Sequence[float], loads: Sequence[float]) -> list[float]:
    shares = spread(keys, costs, workers(loads))
    return [load + sum(costs[item] for item in share) for load, share in zip(loads, shares, strict=True)]


@settings(max_examples=50)
@given(KEYS, LOADS, st.data())
def test_every_item_goes_to_exactly_one_worker(keys: list[str], loads: list[int], data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 1000), min_size=len(keys), max_size=len(keys)))
    shares = spread(keys, costs, workers(loads))
    assert len(shares) == len(loads)
    assert sorted(item for share in shares for item in share) == list(range(len(keys)))
    assert all(list(share) == sorted(share) for share in shares)


RATES = [100.0, 300.0, 900.0]


def done_s(costs: Sequence[float], loads: Sequence[float], rates: Sequence[float], chance: int = 0) -> float:
    """When the last encoder that gets an item is done, where these are spread."""
    shares = spread([f"{chance} {item}" for item in range(len(costs))], costs, workers(loads, rates))
    at = {item: worker for worker, share in enumerate(shares) for item in share}
    return makespan_s([at[item] for item in range(len(costs))], costs, loads, steady(workers(loads, rates)))


def best_s(costs: Sequence[float], loads: Sequence[float], rates: Sequence[float]) -> float:
    """The same at best, by trying everything."""
    speeds = steady(workers(loads, rates))
    every = product(range(len(loads)), repeat=len(costs))
    return min(makespan_s(at, costs, loads, speeds) for at in every)


def even_s(costs: Sequence[float], loads: Sequence[float], rates: Sequence[float]) -> float:
    """Until when items may wait for their owners in any case."""
    return (SLACK * sum(loads) + TOLERANCE * sum(costs)) / sum(steady(workers(loads, rates)))


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.lists(st.integers(0, 60), min_size=3, max_size=3),
    st.lists(st.sampled_from(RATES), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_whoever_gets_an_item_is_done_within_a_quarter_of_the_best_of_all_or_the_mean(
    costs: list[int], loads: list[int], rates: list[float], chance: int
) -> None:
    found_s = done_s(costs, loads, rates, chance)
    assert found_s <= max(1.25 * best_s(costs, loads, rates), even_s(costs, loads, rates)) * (1 + 1e-9)


def test_items_are_on_average_within_a_twentieth_of_the_best() -> None:
    chance = random.Random(3)
    over = []
    for number in range(100):
        costs, rates = [chance.randint(1, 50) for _ in range(6)], [chance.choice(RATES) for _ in range(3)]
        over.append(done_s(costs, [0] * 3, rates, number) / best_s(costs, [0] * 3, rates))
    assert sum(over) / len(over) <= 1.05


def test_what_longest_first_gets_wrong_is_put_right() -> None:
    costs = [7, 7, 6, 6, 5, 5, 4, 4, 4]  # Graham's example: 15 longest first, 12 at best
    assert max(1000 * done_s(costs, [0] * 4, [1000.0] * 4, chance) for chance in range(200)) <= 12.6


def test_many_items_are_levelled() -> None:
    costs = [float(1 + index % 7) for index in range(200)]
    assert 1000 * done_s(costs, [0.0] * 8, [1000.0] * 8) <= TOLERANCE * sum(costs) / 8


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1), min_size=8, max_size=8, unique=True))
def test_eight_equal_images_over_four_idle_encoders_are_two_each(keys: list[str]) -> None:
    assert loads_after(keys, [1.0] * 8, [0.0] * 4) == [2.0] * 4


@settings(max_examples=50)
@given(st.text(), st.floats(1, 1e6), st.lists(st.floats(1000, 1000 * (SAME_SPEED**0.5 - 0.01)), min_size=5, max_size=5))
def test_a_single_item_meets_its_owner_among_idle_workers_of_about_one_speed(
    key: str, cost: float, rates: list[float]
) -> None:
    owner = owners(key, [f"E{index}" for index in range(5)])[0]
    assert spread([key], [cost], workers([0.0] * 5))[owner] == [0]
    assert spread([key], [cost], workers([0.0] * 5, rates))[owner] == [0]


@settings(max_examples=50)
@given(st.text(), st.integers(0, 100), st.integers(1, 10))
def test_a_single_item_meets_its_owner_among_equally_busy_workers(key: str, load: int, cost: int) -> None:
    owner = owners(key, [f"E{index}" for index in range(4)])[0]
    assert spread([key], [cost], workers([float(load)] * 4))[owner] == [0]


def test_an_owner_that_is_busy_while_others_are_idle_is_passed_over() -> None:
    first, second, *_ = owners("key", ["E0", "E1", "E2"])
    loads = [0.0] * 3
    loads[first] = 100.0
    assert spread(["key"], [1.0], workers(loads))[second] == [0]


def test_an_encoder_of_twice_the_speed_gets_twice_the_work() -> None:
    keys = [f"key {index}" for index in range(12)]
    shares = spread(keys, [10.0] * 12, workers([0.0] * 3, [100.0, 100.0, 200.0]))
    assert [len(share) for share in shares] == [3, 3, 6]


@settings(max_examples=50)
@given(st.lists(st.floats(1, 600), max_size=16), st.booleans(), st.randoms(use_true_random=False))
def test_calls_hold_every_item_once_and_only_small_ones_together(
    costs: list[float], alone: bool, chance: random.Random
) -> None:
    at = [chance.randrange(3) for _ in costs]
    shares = [[item for item in range(len(costs)) if at[item] == worker] for worker in range(3)]
    made = calls(costs, shares, alone=alone)
    assert sorted(item for _, part in made for item in part) == list(range(len(costs)))
    for worker, part in made:
        assert {at[item] for item in part} == {worker}
        assert len(part) == 1 or (not alone and sum(costs[item] for item in part) <= CALL_TOKENS)
    assert [part[0] for _, part in made] == sorted(part[0] for _, part in made), "in the order of the prompt"
    for worker in range(0 if alone else 3):
        small = [part for place, part in made if place == worker and costs[part[0]] < CALL_TOKENS]
        for part, following in pairwise(small):
            assert sum(costs[item] for item in part) + costs[following[0]] > CALL_TOKENS, "no call without need"


@given(st.text(), st.lists(st.sampled_from([f"E{i}" for i in range(9)]), min_size=2, unique=True), st.data())
def test_owners_agree_whatever_the_order_and_only_the_keys_of_a_dead_one_move(
    key: str, ids: list[str], data: st.DataObject
) -> None:
    order = [ids[index] for index in owners(key, ids)]
    shuffled = data.draw(st.permutations(ids))
    assert [shuffled[index] for index in owners(key, shuffled)] == order
    dead = data.draw(st.sampled_from(ids))
    left = [one for one in ids if one != dead]
    assert [left[index] for index in owners(key, left)] == [one for one in order if one != dead]


def test_keys_spread_over_owners() -> None:
    first = [owners(f"key {index}", ["E0", "E1", "E2", "E3"])[0] for index in range(2000)]
    assert all(420 < first.count(worker) < 580 for worker in range(4))
