"""When a run says nothing about the server."""

from __future__ import annotations

import pytest

from bench.clients.answers import CROWDED
from bench.clients.measure import Rules, objections
from bench.clients.metrics import Window
from bench.clients.results import Outcome
from bench.clients.sender import Run
from tests.bench.clients.made import failed, row

WINDOW = Window(0.0, 100.0)


def found(rows, *, stopped="", rules=None):
    return objections(Run("r", 0.0, 100.0, 101.0, rows=rows, stopped=stopped), WINDOW, rules or Rules())


GOOD = [row(n, float(n)) for n in range(20)]


def test_a_run_with_enough_good_answers_is_valid():
    assert found(GOOD) == []


def test_refusals_are_misses_and_no_objection():
    assert found([*GOOD, *(failed(n, 1.0) for n in range(50))]) == []


@pytest.mark.parametrize(
    ("rows", "whose", "text"),
    [
        ([failed(n, 1.0) for n in range(9)], "answers", "not one good answer among 9 requests: 9 × status 429"),
        ([], "answers", "not one good answer among 0 requests"),
        ([row()], "answers", "1 good answers in the window of 100.0 s, 10 are needed"),
        ([*GOOD, *(failed(n, 1.0, "cut", Outcome.TRUNCATED) for n in range(5))], "answers", "5 of 25 requests failed"),
        ([row(n, 1.0, ready_s=1.1) for n in range(20)], "generator", "up to 100 ms late to 20 of 20 requests"),
        ([*GOOD, *(row(n, 1.0, ready_s=1.1) for n in (20, 21))], "generator", "late to 2 of 22 requests"),
        ([*GOOD, failed(0, 1.0, CROWDED)], "generator", "1 requests were not sent"),
    ],
)
def test_each_way_to_measure_nothing_is_said(rows, whose, text):
    (one,) = found(rows)

    assert one.whose == whose
    assert text in one.text


def test_one_hiccup_of_the_generator_is_no_overload():
    assert found([*GOOD, row(20, 1.0, ready_s=1.1)]) == []
    assert found([*GOOD * 10, *(row(n, 1.0, ready_s=1.1) for n in range(2))]) == []
    assert len(found([*GOOD * 10, *(row(n, 1.0, ready_s=1.1) for n in range(3))])) == 1


def test_an_early_end_is_an_objection_whatever_came_before():
    assert [one.whose for one in found(GOOD, stopped="interrupted")] == ["end"]


def test_what_was_said_goes_with_what_went_wrong():
    assert "said status 429" in found([failed()])[0].text


def test_rules_can_be_told():
    assert found([row()], rules=Rules(min_samples=1)) == []
