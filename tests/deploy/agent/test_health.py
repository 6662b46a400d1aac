"""Asking a stage for its health, whatever answers there."""

from __future__ import annotations

import asyncio

import pytest

from deploy.agent.waits import health_status
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.1 503 no\r\n\r\n", 503),
        (b"", None),
        (b"220 mail.example ESMTP\r\n", None),
        (b"x" * 200_000, None),  # longer than any first line
    ],
    ids=["well", "ill", "nothing", "another protocol", "garbage without an end"],
)
async def test_what_is_no_answer_of_http_is_no_health(said: bytes, status: int | None) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await health_status(f"http://127.0.0.1:{port}", PATIENCE_S) == status
