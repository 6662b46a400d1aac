"""Least loaded first, and longest processing time first."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from proxy.policy import Candidate, least_loaded, split_longest_first

WEIGHTS = st.lists(st.integers(0, 1000), max_size=6)
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=3)


@given(WEIGHTS, LOADS)
def test_every_item_goes_to_exactly_one_worker(weights: list[int], loads: list[int]) -> None:
    shares = split_longest_first(weights, loads)
    assert len(shares) == len(loads)
    assert sorted(item for share in shares for item in share) == list(range(len(weights)))
    assert all(list(share) == sorted(share) for share in shares)


@given(WEIGHTS, LOADS)
def test_the_largest_load_is_within_one_item_of_the_best(weights: list[int], loads: list[int]) -> None:
    def makespan(choice: tuple[int, ...]) -> int:
        totals = list(loads)
        for item, worker in enumerate(choice):
            totals[worker] += weights[item]
        return max(totals)

    shares = split_longest_first(weights, loads)
    ours = makespan(tuple(next(w for w, share in enumerate(shares) if item in share) for item in range(len(weights))))
    best = min(makespan(choice) for choice in product(range(len(loads)), repeat=len(weights)))
    assert best <= ours <= best + max(weights, default=0)


def test_ties_are_broken_in_turn_and_avoided_lives_come_last() -> None:
    a, b = Candidate("A", "1", 0, last_pick=5), Candidate("B", "1", 0, last_pick=3)
    assert least_loaded([a, b]) is b
    assert least_loaded([a, b], avoid={b.life}) is a
    assert least_loaded([b], avoid={b.life}) is b
    assert least_loaded([a, Candidate("B", "2", 0, 3)], avoid={("B", "1")}) == Candidate("B", "2", 0, 3)
    assert least_loaded([]) is None


@given(st.lists(st.floats(0, 100), min_size=1))
def test_the_least_loaded_is_picked(loads: list[float]) -> None:
    picked = least_loaded([Candidate(str(i), "1", load) for i, load in enumerate(loads)])
    assert picked is not None and picked.load == min(loads)
