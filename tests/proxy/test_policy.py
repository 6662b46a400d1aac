"""Least loaded first; items to their owners, within a bound on the load."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.policy import SLACK, Candidate, assign_to_owners, least_loaded, owners

KEYS = st.lists(st.text("abcdef", min_size=1, max_size=6), max_size=12, unique=True)
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


def workers(loads: Sequence[float]) -> list[Candidate]:
    return [Candidate(f"E{index}", "1", load) for index, load in enumerate(loads)]


def loads_after(keys: Sequence[str], weights: Sequence[float], loads: Sequence[float]) -> list[float]:
    shares = assign_to_owners(keys, weights, workers(loads))
    return [load + sum(weights[item] for item in share) for load, share in zip(loads, shares, strict=True)]


@given(KEYS, LOADS, st.data())
def test_every_item_goes_to_exactly_one_worker(keys: list[str], loads: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=len(keys), max_size=len(keys)))
    shares = assign_to_owners(keys, weights, workers(loads))
    assert len(shares) == len(loads)
    assert sorted(item for share in shares for item in share) == list(range(len(keys)))
    assert all(list(share) == sorted(share) for share in shares)


@given(KEYS, LOADS, st.data())
def test_nobody_gets_an_item_beyond_the_bound(keys: list[str], loads: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=len(keys), max_size=len(keys)))
    heaviest = max(weights, default=0)
    mean = (sum(loads) + sum(weights)) / len(loads)
    for before, after in zip(loads, loads_after(keys, weights, loads), strict=True):
        assert after == before or after <= max(SLACK * mean, mean + heaviest) + 1e-6


@given(st.lists(st.text(min_size=1), min_size=8, max_size=8, unique=True))
def test_eight_equal_pictures_over_four_idle_encoders_are_two_each(keys: list[str]) -> None:
    assert loads_after(keys, [1.0] * 8, [0.0] * 4) == [2.0] * 4


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


@given(st.text(), st.floats(0.1, 1e9))
def test_a_single_item_meets_its_owner_among_idle_workers(key: str, weight: float) -> None:
    shares = assign_to_owners([key], [weight], workers([0.0] * 5))
    assert shares[owners(key, [f"E{index}" for index in range(5)])[0]] == (0,)


def test_an_owner_that_is_busy_while_others_are_idle_is_passed_over() -> None:
    first, second, *_ = owners("key", ["E0", "E1", "E2"])
    loads = [0.0] * 3
    loads[first] = 100.0
    assert assign_to_owners(["key"], [1.0], workers(loads))[second] == (0,)


def test_keys_spread_over_owners() -> None:
    first = [owners(f"key {index}", ["E0", "E1", "E2", "E3"])[0] for index in range(4000)]
    assert all(900 < first.count(worker) < 1100 for worker in range(4))


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
