"""Workers and their parent in one event loop: real feeds, one real listening socket, fake stages."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.background import Background
from proxy.config.limits import Timeouts
from proxy.page.observed import Observed
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.instance_state import Lease, Work
from proxy.workers import hub as worker_hub
from proxy.workers.hub import Worker, WorkerHub
from proxy.workers.roster import ParentTable, WorkerRoster
from proxy.workers.shared_counters import Asked, SharedCounters, shared_memory
from proxy.workers.shared_ledger import COUNTS, SharedLedger, settle
from proxy.workers.wire import FeedError, Hello, Roster, Serving, Setup, frame, from_parent
from proxy.workers.worker import WorkerSignals, run_worker
from tests.proxy.fakes import FakeStage, answer, api_keys, bound, in_flight, once, served, settings, text_body
from tests.waiting import until

DEADLINE_S = 60.0
PATIENT = Timeouts()  # requests are held for as long as a test takes


@dataclass
class Doors:
    """What the page asks of all front doors."""

    table: ParentTable
    deployment: Any = None

    async def look(self, question: Question) -> RecordsAnswer:
        return await self.hub.look(question)

    hub: Any = None


@dataclass
class Crew:
    """A parent with workers that share one socket."""

    table: ParentTable
    hub: WorkerHub
    background: Background
    counters: SharedCounters
    url: str
    stage: FakeStage
    path: Path
    listening: socket.socket
    feed: socket.socket
    memory: int
    signals: list[WorkerSignals] = field(default_factory=list)
    works: list[asyncio.Task[None]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    async def begin(self, row: int, setup: Setup | None = None) -> Worker:
        """Another worker, which serves."""
        worker = self.hub.expect(row, setup or Setup(settings(timeouts=PATIENT), self.counters.rows, 1.0, 30.0, 1.0))
        signals, copy = WorkerSignals(), socket.socket(fileno=os.dup(self.listening.fileno()))
        self.workers.append(worker)
        self.signals.append(signals)
        self.works.append(asyncio.create_task(run_worker(self.path, row, copy, self.memory, signals)))
        await until(lambda: worker.serving)
        return worker

    async def ask(self, path: str = "", **options: Any) -> httpx.Response:
        """On a connection of its own, so that any worker may take it."""
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False) as client:
            if path:
                return await client.request(options.pop("method", "GET"), path, **options)
            return await client.post("/v1/chat/completions", json=text_body(**options))

    def connections(self) -> list[int]:
        """Of each worker, as it says to the others."""
        return [self.counters.connections(worker.row) or 0 for worker in self.workers]

    async def metric(self, name: str) -> float:
        text = (await self.ask("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def feed_at(path: Path) -> socket.socket:
    """Bound there, and listening."""
    feed = socket.socket(socket.AF_UNIX)
    feed.bind(str(path))
    feed.listen()
    return feed


@asynccontextmanager
async def crew(count: int) -> AsyncIterator[Crew]:
    stage = FakeStage("PD0", Role.PD)
    rows = count + 1
    memory = shared_memory(SharedCounters.size_bytes(rows, COUNTS))
    counters = SharedCounters(mmap.mmap(memory, 0), rows, COUNTS)
    table = ParentTable(ledger=SharedLedger(counters, None))
    background = Background()
    async with AsyncExitStack() as stack:
        stack.callback(os.close, memory)
        path = Path(stack.enter_context(TemporaryDirectory())) / "feed"
        feed = stack.enter_context(feed_at(path))
        doors = Doors(table)
        hub = doors.hub = WorkerHub(table, feed.dup(), background, Observed(doors))
        table.apply(Instance("PD0", Role.PD, await stack.enter_async_context(served(stage)), "one"))
        listening = stack.enter_context(bound())
        listening.listen(100)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        crew = Crew(table, hub, background, counters, url, stage, path, listening, feed, memory)
        await hub.start()
        stack.push_async_callback(lambda: crew.hub.stop())
        for row in range(count):
            await crew.begin(row)
        yield crew
        for signals in crew.signals:
            signals.stop.set()
        await asyncio.gather(*crew.works, return_exceptions=True)


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
        c.table.mark_down("PD0", "killed")
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
            minute = (await c.hub.look(Question(minute=True))).minute
            return minute is not None and minute.outcomes == {"200": 9}

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
        await until(lambda: {c.counters.obeyed(row) for row in range(2)} == {Asked.DRAIN})
        await until(lambda: sum(map(c.counters.requests, range(2))) == 4)
        released.set()
        assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
        await until(lambda: not any(map(c.counters.requests, range(2))))


async def test_who_starts_late_knows_of_what_was_asked_before() -> None:
    async with crew(1) as c:
        c.counters.ask(Asked.LEAVE)
        await c.begin(1)
        assert c.counters.obeyed(1) is Asked.LEAVE, "before it took a connection"


async def test_a_worker_whose_feed_has_ended_serves_on_and_goes_on_with_who_is_there_next() -> None:
    async with crew(1) as c:
        (worker,) = c.workers
        await until(lambda: c.counters.roster(0) == c.table.number)
        await c.hub.stop()
        await until(lambda: worker.parted)
        assert (await c.ask()).status_code == 200, "by the last roster"
        assert (await c.ask("/metrics")).status_code == 504
        table = ParentTable(ledger=SharedLedger(c.counters, None), after=c.counters.roster(0))
        doors = Doors(table)
        c.hub = doors.hub = WorkerHub(table, c.feed.dup(), c.background, Observed(doors))
        found = c.hub.expect(0, worker.setup)
        await c.hub.start()
        await until(lambda: found.serving)
        assert (await c.ask()).status_code == 200 and not found.told, "who knows of no instances takes none away"
        table.want((Role.PD,))
        table.apply(c.table.instance("PD0"))
        await until(lambda: c.counters.roster(0) == table.number)
        assert table.number > c.table.number and (await c.ask()).status_code == 200
        table.mark_down("PD0", "killed")
        await until(lambda: c.counters.roster(0) == table.number)
        assert (await c.ask("/health")).status_code == 503
        await until(lambda: c.metric("epd_proxy_workers "))


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
        await until(lambda: {c.counters.roster(row) for row in range(2)} == {c.table.number})
        c.table.drain("PD0")
        c.table.want((Role.PD, Role.E))
        c.table.pause_for(DEADLINE_S)
        await until(lambda: {c.counters.roster(row) for row in range(2)} == {c.table.number})
        for _ in range(4):
            ready = (await c.ask("/ready")).json()
            assert ready["status"] == "paused" and ready["missing"] == ["E", "PD"]
            (row,) = (await c.ask("/instances")).json()["instances"]
            assert row["draining"] and not row["up"]
        waiting = asyncio.create_task(c.ask())
        await until(lambda: sum(map(c.counters.requests, range(2))) == 1)
        c.table.drain("PD0", False)
        c.table.pause_for(0)
        assert (await waiting).status_code == 200


async def test_a_worker_takes_no_connection_before_it_knows_of_anything() -> None:
    async with crew(0) as c:
        c.table.number = 0  # as before anything was said
        begun = asyncio.create_task(c.begin(0))
        await until(lambda: c.workers and c.workers[0].writer is not None)
        asked = asyncio.create_task(c.ask("/health"))
        done, _ = await asyncio.wait((begun, asked), timeout=0.5)
        assert not done
        c.table.want((Role.PD,))
        assert (await asked).status_code == 200 and await begun


async def test_what_a_worker_held_that_died_is_held_by_nobody() -> None:
    async with crew(2) as c:
        dead = SharedLedger(c.counters, 0)
        Lease(dead, c.table.instance("PD0"), Work.DECODE, 3.0)
        assert in_flight(c.table) == 1
        settle(c.counters, 0)
        assert in_flight(c.table) == 0
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
            if fails:
                raise KeyError(fails.pop())
            take_in(self, roster)

        monkeypatch.setattr(WorkerRoster, "take_in", broken)
        c.table.mark_down("PD0", "killed")
        await until(lambda: not fails)
        c.table.mark_up("PD0")
        c.table.mark_down("PD0", "killed again")
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


@asynccontextmanager
async def expecting(*frames: bytes) -> AsyncIterator[Worker]:
    """What becomes of a worker that says this."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "feed"
        table = ParentTable()
        hub = WorkerHub(table, feed_at(path), Background(), Observed(Doors(table)))
        await hub.start()
        worker = hub.expect(0, Setup(settings(), 1, 1.0, 1.0, 1.0))
        _, writer = await asyncio.open_unix_connection(path)
        for one in frames:
            writer.write(one)
        yield worker
        writer.close()
        await hub.stop()


async def test_a_worker_that_says_nothing_any_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "HUNG_S", 0.01)
    async with expecting(frame(Hello(0)), frame(Serving())) as worker:
        await until(lambda: worker.parted)
        assert worker.trouble.startswith("no word for")


@pytest.mark.parametrize("wrong", [frame(Roster(1, ())), frame(Hello(0)), (1 << 31).to_bytes(4, "big")])
async def test_a_worker_that_says_what_no_worker_says_is_noticed(wrong: bytes) -> None:
    async with expecting(frame(Hello(0)), wrong) as worker:
        await until(lambda: worker.parted)
        assert worker.trouble


async def test_who_is_not_expected_is_not_talked_with() -> None:
    async with crew(1) as c:
        for first in (frame(Hello(1)), frame(Serving()), b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(c.path)
            writer.write(first)
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.read() == b""
            writer.close()
        assert not c.workers[0].trouble and (await c.ask()).status_code == 200


def test_settings_travel_whole() -> None:
    setup = Setup(settings(arena=Path("/a"), modalities=frozenset({"image"}), api_keys=api_keys("k")), 2, 3.0, 4.0, 5.0)
    assert from_parent.decode(frame(setup)[4:]) == setup
