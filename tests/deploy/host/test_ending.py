"""What signals ask for, without any: the handlers are called by hand."""

from __future__ import annotations

import asyncio
import signal

import pytest

from deploy.host.ending import Ending
from proxy.workers.shared_counters import Asked
from tests.waiting import PATIENCE_S, until


class Front:
    """Requests that end when the test says."""

    def __init__(self, running: int) -> None:
        self.running = running
        self.announced = self.began = False
        self._idle = asyncio.Event()
        if not running:
            self._idle.set()

    def ask(self, asked: Asked) -> None:
        self.announced |= asked is Asked.LEAVE
        self.began |= asked is Asked.DRAIN

    async def idle(self) -> None:
        await self._idle.wait()

    def finish(self) -> None:
        self.running = 0
        self._idle.set()


class Case:
    def __init__(self, running: int = 1, drain_s: float = 60.0, lame_duck_s: float = 0.0) -> None:
        self.said: list[str] = []
        self.kills = 0
        self.front = Front(running)
        self.ending = Ending(lame_duck_s, drain_s, self.said.append, self._kill)
        self.ending.serves(self.front)
        self.waiting = asyncio.create_task(self.ending.wait())

    def _kill(self) -> None:
        self.kills += 1

    async def leaving(self) -> None:
        await until(lambda: self.front.announced)

    async def draining(self) -> None:
        await until(lambda: self.front.began)

    async def over(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.waiting
        assert self.ending.stopping.is_set()


async def test_sigterm_waits_for_the_requests_in_flight() -> None:
    case = Case()
    case.ending.take(signal.SIGTERM)
    await case.draining()
    assert not case.ending.stopping.is_set()
    case.front.finish()
    await case.over()
    assert len(case.said) == 1 and "1 requests may go on for 60 s" in case.said[0]


async def test_with_nothing_in_flight_sigterm_is_over_at_once_and_nothing_is_said() -> None:
    case = Case(running=0)
    case.ending.take(signal.SIGTERM)
    await case.over()
    assert case.front.began and not case.said


async def test_sigint_does_not_drain() -> None:
    case = Case()
    case.ending.take(signal.SIGINT)
    await case.over()
    assert not case.front.began and not case.kills


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_draining_and_a_third_one_everything(second: signal.Signals) -> None:
    case = Case()
    case.ending.take(signal.SIGTERM)
    await case.draining()
    case.ending.take(second)
    await case.over()
    assert case.kills == 0
    case.ending.take(second)
    assert case.kills == 1


async def test_who_is_not_done_in_time_is_cut_off_and_counted() -> None:
    case = Case(running=3, drain_s=0.01)
    case.ending.take(signal.SIGTERM)
    await case.over()
    assert case.said[-1] == "3 requests are cut off"


async def test_no_time_to_drain_and_no_proxy_yet_end_at_once() -> None:
    case = Case(drain_s=0)
    case.ending.take(signal.SIGTERM)
    await case.over()
    early = Ending(60.0, 60.0, lambda line: None)
    early.take(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        await early.wait()


async def test_after_sigterm_it_is_not_ready_and_accepts_until_the_time_is_over_or_another_sigterm() -> None:
    for lame_duck_s, second in ((0.05, lambda ending: None), (3600.0, lambda ending: ending.take(signal.SIGTERM))):
        case = Case(lame_duck_s=lame_duck_s)
        case.ending.take(signal.SIGTERM)
        await case.leaving()
        assert not case.front.began or lame_duck_s < 1
        second(case.ending)
        await case.draining()
        assert not case.ending.stopping.is_set(), "what is in flight goes on"
        case.ending.take(signal.SIGTERM)
        await case.over()
        assert not case.kills and "not ready any more" in case.said[0]


@pytest.mark.parametrize("drain_s", [60.0, 0.0])
async def test_ctrl_c_does_not_wait_for_load_balancers(drain_s: float) -> None:
    case = Case(lame_duck_s=3600.0, drain_s=drain_s)
    case.ending.take(signal.SIGTERM)
    await case.leaving()
    case.ending.take(signal.SIGINT)
    await case.over()
    assert not case.front.began and not case.kills
