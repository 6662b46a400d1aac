"""`epd-bench proxy`: who is asked, with what, and what becomes of the numbers."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from bench.clients.process import SenderProcess
from bench.proxy import relay, rivals
from bench.proxy.command import figures
from bench.proxy.rivals import bare_relay, closed_loop, running, two_call_relay
from bench.served import simulated
from epd_serve.errors import StageError
from epd_serve.roles import Role
from tests.proxy.fakes import DONE, FakeStage, chunk, served, streams

FROZEN = "c8abc69a4b478d736beded417a7c04692438b673794f17bad3cbba86e2a6d8ff"
"""SHA-256 of the relay at 88941942."""

SINCE = (
    ("bench.proxy.relay", "bench.micro.proxy.relay"),
    ("from typing import Any\n\n", "\n"),
    ("from epd_serve.endpoint import for_http, socket_path\n\n", ""),
    (
        "    stages = itertools.cycle(urls)\n"
        "    sessions: dict[str, aiohttp.ClientSession] = {}  # of the server's event loop, which runs only later\n",
        "    stages, sessions = itertools.cycle(urls), list[aiohttp.ClientSession]()\n",
    ),
    (
        "        url = next(stages)\n"
        "        if url not in sessions:\n"
        "            path, usual = socket_path(url), dict[str, Any](limit=0, keepalive_timeout=2.0)\n"
        "            connector = aiohttp.UnixConnector(path, **usual) if path else aiohttp.TCPConnector(**usual)\n",
        "        if not sessions:  # of the server's event loop, which runs only now\n"
        "            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)\n",
    ),
    ("            sessions[url] = aiohttp.ClientSession(", "            sessions.append(aiohttp.ClientSession("),
    ("auto_decompress=False)\n", "auto_decompress=False))\n"),
    ("`proxy/stages/client.py`", "`proxy/stages/connection.py`"),
    ('        target = for_http(url).geturl() + scope["path"]\n', ""),
    ("sessions[url].post(target,", 'sessions[0].post(next(stages) + scope["path"],'),
)
"""What is written there now, for a stage's Unix socket and where its docstring names a file, and what was."""


def test_the_bare_relay_is_what_it_was_but_for_unix_sockets() -> None:
    source = Path(relay.__file__).read_text(encoding="utf-8")
    for now, then in SINCE:
        assert source.count(now) == 1, now
        source = source.replace(now, then)
    assert hashlib.sha256(source.encode()).hexdigest() == FROZEN


def test_the_two_call_relay_gets_whole_answers_and_streams_of_p_and_d() -> None:
    with simulated("P-D") as launch, two_call_relay(launch) as two_calls, SenderProcess() as sender:
        for stream in (False, True):
            asked = [rivals.text_request(launch.model, stream=stream)]
            row = closed_loop(sender, two_calls, asked, 1.0)
            assert row["requests"] and not row["errors"] and row["cpu_us_per_request"] > 0


def test_errors_under_kills_are_all_that_clients_get_besides_whole_answers() -> None:
    rows = [
        {"part": "kills_simulated", "kill": "P0", "kind": "stage", "process": "", "at": 1.0},
        {"part": "kills_simulated", "held": 0},
        {"part": "kills_simulated", "requests": 9, "errors": 1, "cut": 2, "wrong": 0},
    ]
    assert figures(rows) == {"client_errors_under_kills": 3, "kills": 1}


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
