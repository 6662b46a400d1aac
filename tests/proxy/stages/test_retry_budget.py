"""The retry budget: what fills it, what empties it, and that an outage cannot multiply its load."""

from __future__ import annotations

import pytest

from epd_serve.errors import ConfigError
from proxy.config.limits import RetryLimits
from proxy.stages.circuits import RetryBudget


def test_it_is_full_at_first_and_refuses_when_it_is_empty() -> None:
    budget = RetryBudget(RetryLimits(ratio=0.2, floor_per_s=0, burst=3), now=0.0)
    assert [budget.withdraw(0.0) for _ in range(4)] == [True, True, True, False]


def test_requests_and_time_fill_it_up_to_its_burst() -> None:
    budget = RetryBudget(RetryLimits(ratio=0.5, floor_per_s=2.0, burst=3), now=0.0)
    while budget.withdraw(0.0):
        pass
    budget.deposit()
    assert not budget.withdraw(0.0)
    budget.deposit()
    assert budget.withdraw(0.0) and not budget.withdraw(0.0)
    assert budget.withdraw(0.5) and not budget.withdraw(0.5)
    assert budget.left(1000.0) == 3.0


def test_in_an_outage_retries_stay_a_fraction_of_the_requests() -> None:
    budget = RetryBudget(RetryLimits(ratio=0.2, floor_per_s=10.0, burst=100), now=0.0)
    retries = 0
    for request in range(60_000):  # 1000 a second for a minute, all of which fail and are tried thrice
        budget.deposit()
        retries += sum(budget.withdraw(request / 1000) for _ in range(2))
    assert retries == pytest.approx(0.2 * 60_000 + 10 * 60 + 100, rel=0.01)


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"ratio": -1.0}, {"floor_per_s": float("nan")}, {"burst": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RetryLimits(**wrong)  # type: ignore[arg-type]
