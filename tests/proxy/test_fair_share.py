"""One account alone gets half, several get equal parts, and whoever comes next always finds something: of anything, of
memory with the right words, and of turns, none of which is lost whatever ends a wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import PayloadTooLargeError
from proxy.errors import BusyError, error_headers
from proxy.tenants import FairSemaphore, FairShare, KeyLimitError, MemoryReservation


def greedy(share: FairShare, *accounts: str) -> None:
    """Each takes one at a time, in turns, until none gets more."""
    wanting = list(accounts)
    while wanting:
        for account in list(wanting):
            try:
                share.take(account, 1)
            except (BusyError, KeyLimitError):
                wanting.remove(account)


@pytest.mark.parametrize("accounts", [1, 2, 3, 7])
def test_so_many_greedy_accounts_get_equal_parts_and_leave_as_much_again(accounts: int) -> None:
    share = FairShare(840, apart=True)
    names = [f"a{index}" for index in range(accounts)]
    greedy(share, *names)
    assert [share.held_by(name) for name in names] == [840 // (accounts + 1)] * accounts


def test_whoever_comes_after_a_greedy_one_finds_room() -> None:
    share = FairShare(100, apart=True)
    greedy(share, "greedy")
    share.take("late", 25)
    with pytest.raises(KeyLimitError):
        share.take("greedy", 1)
    with pytest.raises(BusyError):
        share.take("late", 26)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_of_little_every_account_gets_one_while_there_is_any(limit: int) -> None:
    share = FairShare(limit, apart=True)
    for number in range(limit):
        share.take(f"a{number}", 1)
    assert share.held == limit and share.most == 1
    with pytest.raises(BusyError):
        share.take("late", 1)


def test_where_nobody_is_told_apart_all_of_it_is_to_be_had() -> None:
    share = FairShare(10, apart=False)
    share.take("a", 10)
    assert share.most == 10
    with pytest.raises(BusyError):
        share.take("a", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=60))
def test_never_more_than_the_limit_is_held_and_all_comes_back(takes: list[tuple[str, int]]) -> None:
    share, held = FairShare(100, apart=True), []
    for account, amount in takes:
        try:
            share.take(account, amount)
            held.append((account, amount))
        except (BusyError, KeyLimitError):
            pass
        assert share.held == sum(amount for _, amount in held) <= share.limit
        assert all(share.held_by(name) <= share.most for name in "abc")
    for account, amount in held:
        share.give_back(account, amount)
    assert share.held == 0 and not share._held_by


def test_a_full_process_is_503_with_a_time_to_come_back_and_nothing_refused_is_held() -> None:
    budget = FairShare(100, apart=False, what="bytes")
    with MemoryReservation(budget, "a") as first, MemoryReservation(budget, "a") as second:
        first.take(60)
        second.take(40)
        with pytest.raises(BusyError, match="100 bytes") as refused:
            second.take(1)
        assert refused.value.status == 503 and int(error_headers(refused.value)["retry-after"]) > 0
        assert budget.held == 100
    assert budget.held == 0


def test_an_account_over_its_share_is_429_while_another_finds_room() -> None:
    budget = FairShare(100, apart=True, what="bytes")
    with (
        MemoryReservation(budget, "greedy") as one,
        MemoryReservation(budget, "greedy") as two,
        MemoryReservation(budget, "other") as other,
    ):
        one.take(50)
        with pytest.raises(KeyLimitError) as refused:
            two.take(1)
        assert refused.value.status == 429 and refused.value.retry_after_s > 0
        other.take(25)


def test_what_can_never_be_held_is_413_and_not_to_be_tried_again() -> None:
    budget = FairShare(100, apart=True, what="bytes")
    with MemoryReservation(budget, "a") as huge:
        huge.take(30)
        with pytest.raises(PayloadTooLargeError) as refused:
            huge.take(21)
        assert refused.value.status == 413
        assert huge.size_bytes == 30


def test_what_is_given_back_early_makes_room_at_once() -> None:
    budget = FairShare(100, apart=False, what="bytes")
    with MemoryReservation(budget, "a") as one:
        one.take(100)
        one.give_back(70)
        with MemoryReservation(budget, "a") as two:
            two.take(70)
    assert budget.held == 0


async def test_the_next_turn_goes_to_the_account_with_fewest_and_then_to_whoever_came_first() -> None:
    turns, order, over = FairSemaphore(2), [], asyncio.Event()

    async def work(account: str, name: str) -> None:
        async with turns.turn(account):
            order.append(name)
            if name in ("a1", "a2"):
                await over.wait()

    async with asyncio.TaskGroup() as group:
        for account, name in (
            ("a", "a1"),
            ("a", "a2"),
            ("a", "a3"),
            ("a", "a4"),
            ("b", "b1"),
            ("c", "c1"),
            ("b", "b2"),
        ):
            group.create_task(work(account, name))
        while len(order) < 2:
            await asyncio.sleep(0)
        over.set()
    assert order[:2] == ["a1", "a2"] and set(order[2:5]) == {"b1", "c1", "a3"}


async def test_an_account_with_slow_work_leaves_a_place_for_the_next() -> None:
    turns = FairSemaphore(32, spare=True)
    async with AsyncExitStack() as slow:
        for _ in range(16):
            await slow.enter_async_context(turns.turn("slow", within_s=0.0))
        with pytest.raises(TimeoutError):
            await slow.enter_async_context(turns.turn("slow", within_s=0.0))
        async with turns.turn("other", within_s=0.0):
            pass


async def test_the_only_place_there_is_goes_to_whoever_asks() -> None:
    turns = FairSemaphore(1, spare=True)
    for account in ("a", "b"):
        async with turns.turn(account, within_s=0.0):
            pass


async def test_a_wait_that_is_cancelled_or_over_takes_no_turn_with_it() -> None:
    turns = FairSemaphore(1)
    async with turns.turn("a"):
        waiting = asyncio.create_task(turns.turn("b").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            async with turns.turn("c", within_s=0.0):
                pass
    async with turns.turn("d", within_s=0.0):
        pass


async def test_a_turn_that_comes_at_the_moment_of_a_cancellation_goes_on_to_the_next() -> None:
    turns = FairSemaphore(1)
    first = turns.turn("a")
    await first.__aenter__()
    waiting = asyncio.create_task(turns.turn("b").__aenter__())
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)  # b's turn has come, and b does not know yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with turns.turn("c", within_s=0.0):
        pass


async def test_a_turn_passes_over_whoever_has_given_up_and_not_run_since() -> None:
    turns = FairSemaphore(1)
    first = turns.turn("a")
    await first.__aenter__()
    gone = asyncio.create_task(turns.turn("b").__aenter__())
    next_one = asyncio.create_task(turns.turn("b").__aenter__())
    await asyncio.sleep(0)
    gone.cancel()
    await first.__aexit__(None, None, None)
    await next_one
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(TimeoutError):
        async with turns.turn("c", within_s=0.0):
            pass
