"""Requests on a schedule against a server whose delays and faults are known. Speed is not asserted."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec
import pytest

from bench.clients.answers import CROWDED
from bench.clients.process import SenderProcess
from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Bounds, Flow, Run, Sender, answered
from bench.clients.sender import ask as ask_alone
from bench.clients.target import Request, Target, requests
from deploy.host.ports import free_ports
from epd_serve.errors import ConfigError, StageError
from epd_serve.roles import Role
from tests.bench.clients.known_server import Known, KnownServer
from tests.proxy.fakes import DONE, FakeStage, chunk, refuses, served, streams, text_body
from tests.waiting import PATIENCE_S

SOON = Bounds(gone_after=3, gone_s=0.0)


def ask(tokens: int = 4, **more: Any) -> Request:
    known = Known(tokens=tokens, **more)
    return Request(msgspec.json.encode({"known": known}), "s", expected_tokens=tokens)


def sender(url: str, **more: Any) -> Sender:
    return Sender(url, name="t", **more)


async def one(given: Request, **more: Any) -> RequestRecord:
    async with KnownServer().serving() as server:
        run = await sender(server.url, **more).run(Flow([given], dues=[0.0]))
    (row,) = run.rows
    return row


async def test_an_open_loop_sends_at_its_moments_and_reads_what_was_written():
    async with KnownServer().serving() as server:
        given = ask(6, first_s=0.05, gap_s=0.01, role_first=True)
        run = await sender(server.url).run(Flow([given], dues=[0.0, 0.02, 0.02, 0.1]))

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
        most = 0

        def watch(record: RequestRecord) -> None:
            nonlocal most
            most = max(most, sending.result.under_way)

        sending = sender(server.url, keep=watch)
        run = await sending.run(Flow([ask(first_s=0.02)], concurrency=3, count=10))
        assert len(run.rows) == server.seen == 10
        assert most <= 3
    assert all(row.ok and row.due_s <= row.ready_s for row in run.rows)


async def test_a_closed_loop_ends_with_its_time():
    async with KnownServer().serving() as server:
        for seconds in (0.05, 1.0, 10.0):  # a busy machine may need more than a moment to begin
            run = await sender(server.url).run(Flow([ask()], concurrency=2, duration_s=seconds))
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
        run = await sender(server.url, bounds=Bounds(limit_s=0.05)).run(Flow([ask(fault="hang")], dues=[0.0]))
        await asyncio.wait_for(_until(lambda: server.left == 1), PATIENCE_S)

    assert run.rows[0].outcome is Outcome.TIMEOUT


async def test_a_client_that_leaves_has_what_came_until_then_and_the_server_notices():
    leaving = Request(ask(1000, gap_s=0.01).body, "s", cancel_after_s=0.05)
    async with KnownServer().serving() as server:
        run = await sender(server.url).run(Flow([leaving], dues=[0.0]))
        await asyncio.wait_for(_until(lambda: server.left == 1), PATIENCE_S)

    assert (run.rows[0].outcome, run.rows[0].fault) == (Outcome.CANCELLED, "left")
    assert len(run.rows[0].token_s) < 1000


async def test_an_endpoint_that_is_down_ends_the_run_and_every_request_has_its_row():
    (port,) = free_ports(1)
    run = await sender(f"http://127.0.0.1:{port}", bounds=SOON).run(Flow([ask()], dues=[0.0] * 3 + [1000.0]))

    assert "the endpoint is gone: 3 requests in a row" in run.stopped
    assert [row.fault for row in run.rows] == ["unreachable"] * 3


async def test_an_endpoint_that_dies_midway_leaves_what_was_measured():
    async with KnownServer().serving() as server:
        sending = sender(server.url, bounds=SOON)
        task = asyncio.create_task(
            sending.run(Flow([ask(gap_s=0.005)], dues=[0.0, *(0.2 + at / 100 for at in range(1000))]))
        )
        await asyncio.wait_for(_until(lambda: any(row.ok for row in sending.result.rows)), PATIENCE_S)
    run = await asyncio.wait_for(task, PATIENCE_S)

    assert run.rows[0].ok
    assert "is gone" in run.stopped
    assert len(run.rows) == run.sent < 1001


async def test_a_run_that_is_stopped_leaves_what_is_under_way_and_gives_it_rows():
    async with KnownServer().serving() as server:
        sending = sender(server.url)
        task = asyncio.create_task(sending.run(Flow([ask(1000, gap_s=0.01)], dues=[0.0, 0.0, 1000.0])))
        await asyncio.wait_for(_until(lambda: server.under_way == 2), PATIENCE_S)
        sending.stop("interrupted")
        sending.stop("again")
        run = await asyncio.wait_for(task, PATIENCE_S)

    assert run.stopped == "interrupted"
    assert [(row.outcome, row.fault) for row in run.rows] == [(Outcome.CANCELLED, "run ended")] * 2


async def test_a_run_whose_rows_cannot_be_kept_ends():
    def keep(row: RequestRecord) -> None:
        raise ConfigError("disk full")

    async with KnownServer().serving() as server:
        run = await sender(server.url, keep=keep).run(Flow([ask()], dues=[0.0, 1000.0]))

    assert run.stopped == "disk full"
    assert run.rows[0].ok


async def test_more_than_may_be_under_way_is_not_sent_and_says_so():
    async with KnownServer().serving() as server:
        run = await sender(server.url, bounds=Bounds(concurrency=1)).run(Flow([ask(first_s=0.2)], dues=[0.0, 0.0]))
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
        assert [name for name, _ in await asyncio.to_thread(Target(server.url + "/v1").served)] == ["known"]
    with pytest.raises(StageError, match="cannot be reached"):
        await asyncio.to_thread(Target(f"http://127.0.0.1:{port}").served)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"220 mail\r\n", "cannot be reached"),
        (b"HTTP/1.1 401 X\r\ncontent-length: 2\r\n\r\nno", "answers 401: no"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}", "no list of models"),
        (b"", "cannot be reached"),
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
            await asyncio.to_thread(Target(f"http://127.0.0.1:{port}").served)


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
        sending = Sender(Target([one.url, other.url]), name="t")
        run = await sending.run(Flow([ask()], dues=[0.0] * 6))

    assert all(row.ok for row in run.rows)
    assert sorted(one.written) == ["t-0", "t-2", "t-4"] and sorted(other.written) == ["t-1", "t-3", "t-5"]


async def test_flows_are_sent_together_each_at_its_moments() -> None:
    async with served(FakeStage("PD0", Role.PD)) as url:
        texts = requests([text_body(stream=False)])
        run = await sender(url).run(Flow(texts, "a", dues=[0.0, 0.02]), Flow(texts, "b", dues=[0.01]))

    found = sorted((round(one.due_s - run.begun_s, 3), one.kind, one.n, one.id) for one in run.rows)
    assert found == [(0.0, "a", 0, "t-a-0"), (0.01, "b", 0, "t-b-0"), (0.02, "a", 1, "t-a-1")]
    assert all(one.ok and one.due_s <= one.first_byte_s <= one.ended_s for one in run.rows)


@pytest.mark.parametrize("decode", [True, False])
async def test_failures_are_told_apart_and_say_why_whether_or_not_tokens_are_read(decode: bool) -> None:
    fake = FakeStage("PD0", Role.PD)
    error = b'data: {"error": {"message": "D0 died"}}\n\n'
    fake.script.extend([refuses(429, "too many"), streams(chunk("a"), error), streams(chunk("a"), then="break")])
    async with served(fake) as url:
        flow = Flow(requests([text_body(stream=True)]), concurrency=1, count=4)
        run = await sender(url, decode=decode).run(flow)

    assert [one.fault for one in run.rows] == ["status 429", "error event", "cut", ""]
    assert "too many" in run.rows[0].error and "D0 died" in run.rows[1].error
    assert run.rows[1].first_byte_s and run.rows[1].wait_s() == 60.0, "a failure does not count as quick"
    assert bool(run.rows[3].token_s) is decode and run.rows[3].first_byte_s


async def test_a_share_of_the_clients_leaves() -> None:
    async with KnownServer().serving() as server:
        flow = Flow([ask(1000, gap_s=0.01)], dues=[0.0] * 40, leave_share=0.5, leave_within_s=0.05, seed=3)
        run = await sender(server.url, bounds=Bounds(limit_s=0.3)).run(flow)

    left = {one.n for one in run.rows if one.left}
    assert left == {n for n in range(40) if flow.request(n).cancel_after_s is not None}
    assert 10 < len(left) < 30
    assert {one.outcome for one in run.rows} == {Outcome.CANCELLED, Outcome.TIMEOUT}


@pytest.mark.parametrize("flow", [{"requests": []}, {"concurrency": 1}, {"count": 3}])
def test_a_flow_that_would_not_begin_or_end_is_refused(flow: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Flow(**{"requests": [ask()], **flow})


async def test_one_request_alone_has_its_text_or_is_an_error() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.script.extend([streams(chunk("a b"), chunk("c"), DONE), refuses(500, "no")])
    async with served(fake) as url:
        record = await asyncio.to_thread(ask_alone, url, text_body(stream=True))
        assert (record.text, record.fault) == ("a bc", "") and record.ttft_s > 0
        with pytest.raises(StageError, match="status 500"):
            await asyncio.to_thread(ask_alone, url, text_body(stream=True))


async def test_requests_that_overlap_leave_the_thread_at_its_priority() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.usual = streams(chunk("a"), DONE)
    before = os.sched_getscheduler(0)
    async with served(fake) as url:
        first, *others = [asyncio.create_task(answered(url, text_body(stream=True))) for _ in range(3)]
        await first
        await asyncio.gather(*others)
    assert os.sched_getscheduler(0) == before


async def test_a_sender_in_a_process_of_its_own_keeps_every_request() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.script.append(refuses(500, "no"))
    fake.usual = streams(chunk("a"), DONE)
    async with served(fake) as url:
        with SenderProcess() as process:
            flow = Flow(requests([text_body(stream=True)]), "text", concurrency=1, count=3)
            run = await asyncio.to_thread(process.run, url, flow)
            assert [(one.fault, one.kind) for one in run.rows] == [("status 500", "text"), ("", "text"), ("", "text")]
            assert run.rows[1].first_byte_s and not run.rows[1].token_s and run.cpu_s > 0
            run = await asyncio.to_thread(process.run, url, flow, decode=True)
            assert all(one.ok and len(one.token_s) == 1 for one in run.rows)
            assert run.begun_s <= run.rows[0].due_s < run.ended_s
            with pytest.raises(StageError, match="ConfigError"):
                await asyncio.to_thread(process.run, "no address", flow)


async def test_a_sender_process_that_is_told_enough_answers_what_is_under_way_and_takes_other_orders() -> None:
    fake = FakeStage("PD0", Role.PD)
    fake.usual = streams(chunk("a"), DONE)
    async with served(fake) as url:
        with SenderProcess() as process:
            looped = Flow(requests([text_body(stream=True)]), "looped", concurrency=2, duration_s=10 * PATIENCE_S)
            due = Flow(requests([text_body(stream=True)]), "due", dues=[0.0, 0.1, 10 * PATIENCE_S])
            process.start(url, looped, due)
            began = time.perf_counter()
            while len(fake.calls) < 10 or time.perf_counter() < began + 0.2:  # nothing is due for long
                await asyncio.sleep(0.01)
            process.enough()
            run = await asyncio.to_thread(process.finish)
            assert len(run.rows) >= 10 and all(one.ok or one.outcome is Outcome.CANCELLED for one in run.rows)
            assert run.ended_s - run.begun_s < PATIENCE_S
            process.enough()  # too late, and no matter
            run = await asyncio.to_thread(
                process.run, url, Flow(requests([text_body(stream=True)]), concurrency=1, count=1)
            )
            assert [one.ok for one in run.rows] == [True]
