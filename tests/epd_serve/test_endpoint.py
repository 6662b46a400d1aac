"""Endpoints as text, and connections to them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from epd_serve.endpoint import connect, for_http, is_endpoint, socket_path, unix_url
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("url", ["unix:/run/P0.http", "http://h:1", "http://h", "http://[::1]:8000", "http://h:1/"])
def test_what_is_an_endpoint(url: str) -> None:
    assert is_endpoint(url)


@pytest.mark.parametrize("url", ["", "unix:", "unix:P0.http", "h:1", "https://h:1", "http://h:0", "http://h:1/v1"])
def test_what_is_none(url: str) -> None:
    assert not is_endpoint(url)


def test_a_socket_is_told_from_tcp_and_asked_as_localhost() -> None:
    assert unix_url(Path("/run/P0.http")) == "unix:/run/P0.http"
    assert socket_path("unix:/run/P0.http") == "/run/P0.http" and not socket_path("http://h:1")
    assert for_http("unix:/run/P0.http").netloc == "localhost" and for_http("http://[::1]:2").netloc == "[::1]:2"


def test_whoever_finds_the_backlog_of_a_socket_full_waits_for_a_place(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def three_connect(listening: socket.socket) -> None:
        connecting = [asyncio.create_task(connect(unix_url(path), asyncio.Protocol)) for _ in range(3)]
        done, waiting = await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
        while waiting:
            accepted.append((await asyncio.to_thread(listening.accept))[0])
            more, waiting = await asyncio.wait(waiting, timeout=0)
            done |= more
        for one in done:
            one.result()[0].close()

    accepted: list[socket.socket] = []
    with socket.create_server(path, family=socket.AF_UNIX, backlog=0) as listening:
        listening.settimeout(PATIENCE_S)
        uvloop.run(three_connect(listening))
    for one in accepted:
        one.close()


async def test_what_a_dead_stage_left_is_no_endpoint(tmp_path: Path) -> None:
    with socket.create_server(str(tmp_path / "s"), family=socket.AF_UNIX):
        pass
    for name in ("s", "never"):
        with pytest.raises(OSError):
            await connect(unix_url(tmp_path / name), asyncio.Protocol)
