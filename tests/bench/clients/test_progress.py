"""The live line: what it says, and that files never get it."""

from __future__ import annotations

import asyncio
import io

from bench.clients import progress
from bench.clients.sender import Run
from tests.bench.clients.made import failed, row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_how_the_run_stands():
    run = Run("4 rps", begun_s=10.0, sent=5, under_way=2, rows=[row(ttft=0.2), row(ttft=0.4), failed()])

    assert progress.line(run, 13.0) == "4 rps  3 s  sent 5  under way 2  ok 2  not ok 1  TTFT 300 ms"
    assert progress.line(Run("r"), 0.0).endswith("no first token yet")


async def test_it_is_shown_on_a_terminal_and_taken_away_again(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    out = Terminal()
    async with progress.live_line(Run("r"), out):
        while "no first token" not in out.getvalue():
            await asyncio.sleep(0.001)

    assert out.getvalue().endswith("\r\x1b[K")


async def test_a_file_gets_nothing(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    out = io.StringIO()
    async with progress.live_line(Run("r"), out), progress.live_line(Run("r"), None):
        for _ in range(5):
            await asyncio.sleep(0)

    assert out.getvalue() == ""
