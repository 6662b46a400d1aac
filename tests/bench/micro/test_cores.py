"""The speed of cores as it is read, and fewer cores for what is started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from bench.micro.cores import alike, core_us, kept_apart


def test_each_core_is_read_and_the_thread_has_all_of_them_again():
    own = os.sched_getaffinity(0)

    readings = core_us()

    assert len(readings) == len(own) and min(readings) > 0
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(("readings", "same"), [((22.0, 24.0, 21.5, 22.0), True), ((22.0, 40.0, 22.0, 40.0), False)])
def test_cores_at_full_speed_and_shared_ones_are_told_apart(readings: tuple[float, ...], same: bool):
    assert alike(readings) is same


def test_what_is_kept_apart_has_the_cores_it_computes_on_and_the_rest_have_the_others() -> None:
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("needs two cores")
    computes = f"import os; os.sched_setaffinity(0, {{{max(own)}}}); print(flush=True); input()"
    floats = "print(flush=True); input()"
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for code in (computes, floats)
        )
        for process in (one, other):
            assert process.stdout is not None and process.stdout.readline()
        with kept_apart([one.pid], [other.pid]):
            assert os.sched_getaffinity(one.pid) == {max(own)}
            assert os.sched_getaffinity(other.pid) == os.sched_getaffinity(0) == own - {max(own)}
        assert os.sched_getaffinity(0) == own
        for process in (one, other):
            process.communicate(b"\n", timeout=10)
