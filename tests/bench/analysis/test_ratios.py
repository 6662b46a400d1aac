"""Intervals of ratios, by resampling blocks of neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from bench.analysis.ratios import Sample, Values, ratio_interval
from bench.statistic import percentile


def sample(values: Sequence[float] | Values, percent: int | None = None) -> Sample:
    return Sample(np.asarray(values, dtype=np.float64), percent)


def drawn(mean: float, seed: int, count: int = 100) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean, mean / 5) for _ in range(count)]


def test_it_holds_the_true_ratio_and_excludes_what_is_far():
    low, high = ratio_interval(sample(drawn(1.0, 1)), sample(drawn(2.0, 2)), paired=False)

    assert 0.4 < low < 0.5 < high < 0.6


def test_it_is_as_wide_as_theory_says():
    chance = np.random.default_rng(0)
    low, high = ratio_interval(sample(chance.normal(10, 1, 1000)), sample(chance.normal(10, 1, 1000)), paired=False)

    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(2 / 1000) / 10, rel=0.25)


def test_neighbours_that_are_alike_make_it_wider():
    levels = np.repeat(np.random.default_rng(0).normal(10, 1, 100), 10)
    shuffled = np.random.default_rng(1).permutation(levels)
    widths = []
    for values in (levels, shuffled):
        low, high = ratio_interval(sample(values), sample(np.full(1000, 10.0)), paired=False)
        widths.append(high - low)

    assert widths[0] > 1.8 * widths[1]


def test_of_a_run_and_itself_nothing_differs():
    one = sample(drawn(1.0, 1))

    assert ratio_interval(one, one, paired=True) == (pytest.approx(1.0), pytest.approx(1.0))


def test_the_same_requests_are_drawn_of_both_sides():
    """A difference that every request has is seen, though requests differ much among themselves."""
    chance = random.Random(3)
    values = [1.0 + 100.0 * (chance.random() < 0.1) for _ in range(100)]
    slower, base = sample([value * 1.02 for value in values]), sample(values)

    assert ratio_interval(slower, base, paired=True) == (pytest.approx(1.02), pytest.approx(1.02))
    low, high = ratio_interval(slower, base, paired=False)
    assert low < 1.0 < high


def test_the_same_samples_give_the_same_interval():
    one, other = sample(drawn(1.0, 1)), sample(drawn(2.0, 2))

    assert ratio_interval(one, other, paired=False) == ratio_interval(one, other, paired=False)


def test_ratios_that_are_mostly_nothing_have_no_interval():
    assert ratio_interval(sample(np.ones(20)), sample(np.zeros(20)), paired=False) is None


def test_a_percentile_of_the_sample_itself_is_the_nearest_rank():
    values = drawn(5.0, 0, 37)

    for percent in (1, 50, 90, 95, 99, 100):
        assert sample(values, percent).statistic == percentile(values, percent)
    assert np.isnan(sample([], 50).statistic)


def test_a_percentile_of_resamples_is_that_of_the_repeated_values():
    one = sample([3.0, 1.0, 2.0, np.nan], 50)  # the fourth member has no value
    np.testing.assert_array_equal(one.blocks, [[3.0, 1.0], [2.0, np.nan]])
    assert one.counted == 3

    drawn_twice = one.of_blocks(np.asarray([[0, 0], [1, 1], [0, 1]]))
    assert drawn_twice.tolist() == [1.0, 2.0, 2.0]
    with np.errstate(invalid="ignore"):  # as `ratio_interval` has it
        assert np.isnan(sample([np.nan, 1.0]).of_blocks(np.asarray([[0, 0]]))).all()


def test_an_interval_needs_members_and_a_percentile_far_out_more_of_them():
    assert [sample(drawn(1.0, 0, count)).enough for count in (9, 10)] == [False, True]
    assert [sample(drawn(1.0, 0, count), 90).enough for count in (49, 50)] == [False, True]
    assert [sample(drawn(1.0, 0, count), 25).enough for count in (19, 20)] == [False, True]
