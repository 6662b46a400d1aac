"""Workers and their parent in one event loop: real feeds, one real listening socket, fake stages."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.endpoint import unix_url
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.background import Background
from proxy.config.keys import ApiKeys
from proxy.config.limits import Timeouts
from proxy.page.events import observed
from proxy.records.counts import MINUTE_S
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.instance_state import Lease, Work
from proxy.registry.table import InstanceTable
from proxy.tenants import Callers
from proxy.workers import hub as worker_hub
from proxy.workers import worker as worker_room
from proxy.workers.ask import ask
from proxy.workers.hub import Worker, WorkerHub
from proxy.workers.roster import Publisher, WorkerRoster
from proxy.workers.shared_counters import COUNTS, Asked, Cell, SharedCounters, SharedLedger, settle, shared_memory
from proxy.workers.wire import FeedError, Roster, Row, Setup, Told, packed, unpacked
from proxy.workers.worker import Feed, WorkerSignals, run_worker
from tests.proxy.fakes import FakeStage, answer, api_keys, bound, counted, in_flight, once, served, settings, text_body
from tests.waiting import until

DEADLINE_S = 60.0
PATIENT = Timeouts()  # requests are held for as long as a test takes


@dataclass
class Doors:
    """What the page asks of all front doors."""

    table: InstanceTable
    deployment: Any = None

    async def look(self, question: Question) -> RecordsAnswer:
        return await self.hub.look(question)

    hub: Any = None


@dataclass
class Parent:
    """Whoever feeds them: one life of it."""

    table: InstanceTable
    published: Publisher
    hub: WorkerHub
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, counters: SharedCounters, feed: socket.socket, background: Background, after: int = 0) -> Parent:
        ledger = SharedLedger(counters, None)
        ledger.place(("PD0", "one"), 0)
        table = InstanceTable(ledger=ledger)
        published = Publisher(table, after=after)
        doors = Doors(table)
        doors.hub = WorkerHub(table, published, feed.dup(), background, observed(doors))
        return cls(table, published, doors.hub)

    def say(self, row: Row, *wanted: Role) -> None:
        """Of one instance; all others are as they were."""
        self.rows[row.instance.id] = row
        self.published.publish(self.rows.values(), wanted)


@dataclass
class Crew:
    """A parent with workers that share one socket."""

    parent: Parent
    background: Background
    counters: SharedCounters
    url: str
    stage: FakeStage
    instance: Instance
    path: Path
    listening: socket.socket
    feed: socket.socket
    memory: int
    signals: list[WorkerSignals] = field(default_factory=list)
    works: list[asyncio.Task[None]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    @property
    def hub(self) -> WorkerHub:
        return self.parent.hub

    @property
    def table(self) -> InstanceTable:
        return self.parent.table

    @property
    def published(self) -> Publisher:
        return self.parent.published

    def expect(self, row: int) -> Worker:
        """A worker, which does not start yet."""
        setup = Setup(settings(timeouts=PATIENT), self.counters.rows, 1.0, 30.0, 1.0)
        return self.hub.expect(row, unix_url(self.path.with_name(f"front.{row}.sock")), setup)

    async def begin(self, row: int) -> Worker:
        """Another worker, which serves."""
        worker = self.expect(row)
        signals, copy = WorkerSignals(), socket.socket(fileno=os.dup(self.listening.fileno()))
        own = bound_at(self.path.with_name(f"front.{row}.sock"))
        self.workers.append(worker)
        self.signals.append(signals)
        self.works.append(asyncio.create_task(run_worker(self.path, row, own, copy, self.memory, signals)))
        await until(lambda: answers(worker.url, "/health"))
        worker.serving = True  # as whoever has started it says
        return worker

    def down(self, reason: str) -> None:
        self.parent.say(Row(self.instance, False, reason), Role.PD)

    def up(self) -> None:
        self.parent.say(Row(self.instance, True), Role.PD)

    async def all_know(self) -> None:
        rows = [worker.row for worker in self.workers]
        await until(lambda: {self.counters.said(row, Cell.ROSTER) for row in rows} == {self.published.number})

    async def ask(self, path: str = "", **options: Any) -> httpx.Response:
        """On a connection of its own, so that any worker may take it."""
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False) as client:
            if path:
                return await client.request(options.pop("method", "GET"), path, **options)
            return await client.post("/v1/chat/completions", json=text_body(**options))

    def connections(self) -> list[int]:
        """Of each worker, as it says to the others."""
        return [max(0, self.counters.said(worker.row, Cell.TAKES) - 1) for worker in self.workers]

    async def metric(self, name: str) -> float:
        text = (await self.ask("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def answers(url: str, path: str) -> bool:
    """With 200."""
    with suppress(OSError):
        await ask(url, path, within_s=DEADLINE_S, most_bytes=1 << 20)
        return True
    return False


def bound_at(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    return one


def feed_at(path: Path) -> socket.socket:
    """Bound there, and listening."""
    feed = bound_at(path)
    feed.listen()
    return feed


@asynccontextmanager
async def crew(count: int, *, silent: bool = False) -> AsyncIterator[Crew]:
    """With `silent` the parent has said nothing of the instances yet."""
    stage = FakeStage("PD0", Role.PD)
    rows = count + 1
    memory = shared_memory(SharedCounters.size_bytes(rows, COUNTS))
    counters = SharedCounters(mmap.mmap(memory, 0), rows, COUNTS)
    background = Background()
    async with AsyncExitStack() as stack:
        stack.callback(os.close, memory)
        path = Path(stack.enter_context(TemporaryDirectory())) / "feed"
        feed = stack.enter_context(feed_at(path))
        parent = Parent.of(counters, feed, background)
        instance = Instance("PD0", Role.PD, await stack.enter_async_context(served(stage)), "one")
        listening = stack.enter_context(bound())
        listening.listen(100)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        crew = Crew(parent, background, counters, url, stage, instance, path, listening, feed, memory)
        if not silent:
            crew.up()
        await parent.hub.start()
        stack.push_async_callback(lambda: crew.hub.stop())
        for row in range(count):
            await crew.begin(row)
        yield crew
        for signals in crew.signals:
            signals.stop.set()
        await asyncio.gather(*crew.works, return_exceptions=True)


async def watch(path: Path, row: int = 0, after: int = 0) -> bytes:
    return await ask(unix_url(path), f"/watch?row={row}&after={after}", within_s=DEADLINE_S, most_bytes=1 << 20)


async def watched(path: Path, row: int = 0) -> AsyncIterator[Told]:
    """What whoever says that it has this row is told, each time that there is news."""
    number = 0
    while True:
        if answered := await watch(path, row, number):
            told = unpacked(answered, Told)
            number = told.number
            yield told


def keys_of(told: Told) -> ApiKeys:
    return unpacked(told.keys, ApiKeys)


async def test_every_worker_says_the_same_of_instances_and_health() -> None:
    released = asyncio.Event()
    async with crew(2) as c:
        assert (await c.ask("/health")).status_code == 200
        c.stage.usual = once(released, answer)
        requests = [asyncio.create_task(c.ask()) for _ in range(6)]
        await until(lambda: c.stage.active == 6)
        for _ in range(6):
            (row,) = (await c.ask("/instances")).json()["instances"]
            assert row["in_flight"]["decode"] == 6
        released.set()
        assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
        c.down("killed")
        await until(lambda: not in_flight(c.table))
        async with asyncio.timeout(DEADLINE_S):
            while {(await c.ask("/health")).status_code for _ in range(4)} != {503}:
                pass


async def test_whichever_worker_had_a_request_it_is_found() -> None:
    async with crew(3) as c:
        names = [f"mine-{number}" for number in range(9)]
        for name in names:
            await c.ask("/v1/chat/completions", method="POST", json=text_body(), headers={"x-request-id": name})
        for name in names:
            (told,) = (await c.hub.look(Question(id=name))).requests
            assert told["client_id"] == name and told["decode"] == "PD0"
        listed = (await c.hub.look(Question(limit=5))).requests
        assert [one["client_id"] for one in listed] == names[:-6:-1]

        async def counted() -> bool:
            counts = (await c.hub.look(Question(window_s=MINUTE_S))).counts
            return counts is not None and counts.outcomes == {"200": 9} and counts.kinds["text"].requests == 9

        await until(counted)
        assert not (await c.hub.look(Question(id="nobody"))).requests


async def test_the_page_of_any_worker_shows_what_all_of_them_know() -> None:
    async with crew(2) as c:
        asked = [(await c.ask()).headers["x-request-id"] for _ in range(8)]
        for _ in range(4):
            listed = (await c.ask("/page/requests?limit=20")).json()["requests"]
            assert {one["id"] for one in listed} == set(asked)
        assert (await c.ask(f"/page/requests/{asked[0]}")).json()["request"]["id"] == asked[0]


async def test_an_open_page_holds_up_no_worker_that_ends() -> None:
    async with crew(1) as c, httpx.AsyncClient(base_url=c.url, timeout=DEADLINE_S, trust_env=False) as client:
        async with client.stream("GET", "/page/events") as answer:
            lines = answer.aiter_lines()
            while (await anext(lines)) != "event: instances":
                pass
            assert "PD0" in await anext(lines)
            c.signals[0].leave.set()
            async with asyncio.timeout(5.0):  # of the 30 s that requests would have
                await c.works[0]
                assert [line async for line in lines][-1:] == [""], "the stream ended well"


async def test_connections_that_live_long_are_shared_out() -> None:
    released = asyncio.Event()
    async with crew(3) as c:
        c.stage.usual = once(released, answer)
        requests = []
        for count in range(1, 10):  # one after the other: each finds all workers idle
            requests.append(asyncio.create_task(c.ask()))
            await until(lambda count=count: c.stage.active == count)
            await until(lambda count=count: sum(c.connections()) == count)
        # Whoever is woken first would have them all; one may slip in while another is still being polite.
        assert min(c.connections()) >= 2
        released.set()
        await asyncio.gather(*requests)


async def test_metrics_are_those_of_all_workers_and_survive_one_that_ends() -> None:
    async with crew(2) as c:
        for _ in range(6):
            assert (await c.ask()).status_code == 200
        for _ in range(4):
            assert await c.metric("epd_proxy_requests_total") == 6
        assert await c.metric("epd_proxy_workers ") == 2
        c.signals[0].leave.set()
        await c.works[0]
        c.hub.ended(c.workers[0])
        assert await c.metric("epd_proxy_requests_total") == 6
        assert await c.metric("epd_proxy_workers ") == 1
        assert await c.metric("epd_proxy_workers_ended_total") == 1


async def test_a_worker_that_is_told_to_end_finishes_what_it_has() -> None:
    released = asyncio.Event()
    async with crew(1) as c:
        c.stage.usual = once(released, answer)
        requests = asyncio.create_task(c.ask())
        await until(lambda: c.stage.active == 1)
        c.signals[0].leave.set()
        released.set()
        assert (await requests).status_code == 200
        await c.works[0]


async def test_draining_is_over_when_no_worker_has_a_request_left() -> None:
    released = asyncio.Event()
    async with crew(2) as c:
        c.stage.usual = once(released, answer)
        requests = [asyncio.create_task(c.ask()) for _ in range(4)]
        await until(lambda: c.stage.active == 4)
        c.counters.ask(Asked.DRAIN)
        async with asyncio.timeout(DEADLINE_S):
            while await c.metric("epd_proxy_draining ") < 2:
                pass
        assert (await c.ask()).status_code == 503
        await until(lambda: {c.counters.said(row, Cell.OBEYED) for row in range(2)} == {Asked.DRAIN})
        await until(lambda: c.counters.total(Cell.REQUESTS) == 4)
        released.set()
        assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
        await until(lambda: not c.counters.total(Cell.REQUESTS))


async def test_who_starts_late_knows_of_what_was_asked_before() -> None:
    async with crew(1) as c:
        c.counters.ask(Asked.LEAVE)
        await c.begin(1)
        assert c.counters.said(1, Cell.OBEYED) == Asked.LEAVE, "before it took a connection"


async def test_a_worker_whose_feed_has_ended_serves_on_and_goes_on_with_who_is_there_next(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    async with crew(1) as c:
        (worker,) = c.workers
        await c.all_know()
        before = c.published.number
        await c.hub.stop()
        await until(lambda: "the feed has ended" in caplog.text)
        assert (await c.ask()).status_code == 200, "by the last roster"
        with monkeypatch.context() as impatient:
            impatient.setattr(worker_room, "SUM_S", 0.2)
            assert (await c.ask("/metrics")).status_code == 504
        c.parent = Parent.of(c.counters, c.feed, c.background, after=c.counters.said(0, Cell.ROSTER))
        found = c.hub.expect(0, worker.url, worker.setup)
        found.serving = True
        await c.hub.start()
        await until(lambda: "the feed is back" in caplog.text)
        assert (await c.ask()).status_code == 200 and not found.told, "who knows of no instances takes none away"
        c.up()
        await c.all_know()
        assert c.published.number > before and (await c.ask()).status_code == 200
        c.down("killed")
        await c.all_know()
        assert (await c.ask("/health")).status_code == 503
        assert await c.metric("epd_proxy_workers ") == 1


async def test_a_worker_goes_on_with_its_parent_however_often_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with crew(1) as c:
        for times in range(1, 4):
            await c.all_know()
            await c.hub.stop()
            await until(lambda times=times: caplog.text.count("the feed has ended") == times)
            c.parent = Parent.of(c.counters, c.feed, c.background, after=c.counters.said(0, Cell.ROSTER))
            c.hub.expect(0, c.workers[0].url, c.workers[0].setup).serving = True
            c.up()
            await c.hub.start()
        await c.all_know()
        assert (await c.ask()).status_code == 200


async def test_all_who_watch_a_row_are_told_the_same_and_none_holds_up_another() -> None:
    async with crew(1) as c:
        stays, leaves = watched(c.path), watched(c.path)

        async def latest(several: AsyncIterator[Told]) -> Roster:
            async for told in several:
                if told.roster is not None and told.roster.number == c.published.number:
                    return told.roster
            raise AssertionError("the watch has ended")

        c.down("killed")
        heard = await latest(leaves)
        assert heard == await latest(stays) and heard.rows[0].reason == "killed"
        await c.all_know()
        waiting = asyncio.create_task(anext(leaves))
        await asyncio.sleep(0.05)
        waiting.cancel()
        c.up()
        assert (await latest(stays)).rows[0].healthy
        await c.all_know()
        assert (await c.ask()).status_code == 200


async def test_whoever_takes_nothing_is_told_the_latest_only() -> None:
    async with crew(0) as c:
        c.expect(0)
        several = watched(c.path)
        assert (await anext(several)).roster is not None
        for number in range(50):
            c.down(str(number))
        last = (await anext(several)).roster
        assert last is not None and last.number == c.published.number and last.rows[0].reason == "49"


async def test_clients_keys_are_told_with_the_instances_and_again_when_they_change() -> None:
    async with crew(0, silent=True) as c:
        c.hub.go_by(api_keys("one"))
        c.expect(0)
        several = watched(c.path)
        first = await anext(several)
        assert keys_of(first) == api_keys("one") and first.roster is None
        c.up()
        second = await anext(several)
        assert keys_of(second) == api_keys("one") and second.roster is not None
        c.hub.go_by(api_keys("two"))
        assert keys_of(await anext(several)) == api_keys("two")


async def test_who_knows_everything_is_answered_with_nothing_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "WATCH_S", 0.05)
    async with crew(0) as c:
        c.expect(0)
        first = unpacked(await watch(c.path), Told)
        c.hub.go_by(api_keys("one"))
        second = unpacked(await watch(c.path, after=first.number), Told)
        assert second.number > first.number
        c.hub.go_by(api_keys("one"))
        assert await watch(c.path, after=second.number) == b"", "the same keys are no news"


async def test_keys_that_cannot_be_gone_by_cost_no_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crew(1) as c:
        refused = list[ApiKeys]()

        def refuse(self: Callers, keys: ApiKeys) -> None:
            refused.append(keys)
            raise RuntimeError("a fault")

        with monkeypatch.context() as patched:
            patched.setattr(Callers, "go_by", refuse)
            c.hub.go_by(api_keys("one"))
            await until(lambda: refused)
            assert (await c.ask()).status_code == 200, "by those that it had"
            c.down("killed")
            await c.all_know()
        assert len(refused) > 1, "they are tried again with the next roster"
        c.up()
        await c.all_know()
        assert (await c.ask()).status_code == 401


async def test_a_roster_that_is_larger_than_any_read_is_taken_in_whole() -> None:
    async with crew(1) as c:
        rows = [Row(Instance(f"P{number}", Role.P, "http://h:1", "one"), False, "x" * 4000) for number in range(500)]
        c.published.publish([Row(c.instance, True), *rows], {Role.PD})
        assert len(packed(Told(1, c.published.roster({})))) > 1 << 20
        await c.all_know()
        told = (await c.ask("/instances")).json()["instances"]
        assert len(told) == 501 and (await c.ask()).status_code == 200


async def test_a_worker_whose_parent_has_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crew(1) as c:
        await c.hub.stop()
        c.feed.close()
        monkeypatch.setattr(os, "getppid", lambda: -1)  # 1 may be who has started this
        with pytest.raises(FeedError):
            async with asyncio.timeout(DEADLINE_S):
                await c.works[0]


async def test_what_is_said_of_the_deployment_reaches_every_worker_in_order() -> None:
    async with crew(2) as c:
        await c.all_know()
        c.published.drain("PD0")
        c.parent.say(Row(c.instance, True), Role.PD, Role.E)
        c.published.pause(DEADLINE_S)
        await c.all_know()
        for _ in range(4):
            ready = (await c.ask("/ready")).json()
            assert ready["status"] == "paused" and ready["missing"] == ["E", "PD"]
            (row,) = (await c.ask("/instances")).json()["instances"]
            assert row["draining"] and not row["up"]
        waiting = asyncio.create_task(c.ask())
        await until(lambda: c.counters.total(Cell.REQUESTS) == 1)
        c.published.drain("PD0", False)
        c.published.pause(0)
        assert (await waiting).status_code == 200


async def test_a_worker_takes_no_connection_before_it_knows_of_anything() -> None:
    async with crew(0, silent=True) as c:
        begun = asyncio.create_task(c.begin(0))
        await until(lambda: c.workers and c.path.with_name("front.0.sock").exists())
        asked = asyncio.create_task(c.ask("/health"))
        done, _ = await asyncio.wait((begun, asked), timeout=0.5)
        assert not done and not c.workers[0].told
        c.up()
        assert (await asked).status_code == 200 and await begun


async def test_what_a_worker_held_that_died_is_held_by_nobody() -> None:
    async with crew(2) as c:
        dead = SharedLedger(c.counters, 0)
        dead.place(("PD0", "one"), 0)
        Lease(dead, c.table.instance("PD0"), {Work.DECODE: 3.0, Work.KV: 500.0, Work.AHEAD: 3.0})
        assert in_flight(c.table) == 1 and counted(c.table) == 3
        settle(c.counters, 0)
        assert in_flight(c.table) == counted(c.table) == 0
        (row,) = (await c.ask("/instances")).json()["instances"]
        assert row["load"] == 0


async def test_the_parent_tells_what_all_workers_have_counted_and_what_the_table_holds() -> None:
    async with crew(2) as c:
        await asyncio.gather(*(c.ask("/v1/chat/completions", method="POST", json=text_body()) for _ in range(6)))
        families = text_string_to_metric_families((await c.hub.metrics()).decode())
        counts = {sample.name: sample.value for family in families for sample in family.samples}
        assert counts["epd_proxy_requests_total"] == 6 and counts["epd_proxy_workers"] == 2


async def test_a_roster_that_a_worker_fails_on_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crew(1) as c:
        take_in, fails = WorkerRoster.take_in, [True]

        def broken(self: WorkerRoster, roster: Roster) -> None:
            if fails and roster.number:  # that of the parent's own table has none
                raise KeyError(fails.pop())
            take_in(self, roster)

        monkeypatch.setattr(WorkerRoster, "take_in", broken)
        c.down("killed")
        await until(lambda: not fails)
        c.up()
        c.down("killed again")
        async with asyncio.timeout(DEADLINE_S):
            while (await c.ask("/health")).status_code != 503:
                pass
        assert 'epd_proxy_broken_messages_total{kind="Roster"} 1.0' in (await c.ask("/metrics")).text


async def test_what_is_down_in_the_parent_shows_in_the_readiness_of_every_worker() -> None:
    async with crew(2) as c:
        async with asyncio.timeout(DEADLINE_S):
            while {(await c.ask("/ready?all")).status_code for _ in range(4)} != {200}:
                pass

        async def fails() -> None:
            raise KeyError("oops")

        c.background.start("silence of members", fails)
        async with asyncio.timeout(DEADLINE_S):
            while {(await c.ask("/ready?all")).status_code for _ in range(4)} != {503}:
                pass
        ready = await c.ask("/ready")
        assert ready.status_code == 200 and ready.json()["down"] == {"silence of members": "KeyError: 'oops'"}
        assert 'epd_proxy_background_down{task="silence of members"} 1.0' in (await c.ask("/metrics")).text
        await c.background.stop("silence of members")


async def test_who_is_about_to_end_is_not_ready_in_any_worker_and_serves_on() -> None:
    async with crew(2) as c:
        c.counters.ask(Asked.LEAVE)
        async with asyncio.timeout(DEADLINE_S):
            while {(await c.ask("/ready")).status_code for _ in range(4)} != {503}:
                pass
        assert (await c.ask()).status_code == 200


async def test_a_worker_that_hangs_costs_who_asks_for_metrics_a_moment_and_nothing_it_had_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with crew(1) as c:
        assert (await c.ask()).status_code == 200
        await c.hub.counted()
        monkeypatch.setattr(worker_hub, "TELL_S", 0.2)
        c.workers[0].url = unix_url(c.path.with_name("hangs"))
        with feed_at(c.path.with_name("hangs")):
            async with asyncio.timeout(DEADLINE_S):
                assert b"epd_proxy_requests_total{" in (await c.hub.metrics())
                assert not (await c.hub.look(Question(limit=5))).requests
                counts = (await c.hub.look(Question(window_s=MINUTE_S))).counts
                assert counts is not None and (counts.answered, counts.serving) == (0, 1)


async def test_a_worker_that_answers_what_no_worker_does_costs_its_own_counts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_hub, "TELL_EVERY_S", 0.01)
    asked = []

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\xc1no")
        writer.close()

    async with crew(1) as c:
        assert (await c.ask()).status_code == 200
        odd = c.path.with_name("odd")
        async with await asyncio.start_unix_server(nonsense, odd):
            c.hub.expect(1, unix_url(odd), c.workers[0].setup).serving = True
            assert await c.metric("epd_proxy_requests_total") == 1
            assert len((await c.hub.look(Question(limit=5))).requests) == 1
            counts = (await c.hub.look(Question(window_s=MINUTE_S))).counts
            assert counts is not None and (counts.answered, counts.serving) == (1, 2)
            assert counts.kinds["text"].requests == 1
            seen = len(asked)
            await until(lambda: len(asked) > seen + 2, "it is asked again and again, as all are")


async def test_who_is_not_expected_is_told_nothing() -> None:
    async with crew(1) as c:
        transport = httpx.AsyncHTTPTransport(uds=str(c.path))
        async with httpx.AsyncClient(transport=transport, timeout=DEADLINE_S, trust_env=False) as client:
            for path in ("/watch?row=1&after=0", "/watch?row=-1&after=0", "/setup?row=1", "/"):
                answered = await client.get(f"http://feed{path}")
                assert answered.status_code == 404 and b"PD0" not in answered.content
        _, writer = await asyncio.open_unix_connection(c.path)
        writer.write(packed(Told(1)))
        writer.close()
        assert (await c.ask()).status_code == 200


def answered(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def parent_that_says(folder: Path, *answers: bytes) -> AsyncIterator[Path]:
    """To the first who asks, to the second, and so on."""
    left = list(answers)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(left.pop(0))
        writer.close()

    async with await asyncio.start_unix_server(say, folder / "feed"):
        yield folder / "feed"


@pytest.mark.parametrize("wrong", [packed(Told(1)), b"\xc1"], ids=["a roster", "nonsense"])
async def test_a_parent_that_says_what_no_parent_says_is_not_gone_by(tmp_path: Path, wrong: bytes) -> None:
    async with parent_that_says(tmp_path, answered(wrong)) as path:
        with pytest.raises(FeedError):
            await Feed(path, 0).setup()


async def test_a_worker_asks_until_somebody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "RECONNECT_S", 0.01)
    setup = Setup(settings(), 1, 1.0, 1.0, 1.0)
    whole = answered(packed(setup))
    refused = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    async with parent_that_says(tmp_path, refused, b"what?\r\n\r\n", whole[:-1], whole) as path:
        async with asyncio.timeout(DEADLINE_S):
            assert await Feed(path, 0).setup() == setup
