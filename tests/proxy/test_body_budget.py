"""All bodies together are bounded; one alone is not refused."""

from __future__ import annotations

import pytest

from epd_serve.errors import OverloadedError
from proxy.body_budget import BodyBudget


def test_bodies_together_may_be_so_large_and_one_more_byte_is_429() -> None:
    budget = BodyBudget(100)
    with budget.body() as first, budget.body() as second:
        first.grow(60)
        second.grow(40)
        with pytest.raises(OverloadedError, match="100 bytes") as refused:
            second.grow(1)
        assert refused.value.status == 429 and refused.value.retry_after_s > 0
        assert budget.held_bytes == 100, "what was refused is not held"
    assert budget.held_bytes == 0


def test_room_is_there_again_when_a_body_goes() -> None:
    budget = BodyBudget(100)
    with budget.body() as first:
        first.grow(100)
    with budget.body() as second, budget.body() as third:
        second.grow(50)
        third.grow(50)
    assert budget.held_bytes == 0


def test_one_that_is_alone_always_fits_and_then_nobody_else_does() -> None:
    budget = BodyBudget(10)
    with budget.body() as huge, budget.body() as late:
        huge.grow(1000)
        huge.grow(1000)
        with pytest.raises(OverloadedError):
            late.grow(1)


def test_a_body_of_which_nothing_has_come_takes_no_room() -> None:
    budget = BodyBudget(10)
    with budget.body(), budget.body() as other:
        other.grow(50)
        assert budget.held_bytes == 50
