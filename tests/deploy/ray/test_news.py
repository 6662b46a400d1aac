"""What a terminal shows of a deployment elsewhere."""

from __future__ import annotations

import asyncio
import io
import time

import pytest

from deploy.launch.screen import Screen
from deploy.ray import news as ray_news
from deploy.ray.news import MOST, News
from tests.waiting import PATIENCE_S


def test_a_terminal_is_told_what_the_controller_was() -> None:
    news, out = News(), io.StringIO()
    news.open(["E0"])
    news.row("E0", "importing", True)
    news.row("E0", "ready in 2.0 s", False)
    news.line("hello")
    news.close()
    _, number, events = news.after("", 0)
    screen = Screen(out, terminal=False)
    for name, values in events:
        getattr(screen, name)(*values)
    assert number == 5
    assert "hello" in out.getvalue() and "ready in 2.0 s" in out.getvalue()


def test_who_asks_again_is_told_what_has_come_since() -> None:
    news = News()
    news.line("a")
    life, number, _ = news.after("", 0)
    assert news.after(life, number) == (news.life, 1, [])
    news.line("b")
    assert news.after(life, number) == (news.life, 2, [("line", ("b",))])


def test_who_knows_another_life_is_told_all_of_this_one() -> None:
    news = News()
    news.line("a")
    assert news.after("before", 17) == (news.life, 1, [("line", ("a",))])


def test_who_wants_nothing_of_before_is_told_from_now_on() -> None:
    news = News()
    news.line("a")
    assert news.after("", -1) == (news.life, 1, [])


def test_the_oldest_are_forgotten() -> None:
    news = News()
    for number in range(MOST + 5):
        news.line(str(number))
    _, number, events = news.after("", 0)
    assert number == MOST + 5
    assert [values for _, values in (events[0], events[-1])] == [("5",), (str(MOST + 4),)]


async def test_the_end_waits_until_somebody_has_heard_of_it_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_news, "ASK_EVERY_S", 0.0)
    news = News()
    news.add("ended", 0)
    taken = asyncio.create_task(news.taken(PATIENCE_S))
    await asyncio.sleep(2 * ray_news.LOOK_S)
    assert not taken.done()
    news.after("", 0)
    await asyncio.wait_for(taken, PATIENCE_S)
    news.line("nobody asks")
    before = time.monotonic()
    await news.taken(0.1)
    assert time.monotonic() - before < PATIENCE_S
