"""The speed of cores as it is read, and fewer cores for what is started."""

from __future__ import annotations

import os

import pytest

from bench.micro.cores import alike, core_us


def test_each_core_is_read_and_the_thread_has_all_of_them_again():
    own = os.sched_getaffinity(0)

    readings = core_us()

    assert len(readings) == len(own) and min(readings) > 0
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(("readings", "same"), [((22.0, 24.0, 21.5, 22.0), True), ((22.0, 40.0, 22.0, 40.0), False)])
def test_cores_at_full_speed_and_shared_ones_are_told_apart(readings: tuple[float, ...], same: bool):
    assert alike(readings) is same
