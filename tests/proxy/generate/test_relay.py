"""Relaying a stream, read by read: what the client gets, and what an error in a read costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from epd_serve.errors import StageError
from proxy.config.limits import MigrationLimits
from proxy.errors import StageRefusal
from proxy.generate.relay import Client as RelayClient
from proxy.generate.relay import relay
from proxy.request.client import ClientSink
from proxy.stages.history import HistoryRoom, TokenHistory
from proxy.stages.sse import split
from tests.proxy.fakes import DONE, chunk, opening
from tests.proxy.generate.streams import SPACED, Form, Reader, meaning, respaced


def failure(code: int) -> bytes:
    return b'data: {"error": {"message": "boom", "type": "x", "param": null, "code": %d}}\n\n' % code


class Client:
    """What a client was sent, and how often the relay said that it had begun."""

    def __init__(self) -> None:
        self.got = b""
        self.begun = 0
        self.sink = ClientSink(self._send, {})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.got += message.get("body", b"")

    async def relay(self, *reads: bytes) -> None:
        await relay(
            _each(reads),
            RelayClient(self.sink, TokenHistory(HistoryRoom(MigrationLimits()))),
            stage="D0",
            on_first=self._began,
        )

    def _began(self) -> None:
        self.begun += 1


async def _each(reads: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for read in reads:
        yield read


@pytest.mark.parametrize("before", [b"", chunk("a"), opening(0) + chunk("a") + chunk("b")], ids=["0", "1", "3"])
@pytest.mark.parametrize(("code", "error"), [(500, StageError), (400, StageRefusal)])
async def test_an_error_in_the_first_read_leaves_the_client_with_nothing(
    before: bytes, code: int, error: type[Exception]
) -> None:
    client = Client()
    with pytest.raises(error):
        await client.relay(before + failure(code) + DONE)
    assert client.got == b"" and client.begun == 0 and not client.sink.committed, "so the attempt can be repeated"


async def test_what_comes_with_an_error_after_the_first_read_still_reaches_the_client() -> None:
    client = Client()
    with pytest.raises(StageError):
        await client.relay(chunk("a"), chunk("b") + failure(500) + DONE)
    assert client.got == chunk("a") + chunk("b") and client.begun == 1 and not client.sink.finished


@pytest.mark.parametrize("whole", [True, False])
async def test_the_client_gets_every_byte_however_they_come(whole: bool) -> None:
    events = (opening(0), chunk("a"), chunk("b"), DONE)
    client = Client()
    await client.relay(*([b"".join(events)] if whole else events))
    assert client.got == b"".join(events) and client.begun == 1 and client.sink.finished


async def test_a_stream_without_an_end_is_an_error() -> None:
    client = Client()
    with pytest.raises(StageError, match="early"):
        await client.relay(chunk("a"))


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_end_without_an_answer_is_an_error_however_it_comes(at_once: bool) -> None:
    usage = Form(chat=True).written(choices=[], usage={"completion_tokens": 0})
    client = Client()
    with pytest.raises(StageError, match="without an answer"):
        await client.relay(*([opening(0) + usage + DONE] if at_once else [opening(0), usage, DONE]))
    assert client.got == b"" and not client.sink.committed


TOKENS = [(5, "a "), (6, 'says "b": '), (7, "{ "), (8, "")]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("style", SPACED, ids=str)
async def test_another_server_of_the_same_api_leaks_no_ids_and_can_be_gone_on_after(
    style: dict[str, Any], at_once: bool, chat: bool
) -> None:
    form = Form(chat=chat, ids=True)
    stream = respaced(form.written(choices=[], prompt_token_ids=[41, 42]) + form.stream(TOKENS), **style)
    reader = Reader(asks=False)
    await relay(_each((stream,) if at_once else tuple(split(stream))), reader.client, stage="D0")
    assert b"[4" not in reader.got
    told = meaning(respaced(reader.got))
    assert told == {**meaning(form.stream(TOKENS)), "ids": []} and told["text"] == 'a says "b": { '
    if not at_once:  # what comes with the end is not kept
        assert reader.given.goes_on and reader.given.finished and reader.given.tokens.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("style", SPACED, ids=str)
async def test_an_answer_that_another_server_gave_up_is_no_answer(style: dict[str, Any]) -> None:
    form = Form(chat=True, ids=True)
    begun, aborted = form.event([(5, "a")]), form.event([(6, "b")], "abort")
    for reads in ((begun, aborted + DONE), (begun, failure(500) + DONE)):
        reader = Reader(asks=False)
        with pytest.raises(StageError):
            await relay(_each(tuple(respaced(read, **style) for read in reads)), reader.client, stage="D0")
        assert meaning(respaced(reader.got) + DONE)["text"] == "a"
