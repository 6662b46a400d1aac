"""Requests on a schedule against a server whose delays and faults are known. Speed is not asserted."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bench.client.known_server import Known, KnownServer
from bench.client.row import Outcome, Row
from bench.client.run import Bounds, Run
from bench.client.runner import Runner
from bench.client.target import Ask, InTurn, Target
from bench.client.verdict import CROWDED
from deploy.ports import free_ports
from epd_serve.errors import ConfigError, StageError
from tests.waiting import PATIENCE_S

SOON = Bounds(gone_after=3, gone_s=0.0)


def ask(tokens: int = 4, **more: Any) -> Ask:
    known = Known(tokens=tokens, **more)
    return Ask("s", msgspec.json.encode({"known": known}), expected_tokens=tokens)


def runner(url: str, *asks: Ask, **more: Any) -> Runner:
    return Runner(Target(url), lambda n: asks[n % len(asks)], name="t", **more)


async def one(given: Ask, **more: Any) -> Row:
    async with KnownServer().serving() as server:
        run = await runner(server.url, given, **more).open_loop([0.0])
    (row,) = run.rows
    return row


async def test_an_open_loop_sends_at_its_moments_and_reads_what_was_written():
    async with KnownServer().serving() as server:
        given = ask(6, first_s=0.05, gap_s=0.01, role_first=True)
        run = await runner(server.url, given).open_loop([0.0, 0.02, 0.02, 0.1])

        assert [row.n for row in sorted(run.rows, key=lambda row: row.n)] == [0, 1, 2, 3]
        for row in run.rows:
            written = server.written[row.id]
            assert row.outcome is Outcome.OK
            assert (row.usage_tokens, row.prompt_tokens, row.finish_reason) == (6, 7, "length")
            assert row.due_s <= row.ready_s <= row.sent_s <= written[0] <= row.first_s
            assert row.last_s >= written[-1]
            assert row.ttft_s >= 0.05, "the role alone, which comes at once, is no token"
            assert len(row.token_s) == 6
    assert (run.sent, run.under_way, run.stopped) == (4, 0, "")


async def test_a_closed_loop_keeps_so_many_under_way_and_sends_so_many():
    async with KnownServer().serving() as server:
        sending = runner(server.url, ask(first_s=0.02))
        most = 0

        def watch(row: Row) -> None:
            nonlocal most
            most = max(most, sending.run.under_way)

        sending._keep = watch
        run = await sending.closed_loop(3, count=10)
        assert len(run.rows) == server.seen == 10
        assert most <= 3
    assert all(row.ok and row.due_s <= row.ready_s for row in run.rows)


async def test_a_closed_loop_ends_with_its_time():
    async with KnownServer().serving() as server:
        for seconds in (0.05, 1.0, 10.0):  # a busy machine may need more than a moment to begin
            run = await runner(server.url, ask()).closed_loop(2, seconds=seconds)
            assert run.issued_s <= run.begun_s + seconds <= run.ended_s
            if run.rows:
                break

    assert run.rows


@pytest.mark.parametrize(
    ("fault", "outcome", "word", "said"),
    [
        ("status", Outcome.ERROR, "status 429", "too much to do"),
        ("garbage", Outcome.ERROR, "garbage", "It works!"),
        ("not http", Outcome.ERROR, "garbage", "220 mail.example"),
        ("error event", Outcome.ERROR, "error event", "D0 died"),
        ("cut", Outcome.TRUNCATED, "cut", "cut off after 1 events"),
        ("no done", Outcome.TRUNCATED, "cut", "without [DONE]"),
        ("empty", Outcome.ERROR, "empty", "without any content"),
        ("short", Outcome.TRUNCATED, "short", "3 tokens of 4"),
        ("drop", Outcome.ERROR, "broken", "before an answer began"),
    ],
)
async def test_each_fault_of_a_server_is_named_with_what_it_said(fault, outcome, word, said):
    row = await one(ask(fault=fault))

    assert (row.outcome, row.fault) == (outcome, word)
    assert said in row.error
    assert not row.ok


async def test_a_server_that_never_answers_is_left_after_the_limit():
    async with KnownServer().serving() as server:
        run = await runner(server.url, ask(fault="hang"), bounds=Bounds(limit_s=0.05)).open_loop([0.0])
        await asyncio.wait_for(_until(lambda: server.left == 1), PATIENCE_S)

    assert run.rows[0].outcome is Outcome.TIMEOUT


async def test_a_client_that_leaves_has_what_came_until_then_and_the_server_notices():
    leaving = Ask("s", ask(1000, gap_s=0.01).body, 1000, cancel_after_s=0.05)
    async with KnownServer().serving() as server:
        run = await runner(server.url, leaving).open_loop([0.0])
        await asyncio.wait_for(_until(lambda: server.left == 1), PATIENCE_S)

    assert (run.rows[0].outcome, run.rows[0].fault) == (Outcome.CANCELLED, "left")
    assert len(run.rows[0].token_s) < 1000


async def test_an_endpoint_that_is_down_ends_the_run_and_every_request_has_its_row():
    (port,) = free_ports(1)
    run = await runner(f"http://127.0.0.1:{port}", ask(), bounds=SOON).open_loop([0.0] * 3 + [1000.0])

    assert "the endpoint is gone: 3 requests in a row" in run.stopped
    assert [row.fault for row in run.rows] == ["unreachable"] * 3


async def test_an_endpoint_that_dies_midway_leaves_what_was_measured():
    async with KnownServer().serving() as server:
        sending = runner(server.url, ask(gap_s=0.005), bounds=SOON)
        task = asyncio.create_task(sending.open_loop([0.0, *(0.2 + at / 100 for at in range(1000))]))
        await asyncio.wait_for(_until(lambda: any(row.ok for row in sending.run.rows)), PATIENCE_S)
    run = await asyncio.wait_for(task, PATIENCE_S)

    assert run.rows[0].ok
    assert "is gone" in run.stopped
    assert len(run.rows) == run.sent < 1001


async def test_a_run_that_is_stopped_leaves_what_is_under_way_and_gives_it_rows():
    async with KnownServer().serving() as server:
        sending = runner(server.url, ask(1000, gap_s=0.01))
        task = asyncio.create_task(sending.open_loop([0.0, 0.0, 1000.0]))
        await asyncio.wait_for(_until(lambda: server.under_way == 2), PATIENCE_S)
        sending.stop("interrupted")
        sending.stop("again")
        run = await asyncio.wait_for(task, PATIENCE_S)

    assert run.stopped == "interrupted"
    assert [(row.outcome, row.fault) for row in run.rows] == [(Outcome.CANCELLED, "run ended")] * 2


async def test_a_run_whose_rows_cannot_be_kept_ends():
    def keep(row: Row) -> None:
        raise ConfigError("disk full")

    async with KnownServer().serving() as server:
        run = await runner(server.url, ask(), keep=keep).open_loop([0.0, 1000.0])

    assert run.stopped == "disk full"
    assert run.rows[0].ok


async def test_more_than_may_be_under_way_is_not_sent_and_says_so():
    async with KnownServer().serving() as server:
        run = await runner(server.url, ask(first_s=0.2), bounds=Bounds(at_once=1)).open_loop([0.0, 0.0])
        assert server.seen == 1

    assert sorted(row.fault for row in run.rows) == ["", CROWDED]


async def test_what_the_server_says_of_a_request_is_in_its_row():
    row = await one(ask())

    assert row.id == "t-0"
    assert row.spec == "s"
    assert row.status == 200


async def test_a_target_says_what_it_serves_or_why_not():
    (port,) = free_ports(1)
    async with KnownServer().serving() as server:
        assert await Target(server.url + "/v1").models() == ["known"]
    with pytest.raises(StageError, match="cannot be reached"):
        await Target(f"http://127.0.0.1:{port}").models()


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"220 mail\r\n", "garbage"),
        (b"HTTP/1.1 401 X\r\ncontent-length: 2\r\n\r\nno", "answers 401: no"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}", "no list of models"),
        (b"", "does not answer"),
    ],
)
async def test_a_server_that_is_no_openai_server_is_known_before_the_run(raw, match):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StageError, match=match):
            await Target(f"http://127.0.0.1:{port}").models()


@pytest.mark.parametrize("header", [{"a\r\nb": "c"}, {"a": "b\nc"}, {"": "x"}])
def test_headers_that_would_break_the_request_are_refused(header):
    with pytest.raises(ConfigError, match="header"):
        Target("http://x", header)


async def _until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_run_begins_with_nothing():
    assert Run("r").rows == []


async def test_servers_are_asked_in_turn():
    async with KnownServer().serving() as one, KnownServer().serving() as other:
        sending = Runner(InTurn([one.url, other.url]), lambda _: ask(), name="t")
        run = await sending.open_loop([0.0] * 6)

    assert all(row.ok for row in run.rows)
    assert sorted(one.written) == ["t-0", "t-2", "t-4"] and sorted(other.written) == ["t-1", "t-3", "t-5"]
