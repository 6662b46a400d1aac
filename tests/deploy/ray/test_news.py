"""What a terminal shows of a deployment elsewhere."""

from __future__ import annotations

import asyncio
import io

import pytest

from deploy.launch.screen import Screen
from deploy.ray.news import MOST, News

pytestmark = pytest.mark.asyncio


async def test_a_terminal_is_told_what_the_controller_was() -> None:
    news, out = News(), io.StringIO()
    news.open(["E0"])
    news.row("E0", "importing", True)
    news.row("E0", "ready in 2.0 s", False)
    news.line("hello")
    news.close()
    _, number, events = await news.after("", 0, 1.0)
    screen = Screen(out, terminal=False)
    for name, values in events:
        getattr(screen, name)(*values)
    assert number == 5
    assert "hello" in out.getvalue() and "ready in 2.0 s" in out.getvalue()


async def test_who_asks_again_is_told_what_has_come_since_as_soon_as_it_comes() -> None:
    news = News()
    news.line("a")
    life, number, _ = await news.after("", 0, 1.0)
    asking = asyncio.create_task(news.after(life, number, 60.0))
    await asyncio.sleep(0)
    assert not asking.done()
    news.line("b")
    assert await asking == (news.life, 2, [("line", ("b",))])


async def test_nothing_new_is_an_empty_answer_after_a_while() -> None:
    news = News()
    assert await news.after(news.life, 0, 0.01) == (news.life, 0, [])


async def test_who_knows_another_life_is_told_all_of_this_one() -> None:
    news = News()
    news.line("a")
    assert await news.after("before", 17, 1.0) == (news.life, 1, [("line", ("a",))])


async def test_who_wants_nothing_of_before_is_told_from_now_on() -> None:
    news = News()
    news.line("a")
    life, number, events = await news.after("", -1, 0.0)
    assert (life, number, events) == (news.life, 1, [])


async def test_the_oldest_are_forgotten() -> None:
    news = News()
    for number in range(MOST + 5):
        news.line(str(number))
    _, number, events = await news.after("", 0, 1.0)
    assert number == MOST + 5
    assert [values for _, values in (events[0], events[-1])] == [("5",), (str(MOST + 4),)]
