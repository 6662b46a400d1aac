"""Objectives: what attains them, and how they are written."""

from __future__ import annotations

import pytest

from bench.clients.results import Outcome
from bench.clients.slo import PAPER, Slo, counted, parse_slos
from epd_serve.errors import ConfigError
from tests.bench.clients.made import failed, row


def test_both_bounds_have_to_hold_and_belong_to_the_objective():
    slo = Slo(200.0, 50.0)

    assert slo.attained(row(ttft=0.2, gap=0.0499))
    assert not slo.attained(row(ttft=0.21, gap=0.01))
    assert not slo.attained(row(ttft=0.1, gap=0.051))


def test_by_gaps_nine_in_ten_have_to_hold_whatever_their_mean():
    slo, times = Slo(200.0, 50.0), [0.1 + 0.01 * at for at in range(11)]
    late = [*times[:-1], times[-1] + 2.0]
    assert slo.attained_by_gaps(row(token_s=tuple(late), last_s=late[-1], tokens=11))
    assert not slo.attained(row(token_s=tuple(late), last_s=late[-1], tokens=11)), "a mean of 210 ms"

    twice = [*times[:-2], times[-2] + 0.06, times[-1] + 0.12]
    assert not slo.attained_by_gaps(row(token_s=tuple(twice), last_s=twice[-1], tokens=11))
    assert slo.attained(row(token_s=tuple(twice), last_s=twice[-1], tokens=11))
    assert not slo.attained_by_gaps(row(ttft=0.21)) and not slo.attained_by_gaps(row(outcome=Outcome.ERROR))


def test_one_token_has_no_time_per_token_to_miss():
    assert Slo(200.0, 1.0).attained(row(ttft=0.1, tokens=1))


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.OK])
def test_no_bad_answer_attains_anything_however_quick(outcome):
    assert not Slo(2000.0, 80.0).attained(row(outcome=outcome))


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
