"""What open pages are told: once made for all of them, only what has changed, and nothing while nobody watches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from epd_serve.errors import DeadlineError, OverloadedError
from proxy.page import events
from proxy.page.events import Events, Seen
from proxy.records.counts import Counts
from proxy.records.records import Question, RecordsAnswer
from tests.waiting import PATIENCE_S

QUICK_S = 0.02


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_S", QUICK_S)


class Deployment:
    """What there is to see; counts who looks."""

    def __init__(self) -> None:
        self.layout = "E-P-D"
        self.fails = False
        self.asked: list[Question] = []

    async def __call__(self, question: Question, whole: bool) -> Seen:
        assert whole
        self.asked.append(question)
        if self.fails:
            raise DeadlineError("the launcher did not answer")
        requests = [{"id": "r1", "tenant": question.tenant}]
        return Seen(RecordsAnswer(requests, Counts()), json.dumps({"layout": self.layout}).encode(), b"[]")


@asynccontextmanager
async def watching(all_: Events, tenant: str = "") -> AsyncIterator[Any]:
    """Gives what has the next round's events by name."""
    stream = all_.watch(tenant)

    async def told() -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            raw = await anext(stream)
        found = {}
        for event in raw.decode().removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            found[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
        return found

    try:
        yield told
    finally:
        await stream.aclose()


async def test_a_listener_is_told_everything_first_and_then_what_has_changed() -> None:
    deployment = Deployment()
    async with watching(Events(deployment)) as told:
        assert set(await told()) == {"trouble", "deployment", "instances", "rates", "requests", "tick"}
        assert set(await told()) == {"tick"}
        deployment.layout = "E-PD"
        while set(after := await told()) == {"tick"}:
            pass
        assert after["deployment"] == {"layout": "E-PD"} and set(after) == {"deployment", "tick"}


async def test_it_is_made_once_for_all_who_watch() -> None:
    deployment = Deployment()
    all_ = Events(deployment)
    async with watching(all_) as one, watching(all_) as other, watching(all_) as third:
        for _ in range(4):
            for told in (one, other, third):
                await told()
        assert len(deployment.asked) <= 6


async def test_nothing_is_asked_while_nobody_watches() -> None:
    deployment = Deployment()
    all_ = Events(deployment)
    async with watching(all_) as told:
        await told()
    asked = len(deployment.asked)
    await asyncio.sleep(5 * QUICK_S)
    assert asked == len(deployment.asked) >= 1
    async with watching(all_) as told:
        assert "deployment" in await told(), "and who comes again is told everything again"


async def test_each_tenant_is_told_of_its_own_requests() -> None:
    deployment = Deployment()
    all_ = Events(deployment)
    async with watching(all_, "a") as one, watching(all_, "b") as other:
        assert (await one())["requests"][0]["tenant"] == "a"
        assert (await other())["requests"][0]["tenant"] == "b"


async def test_what_cannot_be_had_is_said_and_comes_back() -> None:
    deployment = Deployment()
    deployment.fails = True
    async with watching(Events(deployment)) as told:
        assert set(first := await told()) == {"trouble", "tick"} and first["trouble"]
        deployment.fails = False
        while "deployment" not in (after := await told()):
            pass
        assert after["trouble"] == ""


async def test_who_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_S", QUICK_S)

    async def hangs(question: Question, whole: bool) -> Seen:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never")

    async with watching(Events(hangs)) as told:
        assert (await told())["trouble"]


async def test_at_the_end_every_stream_ends() -> None:
    all_ = Events(Deployment())
    rounds = 0
    async with asyncio.timeout(PATIENCE_S):
        async for _ in all_.watch(""):
            rounds += 1
            all_.end()
    assert rounds == 1


async def test_a_defect_ends_the_streams_that_it_meets_and_no_later_one() -> None:
    broken = True

    async def observe(question: Question, whole: bool) -> Seen:
        if broken:
            raise ValueError("a defect")
        return await Deployment()(question, whole)

    all_ = Events(observe)
    with pytest.raises(ValueError, match="a defect"):
        async with watching(all_) as told:
            await told()
    broken = False
    async with watching(all_) as told:
        assert "deployment" in await told()


async def test_more_than_so_many_do_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_LISTENERS", 1)
    all_ = Events(Deployment())
    all_.check_room()
    async with watching(all_) as told:
        await told()
        with pytest.raises(OverloadedError):
            all_.check_room()
    all_.check_room()


async def test_the_end_waits_for_nobody_who_hangs() -> None:
    asked = asyncio.Event()

    async def hangs(question: Question, whole: bool) -> Seen:
        asked.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never")

    all_ = Events(hangs)
    told = asyncio.create_task(anext(all_.watch("")))
    await asked.wait()
    all_.end()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(told, PATIENCE_S / 10)
