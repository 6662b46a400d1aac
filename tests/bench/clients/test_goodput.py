"""The search for the highest rate that attains the objective."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.clients.slo import Goodput, find_goodput, wilson


def search_to(capacity: float, start: float, **more: float) -> Goodput:
    """A search over a server that attains everything up to `capacity` and nothing beyond."""
    probes = itertools.count()

    def probe(rate: float) -> tuple[int, int, bool]:
        assert next(probes) < 200, "the search does not end"
        return (200 if rate <= capacity else 0), 200, True

    return find_goodput(probe, 0.9, start, **more)  # type: ignore[arg-type]


@given(st.floats(0.02, 50.0), st.floats(0.5, 50.0))
def test_it_ends_around_the_capacity_wherever_it_begins(ratio, start):
    capacity = ratio * start
    found = search_to(capacity, start)

    assert found.missed_rps is not None
    assert found.rate_rps <= capacity < found.missed_rps <= 1.1 * found.rate_rps + 1e-9
    assert found.sure


def test_a_server_that_meets_everything_has_no_upper_end():
    found = search_to(1e9, 4.0, highest_rps=32.0)

    assert (found.rate_rps, found.missed_rps) == (32.0, None)


def test_a_server_that_meets_nothing_has_no_goodput():
    found = search_to(0.0, 4.0, lowest_rps=1.0)

    assert (found.rate_rps, found.missed_rps) == (0.0, 1.0)


def test_a_close_call_is_probed_again_and_then_left_as_unsure():
    found = find_goodput(lambda rate: (91, 100, True), 0.9, 4.0, highest_rps=4.0, repeats=3)

    assert [(one.runs, one.about) for one in found.probed] == [(3, 300)]
    assert found.rate_rps == 4.0
    assert not found.sure


@pytest.mark.parametrize("first", [(100, 100, False), (0, 0, True)])
def test_a_queue_that_grows_is_a_miss_and_so_is_no_answer_at_all(first):
    asked = []

    def probe(rate: float) -> tuple[int, int, bool] | None:
        asked.append(rate)
        return first if rate == 4.0 else None

    found = find_goodput(probe, 0.9, 4.0, repeats=1)
    assert asked == [4.0, 2.0], "however short the run was"
    assert (found.rate_rps, found.missed_rps) == (0.0, 4.0), "as far as the search has come"


def test_the_interval_narrows_with_the_sample_and_holds_the_share():
    assert wilson(0, 0) == (0.0, 1.0)
    few, many = wilson(9, 10), wilson(900, 1000)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]
    assert wilson(50, 50)[1] == pytest.approx(1.0)
