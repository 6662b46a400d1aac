"""The measured line: exact on exact values, close on noisy ones, never negative, and it follows a link that changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.kv.fit import ENOUGH, WINDOW, LineFit

KIB = 1024
PROBES = [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB]

setups = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-12, 1e-8)
sizes = st.lists(st.integers(4 * KIB, 64 * KIB * KIB), min_size=8, max_size=60).filter(lambda x: max(x) > 2 * min(x))


def fitted(line: tuple[float, float], xs: list[int], prior: tuple[float, float] = (1e-3, 1e-9)) -> LineFit:
    fit = LineFit(*prior)
    for x in xs:
        fit.observe(x, line[0] + line[1] * x)
    return fit


@settings(deadline=None)
@given(setups, slopes, sizes)
def test_values_on_a_line_give_that_line(a: float, b: float, xs: list[int]) -> None:
    fit = fitted((a, b), xs)
    for x in xs:
        assert fit.at(x) == pytest.approx(a + b * x, rel=1e-6)


@settings(deadline=None)
@given(setups, slopes, st.integers(0, 1000))
def test_probes_with_noise_give_the_line_at_every_size(a: float, b: float, seed: int) -> None:
    chance, fit = random.Random(seed), LineFit(1e-3, 1e-9)
    for _ in range(16):
        for x in PROBES:
            fit.observe(x, (a + b * x) * chance.uniform(0.95, 1.05))
    for x in PROBES:
        assert fit.at(x) == pytest.approx(a + b * x, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 10)), max_size=60))
def test_no_values_make_a_negative_line(pairs: list[tuple[int, float]]) -> None:
    fit = LineFit(1e-3, 1e-9)
    for x, y in pairs:
        fit.observe(x, y)
        assert fit.a >= 0 and fit.b >= 0
        assert fit.at(x) < float("inf")


def test_the_first_values_scale_the_prior() -> None:
    fit = LineFit(0.001, 1e-9)
    for size in PROBES[: ENOUGH - 1]:
        fit.observe(size, 50 * (0.001 + 1e-9 * size))
        assert (fit.a, fit.b) == pytest.approx((0.05, 5e-8))
    fit.observe(PROBES[ENOUGH - 1], 0.05)
    assert fit.a != pytest.approx(0.05)


def test_before_the_first_value_the_prior_answers() -> None:
    assert LineFit(0.001, 1e-9).at(2000) == 0.001 + 2e-6


@settings(deadline=None, max_examples=30)
@given(setups, slopes, st.integers(4 * KIB, 64 * KIB * KIB), st.floats(0.1, 10))
def test_equal_sizes_scale_the_last_line_that_was_told_apart(a: float, b: float, x: int, change: float) -> None:
    fit = fitted((a, b), PROBES * 2)
    for _ in range(WINDOW):  # no probe is left
        fit.observe(x, a + b * x)
    assert fit.at(2 * x) == pytest.approx(a + 2 * b * x, rel=1e-3)
    for _ in range(WINDOW):
        fit.observe(x, change * (a + b * x))
    assert fit.at(2 * x) == pytest.approx(change * (a + 2 * b * x), rel=1e-3)


def test_a_link_that_becomes_slower_is_followed() -> None:
    fit = fitted((1e-4, 1e-10), PROBES * 16)
    slower = 3e-4, 5e-10
    for _ in range(12):
        for x in PROBES:
            fit.observe(x, slower[0] + slower[1] * x)
    for x in PROBES:
        assert fit.at(x) == pytest.approx(slower[0] + slower[1] * x, rel=0.05)


def test_one_stall_moves_the_line_little() -> None:
    fit = fitted((1e-4, 1e-10), PROBES * 5)
    before = [fit.at(x) for x in PROBES]
    fit.observe(PROBES[-1], 100 * fit.at(PROBES[-1]))
    assert [fit.at(x) for x in PROBES] == pytest.approx(before, rel=0.25)


def test_a_small_packets_setup_is_seen_beside_large_packets() -> None:
    """5 % of a 64 MiB packet is more than all of a 64 KiB one."""
    chance = random.Random(1)
    fit = LineFit(1e-2, 1e-8)
    for _ in range(40):
        for x in (64 * KIB, 64 * KIB * KIB):
            fit.observe(x, (1e-4 + 1e-10 * x) * chance.uniform(0.95, 1.05))
    assert fit.a == pytest.approx(1e-4, rel=0.1)


def test_times_below_the_clocks_resolution_are_taken() -> None:
    fit = LineFit(1e-3, 1e-9)
    for x in PROBES * 3:
        fit.observe(x, 0.0)
    assert fit.at(PROBES[-1]) == 0.0
    for _ in range(16):
        for x in PROBES:
            fit.observe(x, 1e-4 + 1e-10 * x)
    assert fit.at(PROBES[-1]) == pytest.approx(1e-4 + 1e-10 * PROBES[-1], rel=0.05)
