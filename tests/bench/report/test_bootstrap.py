"""Intervals of ratios, by resampling."""

from __future__ import annotations

import random

import pytest

from bench.report.bootstrap import Sample, interval


def sample(values: list[float], name: str = "s") -> Sample:
    return Sample({n: (value, 1.0) for n, value in enumerate(values)}, {n: f"{name}{n}" for n in range(len(values))})


def drawn(mean: float, seed: int, count: int = 100) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean, mean / 5) for _ in range(count)]


def ratio_of(one: Sample, other: Sample) -> float:
    assert one.mean is not None and other.mean is not None
    return one.mean / other.mean


def test_it_holds_the_true_ratio_and_excludes_what_is_far():
    one, other = sample(drawn(1.0, 1)), sample(drawn(2.0, 2), "other")
    low, high = interval(one, other, ratio_of(one, other))

    assert low is not None and high is not None
    assert 0.4 < low < 0.5 < high < 0.6


def test_of_a_run_and_itself_nothing_differs():
    one = sample(drawn(1.0, 1))

    assert interval(one, one, 1.0) == (pytest.approx(1.0), pytest.approx(1.0))


def test_the_same_requests_are_drawn_of_both_sides():
    """A difference that every request has is seen, though requests differ much among themselves."""
    chance = random.Random(3)
    values = [1.0 + 100.0 * (chance.random() < 0.1) for _ in range(100)]
    slower = [value * 1.02 for value in values]
    paired = interval(sample(slower), sample(values), 1.02)
    apart = interval(sample(slower), sample(values, "other"), 1.02)

    assert paired == (pytest.approx(1.02), pytest.approx(1.02))
    assert apart[0] is not None and apart[1] is not None
    assert apart[0] < 1.0 < apart[1]


def test_too_few_requests_have_none():
    few = sample(drawn(1.0, 1, count=9))

    assert interval(few, few, 1.0) == (None, None)
    assert interval(sample([]), sample([]), 1.0) == (None, None)


def test_the_same_folder_gives_the_same_interval():
    one, other = sample(drawn(1.0, 1)), sample(drawn(2.0, 2), "other")

    assert interval(one, other, 0.5) == interval(one, other, 0.5)
