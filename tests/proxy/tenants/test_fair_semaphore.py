"""Who waits gets the next turn by how few its account has, within a time, and no turn is lost whatever ends a wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from proxy.tenants.fair_semaphore import FairSemaphore, TurnTimeout


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
        with pytest.raises(TurnTimeout):
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
        with pytest.raises(TurnTimeout):
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
    with pytest.raises(TurnTimeout):
        async with turns.turn("c", within_s=0.0):
            pass
