"""Schedules of items on workers, held against brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.encode.schedule import longest_first, makespan_s, schedule, shortest_possible_s

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)
LOADS = st.lists(st.integers(0, 60), min_size=3, max_size=3)
SPEEDS = st.lists(st.sampled_from([0.5, 1, 2, 4]), min_size=3, max_size=3)


@settings(max_examples=40)
@given(COSTS, LOADS, SPEEDS)
def test_a_schedule_is_near_the_best_of_all_and_never_worse_than_longest_first(
    costs: list[int], loads: list[int], speeds: list[float]
) -> None:
    result = schedule(costs, loads, speeds)
    everything = product(range(3), repeat=len(costs))
    best_s = min(makespan_s(at, costs, loads, speeds) for at in everything)
    assert makespan_s(result.at, costs, loads, speeds) == result.makespan_s
    assert shortest_possible_s(costs, loads, speeds) <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= result.makespan_s <= 1.021 * best_s
    assert result.makespan_s <= longest_first(costs, loads, speeds).makespan_s


def test_what_longest_first_gets_wrong_is_found() -> None:
    costs = [7, 7, 6, 6, 5, 5, 4, 4, 4]  # Graham's example: 15 against 12
    assert longest_first(costs, [0] * 4, [1] * 4).makespan_s == 15
    assert schedule(costs, [0] * 4, [1] * 4).makespan_s == 12


def test_many_items_are_placed_at_once() -> None:
    result = schedule([float(1 + index % 7) for index in range(200)], [0.0] * 8, [1.0] * 8)
    assert result.makespan_s <= 1.02 * shortest_possible_s(
        [float(1 + index % 7) for index in range(200)], [0] * 8, [1] * 8
    )


def test_nothing_to_place_takes_no_time() -> None:
    assert schedule([], [5.0], [1.0]).makespan_s == 0
