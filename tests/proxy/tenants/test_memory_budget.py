"""What requests hold is counted before it is held, refused with the right words, and given back exactly once."""

from __future__ import annotations

import pytest

from epd_serve.errors import PayloadTooLargeError
from proxy.errors import BusyError, error_headers
from proxy.tenants.key_limits import KeyLimitError
from proxy.tenants.memory_budget import MemoryBudget


def test_a_full_process_is_503_with_a_time_to_come_back_and_nothing_refused_is_held() -> None:
    budget = MemoryBudget(100, apart=False)
    with budget.request("a") as first, budget.request("a") as second:
        first.take(60)
        second.take(40)
        with pytest.raises(BusyError, match="100 bytes") as refused:
            second.take(1)
        assert refused.value.status == 503 and int(error_headers(refused.value)["retry-after"]) > 0
        assert budget.held_bytes == 100
    assert budget.held_bytes == 0


def test_an_account_over_its_share_is_429_while_another_finds_room() -> None:
    budget = MemoryBudget(100, apart=True)
    with budget.request("greedy") as one, budget.request("greedy") as two, budget.request("other") as other:
        one.take(50)
        with pytest.raises(KeyLimitError) as refused:
            two.take(1)
        assert refused.value.status == 429 and refused.value.retry_after_s > 0
        other.take(25)


def test_what_can_never_be_held_is_413_and_not_to_be_tried_again() -> None:
    budget = MemoryBudget(100, apart=True)
    with budget.request("a") as huge:
        huge.take(30)
        with pytest.raises(PayloadTooLargeError) as refused:
            huge.take(21)
        assert refused.value.status == 413
        assert huge.size_bytes == 30


def test_what_is_given_back_early_makes_room_at_once() -> None:
    budget = MemoryBudget(100, apart=False)
    with budget.request("a") as one:
        one.take(100)
        one.give_back(70)
        with budget.request("a") as two:
            two.take(70)
    assert budget.held_bytes == 0
