"""Requests in turns: who is asked how often, and that the phases of a request add up to its time to first token."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench.clients.turns import Contender, Images, contenders_of, in_turns, row_of, summarise, text, warm_up
from bench.phases import DIRECT, MONOLITH
from bench.served import Served, Stage
from bench.stamps import Timeline
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, refuses, served, streams


def launch(url: str, *stages: Stage) -> Served:
    return Served("TP1", url, "m", {"proxy": (os.getpid(),)}, 1.0, 1.0, stages, Path())


def test_a_monolith_is_asked_past_its_proxy_too():
    through, past = contenders_of(launch("http://proxy", Stage("EPD0", "EPD", 9)))

    assert (through.url, through.milestones) == ("http://proxy", MONOLITH)
    assert (past.url, past.milestones) == ("http://127.0.0.1:9", DIRECT)
    assert [one.name for one in contenders_of(launch("http://proxy"))] == ["TP1"]


@pytest.mark.parametrize(("mode", "asked"), [("unique", 6), ("repeated", 8)])
async def test_contenders_take_turns_and_repeated_images_fill_the_caches_first(mode, asked):
    fake = FakeStage("EPD0", Role.EPD)
    fake.usual = streams(chunk("a "), chunk("b"), DONE)
    async with served(fake) as url:
        both = [Contender(name, url, launch(url), DIRECT) for name in ("one", "two")]
        turns = await asyncio.to_thread(in_turns, both, mode, Images(32), requests=3, pause_s=0.0)

    assert len(fake.calls) == asked
    assert sorted((one.turn, one.contender.name) for one in turns) == [
        (turn, name) for turn in range(3) for name in ("one", "two")
    ]
    assert {one.record.text for one in turns} == {"a b"} and not any(one.right for one in turns)
    rows = [row_of(one, {"TP1": Timeline([])}) for one in turns]
    for row in rows:
        assert sum(row["phases_ms"].values()) + row["residual_ms"] == pytest.approx(row["ttft_ms"], abs=0.01)
        assert 0 < row["ttft_ms"] <= row["total_ms"]
    figures = summarise(rows, ["one", "two"])
    assert figures["one"]["ratio"] == 1.0 and figures["two"]["right"] == 0.0
    assert "two" in text(figures)


async def test_a_failed_request_is_no_figure():
    fake = FakeStage("EPD0", Role.EPD)
    fake.usual = refuses(500, "no")
    async with served(fake) as url:
        with pytest.raises(StageError, match="status 500"):
            await asyncio.to_thread(warm_up, [Contender("one", url, launch(url), DIRECT)], Images(32), 1)
