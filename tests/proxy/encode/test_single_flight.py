"""One flight per key: leading, following, handing over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.encode.encoders import SingleFlight
from tests.waiting import PATIENCE_S


async def test_the_first_leads_and_everybody_has_its_result() -> None:
    flights = SingleFlight()
    first, *others = [flights.join("k") for _ in range(64)]
    assert first.leads and not any(seat.leads for seat in others)
    waiting = [asyncio.create_task(seat.turn()) for seat in others]
    await asyncio.sleep(0)
    first.land()
    assert await asyncio.gather(*waiting) == [False] * 63
    assert all(seat.landed for seat in (first, *others))
    assert not flights and flights.join("k").leads


async def test_when_the_leader_fails_exactly_one_tries_and_the_rest_follow_it() -> None:
    flights = SingleFlight(tries=2)
    leader, second, third = (flights.join("k") for _ in range(3))
    leader.fail()
    assert leader.settled and not leader.landed
    assert await second.turn() and second.leads and not third.leads
    second.land()
    assert not await third.turn() and third.landed


async def test_when_tries_are_used_up_all_give_up_at_once() -> None:
    flights = SingleFlight(tries=2)
    leader, second, *rest = (flights.join("k") for _ in range(10))
    leader.fail()
    second.fail()
    assert not any([await seat.turn() for seat in rest])
    assert not any(seat.landed for seat in rest) and "k" not in flights


async def test_a_cancelled_leader_hands_over_without_a_failure() -> None:
    flights = SingleFlight(tries=1)
    with flights.join("k"):
        follower = flights.join("k")
    assert follower.leads
    follower.land()
    assert follower.landed and not flights


async def test_a_follower_cancelled_in_the_moment_it_is_to_lead_hands_on() -> None:
    flights = SingleFlight()
    leader = flights.join("k")

    async def follow() -> None:
        with flights.join("k") as seat:
            if await seat.turn():
                seat.land()

    doomed, last = asyncio.create_task(follow()), asyncio.create_task(follow())
    await asyncio.sleep(0)
    leader.leave()
    doomed.cancel()
    await asyncio.wait_for(asyncio.wait([doomed, last]), PATIENCE_S)
    assert doomed.cancelled() and not last.cancelled() and not flights


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_at_most_one_flies_per_key_and_every_waiter_settles(seed: int, requests: int, keys: int, tries: int) -> None:
    """Random failures, cancellations and interleavings: steps of the loop stand for time."""
    rng = random.Random(seed)

    async def story() -> None:
        flights = SingleFlight(tries=tries)
        flying: Counter[str] = Counter()
        outcomes: list[bool] = []

        async def request(key: str) -> None:
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            with flights.join(key) as seat:
                while await seat.turn():
                    flying[key] += 1
                    assert flying[key] == 1
                    try:
                        for _ in range(rng.randrange(6)):
                            await asyncio.sleep(0)
                    finally:
                        flying[key] -= 1
                    if rng.random() < 0.5:
                        seat.fail()
                    else:
                        seat.land()
                outcomes.append(seat.settled)

        tasks = [asyncio.create_task(request(f"k{rng.randrange(keys)}")) for _ in range(requests)]
        for _ in tasks:
            await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        done, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert not pending and all(task.cancelled() or task.exception() is None for task in done)
        assert not flights and all(outcomes)

    asyncio.run(story())
