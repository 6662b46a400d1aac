"""Intra-request parallel encode held against brute force."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.goals import goal_table
from bench.irp import ENCODERS, GOALS, PICTURES, RATES, irp_figures, optimum
from proxy.encode.assignment import spread
from proxy.encode.schedule import makespan_s
from proxy.routing.policy import Candidate


def test_the_figures_meet_the_goals_of_the_issue_on_every_run() -> None:
    rows: list[dict[str, Any]] = []
    figures = irp_figures(quick=True, rows=rows)
    assert "MISSED" not in goal_table(figures, GOALS) and "not measured" not in goal_table(figures, GOALS)
    assert figures == irp_figures(quick=True)
    assert {row["encoders"] for row in rows} == set(RATES) and all(row["optimum"] > 0 for row in rows)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 99), max_size=6), st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
def test_the_optimum_is_what_trying_everything_finds(costs: list[int], rates: list[int]) -> None:
    idle = [0.0] * len(rates)
    every = product(range(len(rates)), repeat=len(costs))
    assert optimum(costs, rates) == min(makespan_s(at, costs, idle, rates) for at in every)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 60), min_size=PICTURES, max_size=PICTURES),
    st.lists(st.sampled_from([1, 2, 4]), min_size=ENCODERS, max_size=ENCODERS),
)
def test_any_eight_pictures_on_any_four_encoders_are_within_a_tenth_of_the_optimum(
    costs: list[int], rates: list[int]
) -> None:
    workers = [Candidate(f"E{index}", "1", 0.0, rate=float(rate)) for index, rate in enumerate(rates)]
    ends = [
        sum(costs[item] for item in share) / rate
        for rate, share in zip(
            rates, spread([f"key {index}" for index in range(PICTURES)], costs, workers), strict=True
        )
    ]
    assert max(ends) <= 1.1 * optimum(sorted(costs, reverse=True), rates)
