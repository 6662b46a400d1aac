from __future__ import annotations

import pytest

from bench.emulation.ranks import by_chance, flipped, kendall, ranks, spearman


def test_ties_share_the_mean_of_their_ranks():
    assert ranks([30, 10, 20, 20]) == [4, 1, 2.5, 2.5]


def test_spearman_by_hand():
    """Ranks 1 2 3 4 5 against 2 1 4 3 5: the squares of the differences sum to 4, 1 - 6·4 / (5·24) = 0.8."""
    assert spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.8)


def test_spearman_with_a_tie_by_hand():
    """Ranks 1 2.5 2.5 4 against 1 2 3 4: covariance 4.5, squares 4.5 and 5; 4.5 / √22.5."""
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / 22.5**0.5)


def test_kendall_by_hand():
    """Of ten pairs two stand the other way: (8 - 2) / 10."""
    assert kendall([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.6)


def test_kendall_with_a_tie_by_hand():
    """Of six pairs five agree, one is tied on the left: 5 / √(5·6)."""
    assert kendall([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / 30**0.5)


@pytest.mark.parametrize("measure", [spearman, kendall])
def test_the_ends_of_the_scale(measure):
    assert measure([1, 2, 3], [4, 5, 9]) == pytest.approx(1)
    assert measure([1, 2, 3], [9, 5, 4]) == pytest.approx(-1)
    assert measure([1, 1, 1], [1, 2, 3]) == 0


def test_what_chance_would_do():
    """Of the six orders of three values one is alike, and three are no worse than one neighbouring pair turned."""
    assert by_chance([1, 2, 3], [1, 2, 3]) == pytest.approx(1 / 6)
    assert by_chance([2, 1, 3], [1, 2, 3]) == pytest.approx(3 / 6)


def test_pairs_that_turn():
    before = {"a": 1.0, "b": 2.0, "c": 3.0}

    assert flipped(before, {"a": 2.0, "b": 1.0, "c": 3.0}) == [("a", "b")]
    assert flipped(before, {"a": 1.0, "b": 1.0, "c": 3.0}) == []
