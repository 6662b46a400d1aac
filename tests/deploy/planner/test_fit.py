"""Lines and tables through measured points."""

from __future__ import annotations

import random

import pytest

from deploy.planner.fit import least_squares, line, medians, residual, rising, spread, table


def noisy(seconds: float, chance: random.Random) -> float:
    """5 % either way, and one in ten held up by the machine."""
    return seconds * chance.uniform(0.95, 1.05) * (8 if chance.random() < 0.1 else 1)


def test_a_line_is_found_under_noise_and_stalls() -> None:
    chance = random.Random(1)
    rows = [(x, noisy(0.004 + 0.0002 * x, chance)) for x in (16, 64, 256, 1024) for _ in range(15)]
    found = line(rows)
    assert found.setup_s == pytest.approx(0.004, rel=0.1) and found.per_unit_s == pytest.approx(0.0002, rel=0.1)


def test_short_times_count_as_much_as_long_ones() -> None:
    found = line([(1, 0.001), (10, 0.0022), (10_000, 1.5)])
    assert found.seconds(1) == pytest.approx(0.001, rel=0.1)


def test_no_coefficient_is_below_0() -> None:
    falling = line([(1, 0.5), (10, 0.4), (100, 0.1)])
    assert falling.per_unit_s == 0 and 0.1 <= falling.setup_s <= 0.5
    through_0 = line([(1, 0.0), (10, 0.05), (100, 0.9)])
    assert through_0.setup_s == 0 and through_0.per_unit_s == pytest.approx(0.007, rel=0.4)


def test_what_each_token_and_each_before_it_costs_is_told_apart() -> None:
    works = [(1.0, n, n * (before + (n - 1) / 2)) for n in (16, 256, 1024) for before in (0, 2048, 4096)]
    exact = (0.003, 5e-5, 5e-8)
    rows = [(work, sum(a * b for a, b in zip(work, exact, strict=True))) for work in works]
    assert least_squares(rows) == pytest.approx(exact, rel=1e-6)


def test_waits_that_are_0_count() -> None:
    assert line([(1, 0.0), (10, 0.002), (100, 0.001)], relative=False).seconds(50) == pytest.approx(0.001, rel=0.1)


def test_nothing_follows_from_no_rows() -> None:
    assert least_squares([]) == () and line([]).seconds(100) == 0 and table([]) == ((), 0.0)
    assert residual([]) == 0 and medians([]) == {}


def test_a_table_has_what_batches_take_and_what_their_kv_adds() -> None:
    chance = random.Random(2)
    rows = [
        (batch, batch * context, noisy(seconds + 1e-7 * batch * context, chance))
        for batch, seconds in ((1, 0.004), (8, 0.006), (32, 0.012))
        for context in (32, 500, 1000, 2000)
        for _ in range(20)
    ]
    points, kv_s = table([*rows, (5, 100, 0.1)])
    assert [batch for batch, _ in points] == [1, 8, 32], "one step says nothing of a batch"
    assert [seconds for _, seconds in points] == pytest.approx([0.004, 0.006, 0.012], rel=0.1)
    assert kv_s == pytest.approx(1e-7, rel=0.15)


def test_more_never_takes_less() -> None:
    assert rising({1: 1.0, 4: 3.0, 2: 4.0, 8: 2.0, 16: 5.0}) == ((1, 1.0), (2, 3.0), (4, 3.0), (8, 3.0), (16, 5.0))


def test_the_spread_of_steps_is_told_at_even_shares() -> None:
    chance = random.Random(3)
    found = spread((2.0, 2.0 * chance.choice((0.9, 1.0, 1.0, 3.0))) for _ in range(4000))
    assert len(found) == 20 and list(found) == sorted(found)
    assert (found.count(0.9), found.count(1.0), found.count(3.0)) == (5, 10, 5)
    assert spread([(1.0, 1.0)] * 5) == ()
