"""How alike two orders are: Spearman's and Kendall's rank correlation, and which pairs stand the other way. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal ones share the mean of their ranks."""
    below = [sum(other < value for other in values) for value in values]
    same = [sum(other == value for other in values) for value in values]
    return [under + (equal + 1) / 2 for under, equal in zip(below, same, strict=True)]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation of the ranks, from -1 to 1; 0 where all values of one side are equal."""
    left, right = ranks(one), ranks(other)
    if len(set(left)) < 2 or len(set(right)) < 2:
        return 0.0
    return statistics.correlation(left, right)


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """τ-b: pairs that stand alike less those that do not, over the geometric mean of the pairs without ties in each."""
    assert len(one) == len(other)
    alike = in_one = in_other = 0
    for (a, b), (c, d) in itertools.combinations(zip(one, other, strict=True), 2):
        signs = _sign(a - c), _sign(b - d)
        alike += signs[0] * signs[1]
        in_one += signs[0] != 0
        in_other += signs[1] != 0
    return alike / math.sqrt(in_one * in_other) if in_one and in_other else 0.0


def by_chance(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of all orders of `one` whose Spearman's correlation is at least as high: six rows prove little. n! of them,
    so for few values only."""
    assert len(one) <= 7, "too many orders"
    left, right = ranks(one), ranks(other)  # of equal ranks the correlation grows with the sum of their products
    found = _product(left, right)
    orders = list(itertools.permutations(left))
    return sum(_product(order, right) >= found - 1e-9 for order in orders) / len(orders)


def flipped(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of names that stand in the other order, in the order of `before`. A tie is no order."""
    return [
        (one, other)
        for one, other in itertools.combinations(sorted(before, key=lambda name: before[name]), 2)
        if _sign(before[one] - before[other]) * _sign(after[one] - after[other]) < 0
    ]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
