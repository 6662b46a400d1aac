"""Progress: rewritten rows on a terminal, plain lines elsewhere; and which of what a runtime sees is news."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

import pytest

from deploy.launch.screen import Screen, StageNews
from deploy.runtime.protocol import Observed, Order, Phase, Runtime, Spec
from epd_serve.errors import StageError
from epd_serve.roles import Role

WAITS = Observed(Order("E0", Spec(Role.E, (0,), "d")), Phase.STARTING)
LOADS = replace(WAITS, pid=7, progress="loading weights")
SERVES = replace(LOADS, phase=Phase.UP, progress="", start_s=3.21, ever_up=True)
FALLS = replace(SERVES, phase=Phase.DOWN, start_s=0.0, pid=None, reason="killed by SIGKILL")
IS_DOWN = replace(FALLS, retry_in_s=1.0)


class Saw:
    """A runtime that saw these, one after the other."""

    def __init__(self, *seen: tuple[Observed, ...]) -> None:
        self._seen = seen

    async def watch(self) -> AsyncGenerator[tuple[Observed, ...]]:
        for item in self._seen:
            yield item


async def told(*seen: tuple[Observed, ...], first: tuple[str, ...] = ("E0",)) -> list[str]:
    out = io.StringIO()
    news = StageNews(Screen(out, terminal=False), first)
    await news.follow(cast(Runtime, Saw(*seen)))
    return out.getvalue().splitlines()


def test_without_a_terminal_every_change_is_one_line() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=False)
    screen.open(["E0"])
    screen.row("E0", "loading weights", True)
    screen.tick()
    screen.row("E0", "ready in 3.2 s", False)
    screen.close()
    screen.row("E0", "down", False)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("[E0] loading weights (")
    assert lines[1:] == ["[E0] ready in 3.2 s", "[E0] down"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_rows_are_drawn_over() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=True)
    screen.open(["E0", "P0"])
    assert out.getvalue().count("\n") == 2
    screen.row("E0", "importing", True)
    assert "\x1b[2F" in out.getvalue()
    screen.line("warning: slow")
    screen.close()
    before = out.getvalue()
    screen.row("P0", "ready in 1.0 s", False)
    assert out.getvalue()[len(before) :] == "[P0] ready in 1.0 s\n"


async def test_each_state_of_an_instance_is_news_once() -> None:
    seen = ((one,) for one in (WAITS, LOADS, LOADS, SERVES, SERVES, FALLS, IS_DOWN, IS_DOWN))
    loads, *lines = await told(*seen, (replace(SERVES, pid=8),), ())
    assert loads.startswith("[E0] loading weights (")
    ready = "[E0] ready in 3.2 s"
    assert lines == [ready, "[E0] down: killed by SIGKILL; restart in 1 s", ready, "[E0] gone"]


async def test_what_is_so_from_the_start_is_no_news_to_a_later_controller() -> None:
    assert await told((SERVES,), (IS_DOWN,), first=()) == ["[E0] down: killed by SIGKILL; restart in 1 s"]


async def test_a_first_start_that_fails_ends_it_and_a_later_end_is_shown() -> None:
    over = replace(FALLS, over=True)
    with pytest.raises(StageError, match="stage E0 did not start: killed by SIGKILL"):
        await told((LOADS,), (over,))
    assert (await told((SERVES,), (over,)))[-1] == "[E0] is not started again: killed by SIGKILL"
