"""Speeds from steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.status.pending import StepWork
from epd_serve.engine.status.rates import MEMORY_S, StepRates


def test_nothing_is_known_before_the_first_step() -> None:
    rates = StepRates()
    assert (rates.step_s, rates.prompt_tokens_per_s, rates.item_tokens_per_s, rates.decode_tokens_per_s) == (0, 0, 0, 0)


def test_time_between_steps_does_not_count() -> None:
    rates = StepRates()
    for second in (0, 10, 500):
        rates.ended(StepWork(prompt_tokens=100), second, second + 0.5)
    assert rates.prompt_tokens_per_s == pytest.approx(200) and rates.step_s == pytest.approx(0.5)


def test_a_step_begun_before_the_last_one_ended_had_the_device_from_there_on() -> None:
    rates = StepRates()
    rates.ended(StepWork(decodes=3), 0.0, 1.0)
    rates.ended(StepWork(decodes=3), 0.1, 1.5)
    assert rates.decode_tokens_per_s == pytest.approx(2 / 1.5, rel=0.1)


def test_each_kind_has_its_own_speed() -> None:
    rates = StepRates()
    rates.ended(StepWork(item_tokens=300), 0, 1)
    rates.ended(StepWork(prompt_tokens=50), 1, 1.1)
    rates.ended(StepWork(decodes=2), 2, 2.02)
    assert rates.item_tokens_per_s == pytest.approx(300)
    assert rates.prompt_tokens_per_s == pytest.approx(500)
    assert rates.decode_tokens_per_s == pytest.approx(50)


@given(st.floats(20, 1e5), st.floats(20, 1e5))
def test_an_engine_that_changes_its_speed_is_believed_after_a_while(before: float, after: float) -> None:
    rates, now = StepRates(), 0.0
    for speed in (before, after):
        for _ in range(80):
            rates.ended(StepWork(prompt_tokens=round(speed)), now, now + 1)
            now += 1
    assert 5 * MEMORY_S < 80
    assert rates.prompt_tokens_per_s == pytest.approx(round(after), rel=0.01, abs=before * 0.001)


def test_a_clock_too_coarse_for_a_step_is_no_division_by_zero() -> None:
    rates = StepRates()
    rates.ended(StepWork(prompt_tokens=100), 5.0, 5.0)
    assert rates.prompt_tokens_per_s > 0


def test_the_end_of_a_prompt_that_came_with_its_kv_is_no_speed_of_prompts() -> None:
    rates = StepRates()
    for second in range(20):  # as a D
        rates.ended(StepWork(prompt_tokens=1, decodes=8), second, second + 0.03)
    assert rates.prompt_tokens_per_s == 0
    rates.ended(StepWork(prompt_tokens=400), 30, 30.4)  # as a P
    assert rates.prompt_tokens_per_s == pytest.approx(1000)
