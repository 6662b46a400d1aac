"""Calls to stages: what becomes of late, broken, unreachable and large ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy import strict_json
from proxy.config.limits import Timeouts
from proxy.errors import StageDied, StageRefusal, StageUnreachable
from proxy.stages.client import ONE_WRITE_BYTES, StageClient, deadline
from tests.proxy.fakes import (
    DONE,
    QUICK,
    Behaviour,
    FakeStage,
    breaks,
    chunk,
    hangs,
    refused_instance,
    refuses,
    replies,
    served,
    streams,
    text_body,
)
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
BODY = strict_json.encode(text_body(stream=True))


@asynccontextmanager
async def stage(
    *script: Behaviour, timeouts: Timeouts = QUICK
) -> AsyncIterator[tuple[StageClient, Instance, FakeStage]]:
    fake = FakeStage("PD0", Role.PD)
    fake.script.extend(script)
    async with served(fake) as url:
        client = StageClient(timeouts)
        try:
            yield client, Instance("PD0", Role.PD, url, "life1"), fake
        finally:
            await client.aclose()


async def events(client: StageClient, instance: Instance) -> bytes:
    async with aclosing(client.events(instance, CHAT, BODY, {})) as stream:
        return b"".join([several async for several in stream])


async def test_a_stream_comes_out_as_it_went_in_and_its_connection_serves_the_next() -> None:
    async with stage(*[streams(chunk("a"), chunk("b"), DONE)] * 2) as (client, instance, fake):
        assert await events(client, instance) == chunk("a") + chunk("b") + DONE
        assert await events(client, instance) == chunk("a") + chunk("b") + DONE
        ports = {call.headers["host"] for call in fake.calls}
        assert len(fake.calls) == 2 and len(ports) == 1


async def test_what_is_late_is_named_and_its_connection_closed() -> None:
    async with stage(hangs, hangs, timeouts=replace(QUICK, first_byte_s=0.05)) as (client, instance, fake):
        with pytest.raises(DeadlineError, match="the first token from stage PD0"):
            await events(client, instance)
        with pytest.raises(DeadlineError, match="stage PD0 took longer than"):
            await client.post(instance, CHAT, BODY, {}, timeout_s=0.05)
        await fake.until(lambda fake: fake.active == 0)
    silent = streams(chunk("a"), then="hang")
    async with stage(silent, timeouts=replace(QUICK, idle_s=0.05)) as (client, instance, fake):
        with pytest.raises(DeadlineError, match="the next token from stage PD0"):
            await events(client, instance)
        await fake.until(lambda fake: fake.cancelled == 1)


async def test_a_slow_reader_is_not_a_late_stage() -> None:
    quick = replace(QUICK, idle_s=0.3)
    async with stage(streams(chunk("a"), chunk("b"), DONE), timeouts=quick) as (client, instance, _):
        async with aclosing(client.events(instance, CHAT, BODY, {})) as stream:
            first_event = await anext(stream)
            await asyncio.sleep(0.4)
            async for several in stream:
                first_event += several
        assert first_event == chunk("a") + chunk("b") + DONE


async def test_leaving_a_stream_closes_its_connection() -> None:
    async with stage(streams(chunk("a"), then="hang")) as (client, instance, fake):
        async with aclosing(client.events(instance, CHAT, BODY, {})) as stream:
            assert await anext(stream) == chunk("a")
        await fake.until(lambda fake: fake.cancelled == 1)


async def test_broken_unreachable_and_refusing_stages_have_names_of_their_own() -> None:
    async with stage(breaks, refuses(400, "no such thing", "n"), replies(500, {}), replies(200, [1])) as (
        client,
        up,
        _,
    ):
        with pytest.raises(StageError, match="broke its connection"):
            await events(client, up)
        with pytest.raises(StageRefusal, match="no such thing"):
            await events(client, up)
        with pytest.raises(StageError, match="failed with 500"):
            await client.post(up, CHAT, BODY, {}, timeout_s=None)
        with pytest.raises(StageError, match="no JSON object"):
            await client.post(up, CHAT, BODY, {}, timeout_s=None, decode=strict_json.fields)
        with pytest.raises(StageUnreachable):
            await client.post(refused_instance("D0", Role.D), CHAT, BODY, {}, timeout_s=None)


async def test_a_redirect_is_not_followed() -> None:
    async with stage(replies(307, {"error": "elsewhere"})) as (client, instance, fake):
        with pytest.raises(StageError, match="307"):
            await client.post(instance, CHAT, BODY, {}, timeout_s=None)
        assert len(fake.calls) == 1


async def test_a_body_too_large_for_one_write_arrives_whole() -> None:
    body = text_body(padding="x" * (ONE_WRITE_BYTES + 1))
    async with stage() as (client, instance, fake):
        await client.post(instance, CHAT, strict_json.encode(body), {"x-request-id": "r"}, timeout_s=None)
        assert fake.calls[0].body == body
        assert fake.calls[0].headers["content-type"] == "application/json"
        assert fake.calls[0].headers["x-request-id"] == "r"


async def test_a_deadline_names_what_was_waited_for_and_leaves_other_timeouts_alone() -> None:
    with pytest.raises(DeadlineError, match="the answer took longer than"):
        async with deadline(0.01, "the answer"):
            await asyncio.sleep(5)
    with pytest.raises(TimeoutError):
        async with deadline(5, "the answer"):
            raise TimeoutError


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_stage(serve: Serve) -> AsyncIterator[tuple[StageClient, Instance]]:
    """A stage that speaks HTTP by hand, so that a test decides what is a read of its own."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = StageClient(QUICK)
    try:
        yield client, Instance("D0", Role.D, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "life1")
    finally:
        await client.aclose()
        server.close()


async def _request(reader: asyncio.StreamReader) -> bytes:
    """The next request; what there is where the client has closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return head + await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    except asyncio.IncompleteReadError as cut:
        return cut.partial


def _whole(body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), more, body)


async def test_a_stream_whose_end_comes_after_its_last_event_gives_its_connection_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.stages.client.REST_S", PATIENCE_S)
    connections, ended = 0, asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await _request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(DONE), DONE))
            await writer.drain()
            await asyncio.sleep(0.01)  # so that it is a read of its own
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            ended.release()

    async with raw_stage(serve) as (client, instance):
        for _ in range(3):
            assert await events(client, instance) == DONE
            await ended.acquire()
            await asyncio.sleep(0.01)  # it is read
        assert connections == 1


async def test_a_stream_without_an_end_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.client.REST_S", 0.01)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(DONE), DONE))
        assert await _request(reader) == b""
        closed.set()

    async with raw_stage(serve) as (client, instance):
        assert await events(client, instance) == DONE
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()


@pytest.mark.parametrize(
    "answer",
    [
        b"SMTP ready\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no HTTP", "a body cut short", "no chunk"],
)
async def test_what_is_no_whole_answer_is_a_broken_connection(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(answer)
        writer.close()

    async with raw_stage(serve) as (client, instance):
        with pytest.raises(StageDied):
            await client.post(instance, CHAT, BODY, {}, timeout_s=None)
        with pytest.raises(StageDied):
            await events(client, instance)


async def test_a_connection_is_used_again_unless_the_stage_says_or_does_otherwise() -> None:
    answers = [_whole(b"{}"), _whole(b"{}", b"connection: close\r\n"), _whole(b"{}"), _whole(b"{}") + b"HTTP/1.1 200 "]
    served_by = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answers and await _request(reader):
            served_by.append(writer)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + answers.pop(0))
        await reader.read()
        writer.close()

    async with raw_stage(serve) as (client, instance):
        for _ in range(4):
            assert await client.post(instance, CHAT, BODY, {}, timeout_s=None) == {}
    assert [served_by.index(one) for one in served_by] == [0, 0, 2, 2]


async def test_an_answer_before_the_end_of_a_large_body_is_the_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "too much", "code": 413}}'
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        assert len(await reader.read()) < 64 << 20  # the rest is not sent

    async with raw_stage(serve) as (client, instance):
        with pytest.raises(StageRefusal, match="too much"):
            await client.post(instance, CHAT, bytes(64 << 20), {}, timeout_s=None)


async def test_an_answer_is_read_no_faster_than_it_is_taken() -> None:
    event = b"data: " + b"x" * (1 << 20) + b"\n\n"
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(64):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    async with raw_stage(serve) as (client, instance):
        async with aclosing(client.events(instance, CHAT, BODY, {})) as stream:
            size = len(await anext(stream))
            before = -1
            while sent > before:  # as much as sockets hold
                before = sent
                await asyncio.sleep(0.05)
            assert before < 60
            size += sum([len(several) async for several in stream])
        assert size == 64 * len(event)


async def test_a_connection_that_nobody_uses_is_closed_before_the_stage_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.stages.client.IDLE_S", 0.05)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _request(reader):
            writer.write(_whole(b"{}"))
        closed.set()

    async with raw_stage(serve) as (client, instance):
        for _ in range(2):
            assert await client.post(instance, CHAT, BODY, {}, timeout_s=None) == {}
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()
        assert not client._idle[instance.url]
