"""The steady part of a run, and what counts in it."""

from __future__ import annotations

import pytest

from bench.client.window import Window, steady_window
from tests.bench.client.rows import row


def test_the_window_leaves_out_the_beginning_and_the_drain():
    assert steady_window(100.0, 200.0, None) == Window(110.0, 200.0)
    assert steady_window(100.0, 200.0, 30.0) == Window(130.0, 200.0)
    assert steady_window(100.0, 100.0, 5.0).length_s == 0.0


def test_a_request_counts_where_it_was_due_however_long_it_took():
    rows = [row(0, 0.5), row(1, 1.5, ttft=99.0), row(2, 2.5)]

    assert [one.n for one in Window(1.0, 2.0).due(rows)] == [1]


def test_tokens_count_where_they_came_whoever_they_are_of():
    early = row(0, 0.5, ttft=0.4, gap=0.2, tokens=3)  # at 0.9, 1.1, 1.3
    late = row(1, 1.9, ttft=0.05, gap=0.1, tokens=3)  # at 1.95, 2.05, 2.15

    assert Window(1.0, 2.0).tokens([early, late]) == 3


def test_an_event_of_several_tokens_counts_as_many():
    assert Window(0.0, 1.0).tokens([row(0, 0.5, ttft=0.0, gap=0.1, tokens=2, usage_tokens=6)]) == pytest.approx(6.0)


def test_a_queue_that_grows_with_its_waits_is_no_steady_state():
    overloaded = [row(n, n * 0.1, ttft=0.05 + 0.06 * n) for n in range(200)]
    at_ease = [row(n, n * 0.1, ttft=0.05) for n in range(200)]
    window = Window(0.0, 19.9)

    assert "under way grew from" in window.grows(overloaded)
    assert window.grows(at_ease) == ""
    assert window.grows([]) == ""
