"""Virtual CPU devices share out the cores this process may use."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from npu_ops.core_sets import core_sets


def test_two_devices_on_two_cores_get_one_each() -> None:
    found = core_sets(2, [0, 1])
    assert found.sets == ((0,), (1,))
    assert not found.oversubscribed


def test_three_devices_on_two_cores_go_round_robin_and_say_so() -> None:
    found = core_sets(3, [4, 9])
    assert found.sets == ((4,), (9,), (4,))
    assert found.oversubscribed


def test_one_device_takes_every_core() -> None:
    assert core_sets(1, [0, 1, 2]).sets == ((0, 1, 2),)


def test_by_default_the_cores_are_those_this_process_may_use() -> None:
    assert set(core_sets(1).sets[0]) == os.sched_getaffinity(0)


def test_a_tensor_parallel_instance_uses_the_cores_of_its_devices() -> None:
    assert core_sets(2, range(4)).of((1, 0)) == (0, 1, 2, 3)
    assert core_sets(3, [0, 1]).of((0, 2)) == (0,)


@given(st.integers(1, 40), st.sets(st.integers(0, 200), min_size=1, max_size=64))
def test_every_device_has_a_core_and_none_is_shared_without_need(devices: int, cores: set[int]) -> None:
    found = core_sets(devices, cores)
    used = [core for one in found.sets for core in one]
    assert len(found.sets) == devices
    assert all(found.sets)
    assert found.oversubscribed == (devices > len(cores))
    if not found.oversubscribed:
        assert sorted(used) == sorted(cores)
        assert max(map(len, found.sets)) - min(map(len, found.sets)) <= 1
