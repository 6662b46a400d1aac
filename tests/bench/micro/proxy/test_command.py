"""`epd-bench proxy`: who is asked, with what, and what becomes of the numbers."""

from __future__ import annotations

import asyncio

import pytest

from bench.clients.process import SenderProcess
from bench.micro.proxy import rivals
from bench.micro.proxy.rivals import bare_relay, closed_loop, running
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, served, streams


def test_ratios_are_taken_within_a_round() -> None:
    rows = [
        {"kind": "whole", "to": name, "round": turn, "rps": rps}
        for turn, pair in enumerate([(60, 100), (30, 60), (8, 10)])
        for name, rps in zip(("proxy", "relay"), pair, strict=True)
    ]
    assert rivals.ratio(rows, "whole", "proxy", "relay") == 0.6


def test_images_have_the_size_they_should_and_differ() -> None:
    first, second = (rivals.image_request("m", seed).body for seed in (1, 2))
    assert first != second and 190_000 < len(first) * 3 / 4 < 215_000


async def test_the_bare_relay_passes_answers_on() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.usual = streams(chunk("a"), DONE)
    async with served(fake) as url:

        def through() -> dict[str, float]:
            with bare_relay(url) as relay, SenderProcess() as sender:
                return closed_loop(sender, relay, [rivals.text_request("m", stream=True)], 1.0)

        row = await asyncio.to_thread(through)
    assert row["requests"] and not row["errors"] and row["cpu_us_per_request"] > 0


def test_a_rival_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(StageError, match="no such luck"), running("it", 1, ["sh", "-c", "echo no such luck; exit 1"]):
        pass
