"""Objectives: what attains them, and how they are written."""

from __future__ import annotations

import pytest

from bench.clients.results import Outcome
from bench.clients.slo import PAPER, attains, counted
from epd_serve.errors import ConfigError
from epd_serve.slo import Gaps, Slo, gaps_within, parse_slos
from tests.bench.clients.made import failed, row


def test_both_bounds_have_to_hold_and_belong_to_the_objective():
    slo = Slo(200.0, 50.0)

    assert attains(row(ttft=0.2, gap=0.0499), slo)
    assert not attains(row(ttft=0.21, gap=0.01), slo)
    assert not attains(row(ttft=0.1, gap=0.051), slo)


def test_one_long_stall_misses_by_the_mean_alone_and_many_short_ones_by_the_share():
    stalled = row(token_s=(0.1, *(1.1 + 0.01 * at for at in range(11))), last_s=1.2, usage_tokens=12)
    uneven = row(
        token_s=tuple(0.1 + 0.06 * (at // 2) + 0.01 * (at % 2) for at in range(12)), last_s=0.41, usage_tokens=12
    )
    judged = [[attains(one, Slo(200, 51, judge)) for judge in ("p90", "p99", "mean")] for one in (stalled, uneven)]

    assert judged == [[True, False, False], [True, True, True]]
    assert [attains(uneven, Slo(200, 45, judge)) for judge in ("p90", "mean")] == [False, True]


def test_events_read_at_once_share_the_wait_before_them():
    assert gaps_within([0.0, 1.0, 1.0, 1.0, 1.0], 0.25) == (4, 4)
    assert gaps_within([0.0, 0.0, 1.0, 1.0, 1.1], 0.25) == (4, 2)
    assert gaps_within([], 0.25) == gaps_within([1.0], 0.25) == (0, 0)


@pytest.mark.parametrize("events", [0, -1])
def test_where_no_event_came_there_is_no_gap(events):
    gaps = Gaps(0.25)
    gaps.add(1.0, events)
    gaps.add(2.0)
    assert (gaps.count, gaps.within) == (0, 0)


def test_one_token_has_no_time_per_token_to_miss():
    assert attains(row(ttft=0.1, tokens=1), Slo(200.0, 1.0))


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.OK])
def test_no_bad_answer_attains_anything_however_quick(outcome):
    assert not attains(row(outcome=outcome), Slo(2000.0, 80.0))


def test_only_clients_that_left_are_not_counted():
    rows = [row(), failed(), failed(outcome=Outcome.TIMEOUT), failed(outcome=Outcome.CANCELLED)]

    assert counted(rows) == rows[:3]


def test_objectives_are_read_as_they_are_written():
    assert parse_slos("2000:50,2000:80,800:30") == PAPER
    assert parse_slos(",".join(map(str, PAPER))) == PAPER


@pytest.mark.parametrize("text", ["", "2000", "2000:", "a:b", "0:50", "2000:-1", "nan:1", "inf:1"])
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(ConfigError, match="TTFT:TPOT"):
        parse_slos(text)
