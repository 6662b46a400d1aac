"""Draws that every machine repeats."""

from __future__ import annotations

import statistics

import pytest

from bench.workloads.chance import BLOCK, Chance, spread_quantile


def test_a_draw_is_fixed_by_its_names():
    assert [Chance("w", 0, i).uniform() for i in range(3)] == [Chance("w", 0, i).uniform() for i in range(3)]
    assert Chance("w", 0).uniform() != Chance("w", 1).uniform()
    assert Chance("ab", "c").uniform() != Chance("a", "bc").uniform()


def test_the_very_numbers_are_kept():
    """Written down once: a change of these changes every workload that was ever published."""
    chance = Chance("workload", 7, "request", 3)

    assert [round(chance.uniform(), 12) for _ in range(5)] == [
        0.336872634924,
        0.050378004603,
        0.826874152627,
        0.181067724099,
        0.057638238254,
    ]


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda chance: chance.uniform(), 0.5, 12**-0.5),
        (lambda chance: chance.normal(), 0.0, 1.0),
        (lambda chance: chance.exponential(), 1.0, 1.0),
        (lambda chance: chance.gamma(0.25), 0.25, 0.5),
        (lambda chance: chance.gamma(4.0), 4.0, 2.0),
        (lambda chance: float(chance.below(10)), 4.5, 8.25**0.5),
    ],
    ids=["uniform", "normal", "exponential", "gamma below 1", "gamma above 1", "below"],
)
def test_draws_have_the_mean_and_deviation_of_their_distribution(draw, mean, deviation):
    chance = Chance("moments")
    drawn = [draw(chance) for _ in range(8_000)]

    assert statistics.fmean(drawn) == pytest.approx(mean, abs=4 * deviation / 8_000**0.5)
    assert statistics.stdev(drawn) == pytest.approx(deviation, rel=0.08)


def test_a_block_of_spread_quantiles_has_one_in_each_stratum():
    found = [spread_quantile(i, "w", 5) for i in range(3 * BLOCK)]

    for start in range(0, 3 * BLOCK, BLOCK):
        assert sorted(int(value * BLOCK) for value in found[start : start + BLOCK]) == list(range(BLOCK))
    assert found[:BLOCK] != sorted(found[:BLOCK])


def test_a_shuffle_keeps_all():
    assert sorted(Chance("s").shuffled(100)) == list(range(100))
