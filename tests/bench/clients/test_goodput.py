"""The search for the highest rate that attains the objective."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.clients.goodput import Search, wilson


def search_to(capacity: float, start: float, **more: float) -> Search:
    """A search over a server that attains everything up to `capacity` and nothing beyond."""
    search = Search(0.9, start, **more)  # type: ignore[arg-type]
    for _ in range(200):
        rate = search.next()
        if rate is None:
            return search
        search.add(rate, 200 if rate <= capacity else 0, 200)
    raise AssertionError("the search does not end")


@given(st.floats(0.02, 50.0), st.floats(0.5, 50.0))
def test_it_ends_around_the_capacity_wherever_it_begins(ratio, start):
    capacity = ratio * start
    found = search_to(capacity, start).result()

    assert found.missed_rps is not None
    assert found.rate_rps <= capacity < found.missed_rps <= 1.1 * found.rate_rps + 1e-9
    assert found.sure


def test_a_server_that_meets_everything_has_no_upper_end():
    found = search_to(1e9, 4.0, highest_rps=32.0).result()

    assert (found.rate_rps, found.missed_rps) == (32.0, None)


def test_a_server_that_meets_nothing_has_no_goodput():
    found = search_to(0.0, 4.0, lowest_rps=1.0).result()

    assert (found.rate_rps, found.missed_rps) == (0.0, 1.0)


def test_a_close_call_is_probed_again_and_then_left_as_unsure():
    search = Search(0.9, 4.0, highest_rps=4.0, repeats=3)
    probes = 0
    while (rate := search.next()) is not None:
        search.add(rate, 91, 100)
        probes += 1

    assert probes == 3
    assert search.probed[0].about == 300
    assert search.result().rate_rps == 4.0
    assert not search.result().sure


def test_a_queue_that_grows_is_a_miss_however_short_the_run():
    search = Search(0.9, 4.0)
    search.add(4.0, 100, 100, steady=False)

    assert search.next() == 2.0
    assert search.result().missed_rps == 4.0


def test_no_answer_at_all_is_no_success():
    search = Search(0.9, 4.0, repeats=1)
    search.add(4.0, 0, 0)

    assert search.next() == 2.0


def test_the_interval_narrows_with_the_sample_and_holds_the_share():
    assert wilson(0, 0) == (0.0, 1.0)
    few, many = wilson(9, 10), wilson(900, 1000)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]
    assert wilson(50, 50)[1] == pytest.approx(1.0)
