"""The loop that the proxy runs in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import uvloop

from deploy.host import event_loop
from tests.waiting import PATIENCE_S


async def which() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_it_is_uvloop_and_asyncios_own_where_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_loop.run(which()) is uvloop.Loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert issubclass(event_loop.run(which()), asyncio.SelectorEventLoop)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As a Python that somebody looks at: a shell starts those in the background deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_reach_handlers_of_the_loop_and_interrupts_end_it() -> None:
    async def until_signalled() -> str:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, heard.set)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            await heard.wait()
        return "heard"

    async def interrupted() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(PATIENCE_S)

    assert event_loop.run(until_signalled()) == "heard"
    with pytest.raises(KeyboardInterrupt):
        event_loop.run(interrupted())
