"""What the look at an endpoint tells of its streams."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.aisbench.rows import Shape, look, shape_of
from bench.clients.target import Target
from deploy.host.ports import free_ports
from epd_serve.errors import StageError
from tests.bench.clients.known_server import Known, KnownServer


def event(delta: dict[str, str] | None, **more: object) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


ROLE, TEXT, USAGE = event({"role": "assistant", "content": ""}), event({"content": "a"}), event(None, usage={})


@pytest.mark.parametrize(
    ("events", "shape"),
    [
        ([TEXT, TEXT, USAGE], Shape(0, 1)),
        ([ROLE, TEXT, USAGE], Shape(1, 1)),
        ([ROLE, TEXT, event({}), USAGE], Shape(1, 2)),
        ([TEXT], Shape(0, 0)),
    ],
)
def test_chunks_that_are_no_tokens_are_counted_at_both_ends(events, shape):
    pieces = [(float(n), one) for n, one in enumerate([*events, b"data: [DONE]\n\n"])]

    assert shape_of(pieces) == shape
    assert shape_of([(0.0, b"".join(part for _, part in pieces))]) == shape, "however it was read"


@pytest.mark.parametrize("role_first", [False, True])
async def test_an_endpoint_is_asked_for_a_few_tokens(role_first):
    async with KnownServer(Known(role_first=role_first)).serving() as server:
        assert await asyncio.to_thread(look, Target(server.url), "known") == Shape(int(role_first), 1)
        assert server.seen == 1


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (Known(fault="status"), "answers 429: {"),
        (Known(fault="garbage"), "no OpenAI answer|It works!|Expected"),
        (Known(fault="not http"), "does not answer"),
        (Known(fault="error event"), "cannot be reached"),
        (Known(fault="no done"), "without \\[DONE\\]"),
        (Known(fault="cut"), "cannot be reached"),
        (Known(fault="empty"), "without any content"),
        (Known(fault="drop"), "cannot be reached"),
    ],
)
async def test_an_endpoint_that_fails_a_small_request_is_not_loaded(known, said, monkeypatch):
    monkeypatch.setattr("bench.aisbench.rows.ANSWER_S", 2.0)
    async with KnownServer(known).serving() as server:
        with pytest.raises(StageError, match=said):
            await asyncio.to_thread(look, Target(server.url), "known")


async def test_an_endpoint_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("bench.aisbench.rows.ANSWER_S", 0.05)
    async with KnownServer(Known(fault="hang")).serving() as server:
        with pytest.raises(StageError, match=r"within 0.05 s"):
            await asyncio.to_thread(look, Target(server.url), "known")


async def test_an_endpoint_that_is_down_is_said():
    with pytest.raises(StageError, match="cannot be reached"):
        await asyncio.to_thread(look, Target(f"http://127.0.0.1:{free_ports(1)[0]}"), "known")
