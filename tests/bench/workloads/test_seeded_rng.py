"""Draws that every machine repeats."""

from __future__ import annotations

from bench.workloads.distributions import BLOCK, seeded_rng, spread_quantile


def test_a_draw_is_fixed_by_its_names():
    assert seeded_rng("w", 0).random(3).tolist() == seeded_rng("w", 0).random(3).tolist()
    assert len({seeded_rng(*names).random() for names in (("w", 0), ("w", 1), ("ab", "c"), ("a", "bc"))}) == 4


def test_the_very_numbers_are_kept():
    """Written down once: a change of these changes every workload that was ever published."""
    rng = seeded_rng("workload", 7, "request", 3)

    assert [round(value, 12) for value in rng.random(3).tolist()] == [0.797923136045, 0.6777177578, 0.785174560428]
    assert rng.integers(1000, size=3).tolist() == [552, 1, 706]
    assert [round(value, 9) for value in (rng.exponential(), rng.gamma(0.25), rng.gamma(4.0))] == [
        0.009753487,
        0.001527156,
        4.537809726,
    ]
    assert rng.permutation(5).tolist() == [0, 3, 1, 4, 2]
    spread = [round(spread_quantile(index, "w", 5), 12) for index in (0, 1, 40)]
    assert spread == [
        0.7229230571,
        0.375110976849,
        0.341529940016,
    ]


def test_a_block_of_spread_quantiles_has_one_in_each_stratum():
    found = [spread_quantile(i, "w", 5) for i in range(3 * BLOCK)]

    for start in range(0, 3 * BLOCK, BLOCK):
        assert sorted(int(value * BLOCK) for value in found[start : start + BLOCK]) == list(range(BLOCK))
    assert found[:BLOCK] != sorted(found[:BLOCK])
    assert all(0 < value < 1 for value in found)
