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
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.errors import EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.background import Background
from proxy.config.limits import Timeouts
from proxy.registry.instance_state import Lease, Work
from proxy.server.uvicorn_server import bind
from proxy.workers import hub as worker_hub
from proxy.workers.hub import WorkerHub
from proxy.workers.roster import ParentTable, WorkerRoster
from proxy.workers.shared_counters import SharedCounters, shared_memory
from proxy.workers.shared_ledger import COUNTS, SharedLedger, settle
from proxy.workers.wire import FeedError, Roster, Serving, Setup, frame, from_parent
from proxy.workers.worker import WorkerSignals, run_worker
from tests.proxy.fakes import FakeStage, answer, in_flight, once, served, settings, text_body
from tests.waiting import until

DEADLINE_S = 60.0
PATIENT = Timeouts()  # requests are held for as long as a test takes


@dataclass
class Crew:
    """A parent with workers that share one socket."""

    table: ParentTable
    hub: WorkerHub
    background: Background
    counters: SharedCounters
    url: str
    stage: FakeStage
    signals: list[WorkerSignals] = field(default_factory=list)
    works: list[asyncio.Task[None]] = field(default_factory=list)
    attends: list[asyncio.Task[None]] = field(default_factory=list)

    async def ask(self, path: str = "", **options: Any) -> httpx.Response:
        """On a connection of its own, so that any worker may take it."""
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False) as client:
            if path:
                return await client.request(options.pop("method", "GET"), path, **options)
            return await client.post("/v1/chat/completions", json=text_body(**options))

    def connections(self) -> list[int]:
        """Of each worker, as it says to the others."""
        return [self.counters.connections(row) or 0 for row in range(self.counters.rows)]

    async def metric(self, name: str) -> float:
        text = (await self.ask("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def crew(count: int) -> AsyncIterator[Crew]:
    stage = FakeStage("PD0", Role.PD)
    memory = shared_memory(SharedCounters.size_bytes(count, COUNTS))
    counters = SharedCounters(mmap.mmap(memory, 0), count, COUNTS)
    table = ParentTable(ledger=SharedLedger(counters, None))
    setup = Setup(settings(timeouts=PATIENT), 0, count, 1.0, 30.0, 1.0)
    background = Background()
    hub = WorkerHub(table, setup, background)
    async with AsyncExitStack() as stack:
        stack.callback(os.close, memory)
        table.apply(Instance("PD0", Role.PD, await stack.enter_async_context(served(stage)), "one"))
        listening = stack.enter_context(bind("127.0.0.1", 0))
        listening.listen(100)
        crew = Crew(table, hub, background, counters, f"http://127.0.0.1:{listening.getsockname()[1]}", stage)
        hub.start()
        stack.push_async_callback(hub.stop)
        for row in range(count):
            ours, theirs = socket.socketpair()
            serving, signals = asyncio.Event(), WorkerSignals()
            copy = socket.socket(fileno=os.dup(listening.fileno()))
            crew.signals.append(signals)
            crew.works.append(asyncio.create_task(run_worker(theirs, copy, memory, signals)))
            crew.attends.append(asyncio.create_task(hub.attend(row, ours, serving.set)))
            async with asyncio.timeout(DEADLINE_S):
                await serving.wait()
        yield crew
        for signals in crew.signals:
            signals.stop.set()
        await asyncio.gather(*crew.works, *crew.attends, return_exceptions=True)


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
        await c.attends[0]
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
        c.hub.begin()
        idle = asyncio.create_task(c.hub.idle())
        async with asyncio.timeout(DEADLINE_S):
            while await c.metric("epd_proxy_draining ") < 2:
                pass
        assert (await c.ask()).status_code == 503
        await until(lambda: c.hub.running == 4)
        assert not idle.done()
        released.set()
        assert {one.status_code for one in await asyncio.gather(*requests)} == {200}
        async with asyncio.timeout(DEADLINE_S):
            await idle
        assert c.hub.running == 0


async def test_a_worker_whose_parent_has_gone_ends() -> None:
    async with crew(1) as c:
        c.attends[0].cancel()
        async with asyncio.timeout(DEADLINE_S):
            await c.works[0]


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

        def broken(self: WorkerRoster, rows: Any) -> None:
            if fails:
                raise KeyError(fails.pop())
            take_in(self, rows)

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
        c.hub.announce()
        async with asyncio.timeout(DEADLINE_S):
            while {(await c.ask("/ready")).status_code for _ in range(4)} != {503}:
                pass
        assert (await c.ask()).status_code == 200


async def test_a_worker_that_says_nothing_any_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hub, "HUNG_S", 0.01)
    hub = WorkerHub(ParentTable(), Setup(settings(), 0, 1, 1.0, 1.0, 1.0), Background())
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(frame(Serving()))
        with pytest.raises(EpdError, match="no word for"):
            async with asyncio.timeout(DEADLINE_S):
                await hub.attend(0, ours, lambda: None)
    assert hub.serving == 0


async def test_a_worker_that_says_what_no_worker_says_is_noticed() -> None:
    hub = WorkerHub(ParentTable(), Setup(settings(), 0, 1, 1.0, 1.0, 1.0), Background())
    for raw_frame in (frame(Roster(())), (1 << 31).to_bytes(4, "big")):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(raw_frame)
            with pytest.raises(FeedError):
                async with asyncio.timeout(DEADLINE_S):
                    await hub.attend(0, ours, lambda: None)


def test_settings_travel_whole() -> None:
    setup = Setup(settings(arena=Path("/a"), modalities=frozenset({"image"}), api_keys=("k",)), 1, 2, 3.0, 4.0, 5.0)
    assert from_parent.decode(frame(setup)[4:]) == setup
