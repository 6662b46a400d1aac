"""Virtual CPU devices share out the cores this process may use."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.core_sets import TooFewCoresError, apportion, core_sets


def test_two_devices_on_two_cores_get_one_each() -> None:
    found = core_sets(2, [0, 1])
    assert found.sets == {0: (0,), 1: (1,)}
    assert not found.oversubscribed


def test_three_devices_on_two_cores_go_round_robin_and_say_so() -> None:
    found = core_sets(3, [4, 9])
    assert found.sets == {0: (4,), 1: (9,), 2: (4,)}
    assert found.oversubscribed


def test_one_device_takes_every_core() -> None:
    assert core_sets(1, [0, 1, 2]).sets == {0: (0, 1, 2)}


def test_by_default_the_cores_are_those_this_process_may_use() -> None:
    assert set(core_sets(1).sets[0]) == os.sched_getaffinity(0)


def test_a_tensor_parallel_instance_uses_the_cores_of_its_devices() -> None:
    assert core_sets(2, range(4)).of((1, 0)) == (0, 1, 2, 3)
    assert core_sets(3, [0, 1]).of((0, 2)) == (0,)


@given(st.integers(1, 40), st.sets(st.integers(0, 200), min_size=1, max_size=64))
def test_every_device_has_a_core_and_none_is_shared_without_need(devices: int, cores: set[int]) -> None:
    found = core_sets(devices, cores)
    used = [core for one in found.sets.values() for core in one]
    assert len(found.sets) == devices
    assert all(found.sets.values())
    assert found.oversubscribed == (devices > len(cores))
    if not found.oversubscribed:
        assert sorted(used) == sorted(cores)
        assert max(map(len, found.sets.values())) - min(map(len, found.sets.values())) <= 1


@pytest.mark.parametrize(
    ("total", "shares", "whole"),
    [
        (24, [0.3, 0.7], [7, 17]),
        (24, [0.5, 0.5], [12, 12]),
        (10, [0.7, 0.3], [7, 3]),
        (2, [0.5, 0.5], [1, 1]),
        (2, [0.01, 0.99], [1, 1]),
        (24, [0.01, 0.01, 0.98], [1, 1, 22]),
        (10, [0.3, 0.3], [3, 3]),  # together no more than they were given
        (7, [1.0], [7]),
    ],
)
def test_shares_become_whole_cores(total: int, shares: list[float], whole: list[int]) -> None:
    assert apportion(total, shares) == whole


@given(st.integers(1, 64), st.lists(st.integers(1, 100), min_size=1, max_size=8), st.floats(0.05, 1.0))
def test_whole_cores_are_at_least_one_each_and_no_more_than_there_are(
    total: int, weights: list[int], given_away: float
) -> None:
    shares = [given_away * weight / sum(weights) for weight in weights]
    if total < len(shares):
        with pytest.raises(TooFewCoresError):
            apportion(total, shares)
        return
    whole = apportion(total, shares)
    assert min(whole) >= 1
    assert sum(whole) <= max(len(shares), total * sum(shares) + 1e-6)
    assert all(count <= total * share + 1 for count, share in zip(whole, shares, strict=True))


@given(st.integers(2, 64), st.integers(1, 4), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_neighbours_get_disjoint_cores_of_their_devices(cores: int, devices: int, weights: list[int]) -> None:
    sets, mine = core_sets(devices, range(cores)), tuple(range(min(devices, 2)))
    shares = [weight / sum(weights) for weight in weights]
    there = sets.of(mine)
    if len(there) < len(shares):
        with pytest.raises(TooFewCoresError, match=f"for {len(shares)} shares"):
            sets.divided(mine, shares)
        return
    runs = sets.divided(mine, shares)
    assert sorted(core for run in runs for core in run) == list(there)
    assert all(runs)
