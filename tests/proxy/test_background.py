"""Tasks that run for ever, and what becomes of them when they fail."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.background import Background
from tests.proxy.fakes import cluster
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.background.BACKOFF_S", 0.001)
    monkeypatch.setattr("proxy.background.BACKOFF_MAX_S", 0.002)


def failed(background: Background, task: str) -> float:
    return background.registry.get_sample_value("epd_proxy_background_failed_total", {"task": task}) or 0.0


@pytest.mark.parametrize("ending", ["raises", "returns", "is cancelled from within"])
async def test_a_task_that_ends_is_down_until_it_has_run_again_for_a_while(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.background.SETTLED_S", 0.02)
    background, runs, changes = Background(), 0, 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs <= 3:
            if ending == "raises":
                raise KeyError("oops")
            if ending == "returns":
                return
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    def changed() -> None:
        nonlocal changes
        changes += 1

    background.changed = changed
    background.start("news", run)
    await until(lambda: background.down)
    await until(lambda: runs == 4 and not background.down)
    assert failed(background, "news") == 3 and changes == 2
    await background.stop()
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_it_says_so_once_a_minute_and_not_with_every_failure(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()

    async def run() -> None:
        raise OSError("no")

    with caplog.at_level(logging.ERROR):
        background.start("news", run)
        await until(lambda: failed(background, "news") >= 5)
        for _ in range(5):
            with background.handling("KvReport"):
                raise ValueError("bad")
    await background.stop()
    assert len([one for one in caplog.records if one.name == "proxy.background"]) == 2
    assert background.registry.get_sample_value("epd_proxy_broken_messages_total", {"kind": "KvReport"}) == 5


async def test_stopping_is_no_failure() -> None:
    background = Background()
    background.start("news", lambda: asyncio.sleep(3600))
    background.start("beats", lambda: asyncio.sleep(3600))
    await background.stop("news")
    await background.stop("news", "never started")
    assert not background.down and not failed(background, "news")
    await background.stop()


async def test_a_look_at_silent_stages_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.circuits.CHECK_EVERY_S", 0.005)
    async with cluster("PD0") as c:
        looks = 0

        def silence_s(*_: object) -> float:
            nonlocal looks
            looks += 1
            raise KeyError("oops")

        monkeypatch.setattr(c.table, "silence_s", silence_s)
        held = asyncio.Event()

        async def slow(stage: object, call: object, receive: object, send: object) -> None:
            await held.wait()

        c["PD0"].usual = slow  # type: ignore[assignment]
        requests = asyncio.create_task(c.ask())
        await until(lambda: looks >= 3)
        requests.cancel()
        held.set()
