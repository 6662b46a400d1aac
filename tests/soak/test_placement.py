"""Intra-request parallel encode held against brute force."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.micro.measurement import goal_table
from tests.soak.placement import (
    ENCODERS,
    GOALS,
    IMAGES,
    QUICK_SETS,
    RATES,
    figures,
    makespan_s,
    optimum,
    placed,
    placements,
)


def test_the_figures_meet_their_goals_on_every_run() -> None:
    rows = list(placements(QUICK_SETS))
    judged = goal_table(figures(rows), GOALS)
    assert "MISSED" not in judged and "not measured" not in judged
    assert rows == list(placements(QUICK_SETS))
    assert {row["encoders"] for row in rows} == set(RATES) and all(row["optimum"] > 0 for row in rows)


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=6), st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)
)
def test_the_optimum_is_what_trying_everything_finds(costs: list[int], rates: list[int]) -> None:
    idle = [0.0] * len(rates)
    every = product(range(len(rates)), repeat=len(costs))
    assert optimum(costs, rates) == pytest.approx(min(makespan_s(at, costs, idle, rates) for at in every))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 60), min_size=IMAGES, max_size=IMAGES),
    st.lists(st.sampled_from([1, 2, 4]), min_size=ENCODERS, max_size=ENCODERS),
)
def test_any_eight_pictures_on_any_four_encoders_are_within_a_third_of_the_optimum(
    costs: list[int], rates: list[int]
) -> None:
    at = placed("any", costs, rates)
    assert makespan_s(at, costs, [0.0] * len(rates), rates) <= 4 / 3 * optimum(costs, rates)


def test_eight_pictures_on_four_encoders_of_any_speeds_are_on_average_within_a_twentieth_of_the_optimum() -> None:
    chance, over = random.Random(1), []
    for number in range(100):
        costs = [chance.randint(1, 60) for _ in range(IMAGES)]
        rates = [chance.choice([1, 2, 4]) for _ in range(ENCODERS)]
        at = placed(f"set {number}", costs, rates)
        over.append(makespan_s(at, costs, [0.0] * len(rates), rates) / optimum(costs, rates))
    assert sum(over) / len(over) <= 1.05
