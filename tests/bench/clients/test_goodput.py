"""The search for the highest rate that attains the objective."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bench.clients.slo import find_goodput


def search_to(capacity: float, start: float, **more: float) -> tuple[float, float | None]:
    """A search over a server that attains everything up to `capacity` and nothing beyond."""
    probes = itertools.count()

    def meets(rate: float) -> bool:
        assert next(probes) < 200, "the search does not end"
        return rate <= capacity

    return find_goodput(meets, start, **more)


@given(st.floats(0.02, 50.0), st.floats(0.5, 50.0))
def test_it_ends_around_the_capacity_wherever_it_begins(ratio, start):
    capacity = ratio * start
    met, missed = search_to(capacity, start)

    assert missed is not None
    assert met <= capacity < missed <= 1.1 * met + 1e-9


def test_a_server_that_meets_everything_has_no_upper_end():
    assert search_to(1e9, 4.0, span=8.0) == (32.0, None)


def test_a_server_that_meets_nothing_has_no_goodput():
    assert search_to(0.0, 4.0, span=4.0) == (0.0, 1.0)
